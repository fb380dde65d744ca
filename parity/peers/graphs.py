"""PyTorch formulas compiled, and captured in CUDA graphs on the benchmark's own arrays: its peer interface."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

L2_BYTES = 160 << 20
MOST_SHAPES = 64  # compiled for one formula; past its own limit of 8 PyTorch would stop compiling
Formula = Callable[..., Any]


def compiled(formula: Formula) -> Formula:
    """torch.compile for fixed shapes, whole or not at all."""
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    return torch.compile(formula, dynamic=False, fullgraph=True)


def tensor(array: jax.Array) -> torch.Tensor:
    """The array as a tensor over the same memory. FP8 travels as bytes: DLPack need not know it."""
    if array.dtype == jnp.float8_e4m3fn:
        return torch.from_dlpack(jax.lax.bitcast_convert_type(array, jnp.uint8)).view(torch.float8_e4m3fn)
    return torch.from_dlpack(array)


def captured(function: Formula, *arrays: jax.Array | torch.Tensor) -> Callable[[int], None]:
    """`run(n)`: n calls of the function, one after the other in one CUDA graph, on rotating copies of the arrays that
    the L2 cache cannot hold. JAX's arrays are copied too: they never change, and a formula may write to its arguments.
    """
    torch.cuda.empty_cache()  # what an earlier case's graphs held
    first = tuple(a if isinstance(a, torch.Tensor) else tensor(a).clone() for a in arrays)
    size = sum(t.numel() * t.element_size() for t in first)
    sets = [first, *(tuple(t.clone() for t in first) for _ in range(min(31, L2_BYTES // max(size, 1))))]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*sets[0])
    torch.cuda.synchronize()
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(n: int) -> None:
        if n not in graphs:
            graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[n]):
                for i in range(n):
                    function(*sets[i % len(sets)])
        graphs[n].replay()
        torch.cuda.synchronize()

    return run
