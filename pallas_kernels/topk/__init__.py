"""Exact, deterministic selection of the best entries of a row."""

import jax
from jaxtyping import Array, Float32, Int32

from pallas_kernels import require_xla
from pallas_kernels.topk import reference

__all__ = ["topk"]


def topk(scores: Float32[Array, "*lead S"], count: int, *, backend: str = "xla") -> Int32[jax.Array, "*lead {count}"]:
    """Ids of the `count` highest scores of each row, ascending, the tail filled with -1.

    Equal scores: the lower id wins (+0 and -0 are equal). NaN and -inf are never selected, +inf always comes first.
    `count` may exceed S. The released program leaves ties open; this rule is ours, and every backend follows it.
    """
    require_xla("topk", backend)
    return reference.topk(scores, count)
