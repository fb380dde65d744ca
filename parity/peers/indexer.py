"""torch.compile of the index scores of bfloat16 keys, 64 queries at a time as every head's score must fit."""

from collections.abc import Callable
from typing import Any

import torch

from parity.peers.graphs import captured

TILE = 64


def scores(q, keys, weights):
    def tile(t):
        dot = torch.einsum("tij,sj->tis", q[0, t : t + TILE], keys[0])
        return (dot.relu() * weights[0, t : t + TILE, :, None]).float().sum(1).bfloat16()

    return torch.cat([tile(t) for t in range(0, q.shape[1], TILE)])


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface; packed keys have no number type in PyTorch to compile to."""
    if inputs[1].dtype != inputs[0].dtype or len(inputs) > 4 or inputs[0].shape[0] > 1:
        return {}
    return {"torch.compile": captured(scores, *inputs[:3])}
