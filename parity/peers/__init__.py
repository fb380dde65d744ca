"""PyTorch's compiler on the formulas of the kernels: `python -m pallas_kernels.bench --peers parity/peers`."""
