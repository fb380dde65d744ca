"""The lightning indexer: scores of entries (paper 2.3.2), and the selection that follows them, in one call."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.indexer import reference
from pallas_kernels.target import use_kernel

__all__ = ["index_scores", "select"]


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B #T S J"], weights: Float[Array, "B T I"], *, backend: str = "xla"
) -> Float32[jax.Array, "B T S"]:
    """score[t, s] = sum_i weights[t, i] * relu(q[t, i] . key[s]); keys may differ per query (a gathered pool).

    With bfloat16 operands the dot, the weighted hit and the sum are each rounded to bfloat16, as released; the sum
    itself runs in float32. Visibility is the caller's. Source: paper 2.3.2; the released `Indexer`.
    The kernel rounds at the same points (`indexer/decode.py` says what may differ).
    """
    if use_kernel("index_scores", backend):
        from pallas_kernels.indexer import kernel

        return kernel.index_scores(q, keys, weights)
    return reference.index_scores(q, keys, weights)


def select(
    q: Float[Array, "B T I J"],
    keys: Shaped[Array, "B S row"],
    weights: Float[Array, "B T I"],
    visible: Int32[Array, "B T"],
    blocks: Int32[Array, "B T K"] | None = None,
    *,
    count: int,
    candidates: int = 0,
    size: int = 8,
    unpack: Callable[[Array], Array] = reference.unpack,
    tile: int = reference.TILE,
    backend: str = "xla",
) -> tuple[Int32[jax.Array, "B T C"], Int32[jax.Array, "B T candidates"] | None]:
    """Score every entry and select: (ids of the `count` best entries, ids of the `candidates` best blocks or None).

    Query t sees entries j < visible[t]; with `blocks` (ascending, -1: none) only those of its blocks of `size` entries.
    A block's score is the best of its visible entries', and the block with the newest one counts as +inf. Both lists
    ascend, -1 fills them, ties are decided as in `topk`. Scores are those of `index_scores`.

    Rows of `keys` are packed FP4 (uint8: J / 2 pairs of codes, low nibble the even channel, then J / 32 E8M0 scales) or
    values; for other rows, `unpack` gives the values. The reference scores `tile` entries at a time and keeps a running
    best; the kernel writes whole rows of scores, of so many queries at a time that they take 0.5 GB, and wants bfloat16
    queries, blocks of 8 and J = 128. Source: paper 2.3.2; config keys index_topk,
    candidate_topk_blocks, candidate_block_size.
    """
    if blocks is not None and candidates:
        raise ValueError(f"candidates: {candidates} of a selection from `blocks`; they come from all entries")
    if use_kernel("index_scores", backend):
        from pallas_kernels.indexer import kernel

        return kernel.select(
            q, keys, weights, visible, blocks, count=count, candidates=candidates, size=size, unpack=unpack
        )
    return reference.select(
        q, keys, weights, visible, blocks, count=count, candidates=candidates, size=size, unpack=unpack, tile=tile
    )
