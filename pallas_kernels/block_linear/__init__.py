"""Dense linear layers whose weights stay FP8: E4M3 with one E8M0 scale per 32x32 block (paper 2.5)."""

import jax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.block_linear import reference
from pallas_kernels.target import use_kernel

__all__ = ["block_diagonal", "block_linear"]


def block_linear(
    x: Float[Array, "*lead K"], weight: Float[Array, "N K"], scale: Shaped[Array, "n k"], *, backend: str = "xla"
) -> Float[jax.Array, "*lead N"]:
    """x W^T with W[i, j] = weight[i, j] * scale[i // 32, j // 32]: float32 sums, rounded once to the dtype of x.

    `weight` is float8_e4m3fn as the checkpoint has it, `scale` float8_e8m0fnu or its bytes. The activation quantizer
    of x stands before this. The kernel takes bfloat16 x, N in multiples of 256 and K in multiples of 128; others raise.
    Source: the released program's fp8_gemm; weight_block_size of the config.
    """
    if use_kernel("block_linear", backend, "mosaic"):
        from pallas_kernels.block_linear import kernel

        return kernel.block_linear(x, weight, scale)
    return reference.block_linear(x, weight, scale)


def block_diagonal(
    x: Float[Array, "*lead G K"], weight: Float[Array, "GN K"], scale: Shaped[Array, "n k"], *, backend: str = "xla"
) -> Float[jax.Array, "*lead G N"]:
    """y[g] = x[g] W[g]^T with W[g] rows g N .. g N + N - 1 of W: as `block_linear`, each group with its own rows.

    The kernel reads all of W in one launch. Source: the released program's grouped output projection (`wo_a`), whose
    input is not quantized; config keys o_groups, o_lora_rank.
    """
    if use_kernel("block_linear.block_diagonal", backend, "mosaic"):
        from pallas_kernels.block_linear import kernel

        return kernel.block_diagonal(x, weight, scale)
    return reference.block_diagonal(x, weight, scale)
