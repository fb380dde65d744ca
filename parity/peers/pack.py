"""torch.compile of cached rows: norm, rope, quantization, and the write by slot."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.formats import e2m1_pairs, e8m0, e8m0_ceil, rounded
from parity.peers.graphs import Formula, captured, compiled, tensor

EPS = 1e-20


def fp8(v):
    groups = v.unflatten(-1, (-1, 32))
    scale = e8m0_ceil(groups.abs().amax(-1).clamp(min=1e-4) * (1 / 448))
    codes = (groups * e8m0(254 - scale)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten(-2), scale


def mxfp4(v):
    groups = v.unflatten(-1, (-1, 32))
    scale = e8m0_ceil(groups.abs().amax(-1).clamp(min=6 * 2.0**-126) * (1 / 6))
    return e2m1_pairs(groups, e8m0(scale)[..., None]).flatten(-2), scale


def nvfp4(v):
    groups = v.unflatten(-1, (-1, 16))
    ratio = groups.abs().amax(-1).clamp(min=6 * 2.0**-9).double() / 6  # exact at ties, as float32 on a GPU may not be
    scale = ratio.float().clamp(max=448).to(torch.float8_e4m3fn)
    return e2m1_pairs(groups, scale.float()[..., None]).flatten(-2), scale.view(torch.uint8)


def insert(store, x, positions, slots, freqs, norm, *, quantize):
    """Writes into `store`, whose last slot takes what is to be kept nowhere."""
    v = x.float()
    v = rounded(norm.float() * (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + EPS)))
    rotary = 2 * freqs.shape[0]
    angle = positions.float()[..., None] * freqs
    even, odd = v[..., -rotary::2], v[..., 1 - rotary :: 2]
    turned = torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1)
    v = torch.cat((v[..., :-rotary], rounded(turned.flatten(-2))), -1)
    nowhere = store.shape[1] - 1
    slot = torch.where((slots >= 0) & (slots < nowhere), slots, nowhere).long()
    batch = torch.arange(len(store), device=store.device)[:, None].expand_as(slot)
    store[batch, slot] = torch.cat(quantize(v), -1)
    return store


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """What the case computes, of its own arrays but for a store of one slot more."""
    quantize = {"window": fp8, "main": nvfp4, "index": mxfp4}[case.name.split("-")[0]]
    # No partial function: the compiler would look for this module by its name, which the benchmark gives it.
    return compile(lambda *arrays: insert(*arrays, quantize=quantize))


def arrays(inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The case's arrays with a slot more."""
    store, *rest = (tensor(array) for array in inputs)
    return torch.nn.functional.pad(store, (0, 0, 0, 1)), *rest


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    return {"torch.compile": captured(formula(case, compiled), *arrays(inputs))}
