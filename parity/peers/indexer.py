"""torch.compile of the index scores, 64 queries at a time as every head's score must fit, then torch.topk, which leaves
open which of equal scores is taken."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from parity.peers.formats import mxfp4_row, rounded
from parity.peers.graphs import Formula, captured, compiled

TILE, SIZE, COUNT, CANDIDATES = 64, 8, 512, 2048


def score(q, keys, weights):
    """Scores [X, T, S] of queries [X, T, I, J] against keys [X, S, J]."""
    dot = (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])
    return rounded(dot.relu().float() * weights[..., None].float()).sum(2).bfloat16()


def unpack(keys):
    return mxfp4_row(keys).bfloat16() if keys.dtype == torch.uint8 else keys


def scores(q, keys, weights, visible, *, score, unpack):
    keys = unpack(keys)
    tiles = zip(q.split(TILE, 1), weights.split(TILE, 1), strict=True)
    return torch.cat([score(some, keys, weight) for some, weight in tiles], 1)


def seen(score, entries, visible):
    """Scores of entries (ids) that a query sees, else -inf."""
    return score.masked_fill(~((entries >= 0) & (entries < visible[..., None])), float("-inf"))


def best_entries(score, entries, count):
    """The `count` best of entries [B, T, S], in ascending order."""
    return entries.gather(-1, score.topk(count, sorted=False).indices).sort().values


def select(q, keys, weights, visible, *, candidates, score, unpack, count=COUNT):
    entries = torch.arange(keys.shape[1], device=q.device).expand(*visible.shape, -1)
    found = seen(score(q, unpack(keys), weights), entries, visible)
    if not candidates:
        return best_entries(found, entries, count), None
    block = entries[..., : found.shape[-1] // SIZE]
    best = found.unflatten(-1, (-1, SIZE)).amax(-1)
    best = best.masked_fill(block == (visible[..., None] - 1) // SIZE, float("inf"))
    return best_entries(found, entries, count), best_entries(best, block, candidates)


def pooled(q, keys, weights, visible, blocks, *, score, unpack, count=COUNT):
    """Of each query's own blocks, which ascend and end in -1."""
    entries = (blocks[..., None] * SIZE + torch.arange(SIZE, device=q.device)).flatten(-2).long()
    batch = torch.arange(len(keys), device=q.device)[:, None, None]
    rows = unpack(keys[batch, entries.clamp(min=0)])
    found = score(q.flatten(0, 1)[:, None], rows.flatten(0, 1), weights.flatten(0, 1)[:, None])
    return best_entries(seen(found.view(entries.shape), entries, visible), entries, count), None


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """What the case computes, of its own arrays; of scores without their maxima, all queries."""
    parts = {"score": compile(score), "unpack": compile(unpack)}
    if "pools" in case.name:
        return partial(pooled, **parts)
    if case.name.startswith("select"):
        return partial(select, candidates=CANDIDATES if "candidates" in case.name else 0, **parts)
    return partial(scores, **parts)


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    return {"torch.compile": captured(formula(case, compiled), *inputs)}
