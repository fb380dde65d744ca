"""PyTorch's grouped product for the experts' launches, of bfloat16 weights: dequantized before, they take four times
the memory (18 GB for w1 and w3), and no other form of them has a grouped product there. SwiGLU is compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn.functional import grouped_mm, silu

from pallas_kernels.hopper.fragments import FP4
from parity.peers.formats import e2m1, e8m0
from parity.peers.graphs import Formula, captured, compiled, tensor

LIMIT, AT_ONCE = 10.0, 16


def swiglu(gate, up, weights):
    gate, up = gate.float().clamp(max=LIMIT), up.float().clamp(-LIMIT, LIMIT)
    return (silu(gate) * up * weights[:, None]).bfloat16()


def dense(codes, scale):
    """Weights [E, K, N] that lie as [E, N, K], some experts at a time."""
    parts = zip(codes.split(AT_ONCE), scale.split(AT_ONCE), strict=True)
    return torch.cat([(e2m1(c) * e8m0(s).repeat_interleave(32, -1)).bfloat16() for c, s in parts]).mT


def arrays(inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """(x in the order of its columns, weights, where each expert's rows end, one or two dense matrices an expert)."""
    x, weights, expert, _, live, tiles, *rest = inputs
    order = jnp.argsort(FP4.permute(jnp.arange(x.shape[1])))
    used = jnp.where(jnp.arange(len(expert)) < tiles[0], live, 0)
    sizes = jnp.zeros(len(rest[0]), jnp.int32).at[expert].add(used)
    ends = jnp.cumsum(-(-sizes // 8) * 8, dtype=jnp.int32)  # an expert's rows start at a multiple of 8
    given = (tensor(jax.block_until_ready(a)) for a in (x[:, order], weights, ends))
    return *given, *(dense(tensor(c), tensor(s)) for c, s in zip(rest[::2], rest[1::2], strict=True))


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """What a launch computes, of `arrays`."""
    activate = compile(swiglu)

    def run(x, weights, ends, first, second=None):
        value = grouped_mm(x, first, offs=ends)
        return value if second is None else activate(value, grouped_mm(x, second, offs=ends), weights)

    return run


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface; of the launches, not of the whole operation."""
    if case.name.startswith("experts"):
        return {}
    return {"grouped_mm (bf16 weights)": captured(formula(case, compiled), *arrays(inputs))}
