"""torch.compile of an FP8 layer: dequantize by 32 x 32 blocks, then a bfloat16 product, or one for each row block."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.formats import e8m0
from parity.peers.graphs import Formula, captured, compiled


def linear(x, weight, scale):
    rows, columns = weight.shape
    factor = e8m0(scale).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    dense = (weight.float() * factor).bfloat16()
    if x.ndim == 2:
        return x @ dense.T
    return torch.bmm(x.transpose(0, 1), dense.unflatten(0, (x.shape[1], -1)).mT).transpose(0, 1)


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """What the case computes, of its own arrays."""
    return compile(linear)


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    return {"torch.compile": captured(formula(case, compiled), *inputs)}
