"""A PyTorch formula compiled and captured in a CUDA graph, on the benchmark's own arrays: its peer interface."""

from collections.abc import Callable
from typing import Any

import jax
import torch

L2_BYTES = 160 << 20


def captured(formula: Callable[..., Any], *arrays: jax.Array, compiled: bool = True) -> Callable[[int], None]:
    """`run(n)`: n calls of torch.compile(formula), one after the other in one graph, on rotating copies of the arrays
    that the L2 cache cannot hold."""
    first = tuple(torch.from_dlpack(array) for array in arrays)
    size = sum(t.numel() * t.element_size() for t in first)
    sets = [first, *(tuple(t.clone() for t in first) for _ in range(min(31, L2_BYTES // max(size, 1))))]
    function = torch.compile(formula, dynamic=False) if compiled else formula
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*first)
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
        graphs[n].replay()
        torch.cuda.synchronize()

    return run
