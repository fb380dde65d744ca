"""torch.compile of a window row: norm, rope, E4M3 in groups of 32, and the write by slot."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.graphs import captured


def window(store, x, positions, slots, freqs, norm):
    v = x.float()
    v = (norm.float() * (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-20))).bfloat16().float()
    rotary = 2 * freqs.shape[0]
    angle = positions.float()[..., None] * freqs
    even, odd = v[..., -rotary::2], v[..., 1 - rotary :: 2]
    turned = torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1)
    v = torch.cat((v[..., :-rotary], turned.flatten(-2).bfloat16().float()), -1).unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(v.abs().amax(-1).clamp(min=1e-4) / 448))
    codes = (v * torch.exp2(-exponent)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    rows = torch.cat((codes.flatten(-2), (exponent + 127).to(torch.uint8)), -1)
    batch = torch.arange(len(store), device=store.device)[:, None].expand_as(slots)
    store[batch, slots.long().clamp(0, store.shape[1] - 1)] = rows
    return rows


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface. The other two layouts have no number type in PyTorch to compile to."""
    return {"torch.compile": captured(window, *inputs)} if case.name.startswith("window") else {}
