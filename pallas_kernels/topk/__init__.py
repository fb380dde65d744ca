"""Exact, deterministic selection of the best entries of a row."""

import jax
from jaxtyping import Array, Float32, Int32

from pallas_kernels import require_xla
from pallas_kernels.topk import reference

__all__ = ["finish", "merge", "start", "topk"]

Best = reference.Best


def start(lead: tuple[int, ...], count: int) -> Best:
    """An empty running best of `count` entries for each row of shape `lead`: (scores, ids), best first."""
    return reference.start(lead, count)


def merge(kept: Best, scores: Float32[Array, "*lead S"], ids: Int32[Array, "*lead S"], *, backend: str = "xla") -> Best:
    """The running best after one more tile of scores. Ids of a tile ascend and exceed those of the tiles before."""
    require_xla("topk", backend)
    return reference.merge(kept, scores, ids)


def finish(kept: Best) -> Int32[Array, "*lead C"]:
    """The ids of a running best, ascending, the tail filled with -1."""
    return reference.finish(kept)


def topk(scores: Float32[Array, "*lead S"], count: int, *, backend: str = "xla") -> Int32[jax.Array, "*lead {count}"]:
    """Ids of the `count` highest scores of each row, ascending, the tail filled with -1.

    Equal scores: the lower id wins (+0 and -0 are equal). NaN and -inf are never selected, +inf always comes first.
    `count` may exceed S. The released program leaves ties open; this rule is ours, and every backend follows it.
    """
    require_xla("topk", backend)
    return reference.topk(scores, count)
