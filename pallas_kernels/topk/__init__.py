"""Exact, deterministic selection of the best entries of a row."""

import jax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import BackendError
from pallas_kernels.target import use_kernel
from pallas_kernels.topk import reference

__all__ = ["finish", "merge", "start", "topk"]

Best = reference.Best


def start(lead: tuple[int, ...], count: int) -> Best:
    """An empty running best of `count` entries for each row of shape `lead`: (scores, ids), best first."""
    return reference.start(lead, count)


def merge(kept: Best, scores: Float32[Array, "*lead S"], ids: Int32[Array, "*lead S"], *, backend: str = "xla") -> Best:
    """The running best after one more tile of scores. Ids of a tile ascend and exceed those of the tiles before."""
    if use_kernel("topk", backend):
        raise BackendError("backend 'pallas': topk.merge has no kernel; a GPU selects from whole rows, with topk")
    return reference.merge(kept, scores, ids)


def finish(kept: Best) -> Int32[Array, "*lead C"]:
    """The ids of a running best, ascending, the tail filled with -1."""
    return reference.finish(kept)


def topk(
    scores: Float[Array, "*lead S"], count: int, lengths: Int32[Array, "*lead"] | None = None, *, backend: str = "xla"
) -> Int32[jax.Array, "*lead {count}"]:
    """Ids of the `count` highest of the first `lengths` scores of each row, ascending, the tail filled with -1.

    Equal scores: the lower id wins (+0 and -0 are equal). NaN and -inf are never selected, +inf always comes first.
    `count` may exceed S. The released program leaves ties open; this rule is ours, and every backend follows it.
    The kernel takes counts up to 4096 and rows up to 2^21; rows of a multiple of 64 entries are not copied.
    """
    if use_kernel("topk", backend):
        from pallas_kernels.topk import kernel

        return kernel.topk(scores, count, lengths)
    return reference.topk(scores, count, lengths)
