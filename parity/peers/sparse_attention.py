"""torch.compile of sparse attention over bfloat16 rows, 128 queries at a time as the gathered rows must fit."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.graphs import captured

TILE = 128


def attend(q, rows, ids, sink):
    """Queries [T, N, H] over rows[ids], ids [T, K], -1 reads nothing."""
    found = rows[ids.clamp(min=0)]
    scores = torch.einsum("tnh,tkh->tnk", q, found).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(ids[:, None] < 0, float("-inf"))
    top = torch.maximum(scores.amax(-1), sink)[..., None]
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top)
    return torch.einsum("tnk,tkh->tnh", p.bfloat16(), found) / total


def attention(q, window, window_ids, main, main_ids, sink):
    rows = torch.cat((window[0], main[0]))
    ids = torch.cat((window_ids[0], torch.where(main_ids[0] < 0, -1, main_ids[0] + window.shape[1])), 1)
    return torch.cat([attend(q[0, t : t + TILE], rows, ids[t : t + TILE], sink) for t in range(0, q.shape[1], TILE)])


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface; packed rows have no number type in PyTorch to compile to."""
    bfloat16 = inputs[1].dtype == inputs[0].dtype and inputs[0].shape[0] == 1
    return {"torch.compile": captured(attention, *inputs)} if bfloat16 else {}
