"""torch.compile of sparse attention, 128 queries at a time as the gathered rows must fit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from parity.peers.formats import fp8_row, nvfp4_row
from parity.peers.graphs import Formula, captured, compiled

TILE = 128


def product(a, b):
    """Batched bfloat16 product, in float32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def rows(table, entry, ids, unpack):
    """Values [queries, K, H] of rows `ids` of each query's sequence."""
    found = table[entry[:, None], ids.clamp(min=0)]
    return found if unpack is None else unpack(found).bfloat16()


def attend(q, entry, window, window_ids, main, main_ids, sink):
    """Queries [queries, N, H] of sequences `entry` over their rows; -1 reads nothing."""
    packed = window.dtype == torch.uint8
    sources = (window, window_ids, fp8_row if packed else None), (main, main_ids, nvfp4_row if packed else None)
    found = torch.cat([rows(table, entry, ids, unpack) for table, ids, unpack in sources], 1)
    ids = torch.cat((window_ids, main_ids), 1)
    scores = product(q, found.mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(ids[:, None] < 0, float("-inf"))
    top = torch.maximum(scores.amax(-1), sink)
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1) + torch.exp(sink - top)
    return (product(p.bfloat16(), found) / total[..., None]).bfloat16(), top + total.log()


def attention(q, window, window_ids, main, main_ids, sink, *, attend):
    lead = q.shape[:2]
    entry = torch.arange(lead[0], device=q.device).repeat_interleave(lead[1])
    queries = (q.flatten(0, 1), entry, window_ids.flatten(0, 1), main_ids.flatten(0, 1))
    tiles = zip(*(x.split(TILE) for x in queries), strict=True)
    found = [attend(q, entry, window, near, main, far, sink) for q, entry, near, far in tiles]
    return tuple(torch.cat(part).unflatten(0, lead) for part in zip(*found, strict=True))


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """What the case computes, of its own arrays."""
    return partial(attention, attend=compile(attend))


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    return {"torch.compile": captured(formula(case, compiled), *inputs)}
