"""torch.compile of an FP8 layer: dequantize by 32 x 32 blocks, then a bfloat16 product."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from parity.peers.graphs import captured


def linear(x, codes, scale):
    weight = codes.view(torch.float8_e4m3fn).float()
    factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return x @ (weight * factor).bfloat16().T


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    x, weight, scale = inputs
    return {"torch.compile": captured(linear, x, jax.lax.bitcast_convert_type(weight, "uint8"), scale)}
