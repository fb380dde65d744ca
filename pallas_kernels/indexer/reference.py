"""The indexer in plain jnp: every query against every key it is given, and a selection that keeps a running best."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from pallas_kernels import topk
from pallas_kernels.formats import cast
from pallas_kernels.quantize import unpack_mxfp4

TILE = 2048  # entries scored at a time; a working set, not a limit


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B #T S J"], weights: Float[Array, "B T I"]
) -> Float32[Array, "B T S"]:
    keys = jnp.broadcast_to(keys, (keys.shape[0], q.shape[1], *keys.shape[2:]))
    dot = jnp.einsum("btij,btsj->btis", q, keys, precision="highest", preferred_element_type=jnp.float32)
    hit = jax.nn.relu(cast(dot, q.dtype).astype(jnp.float32)) * weights.astype(jnp.float32)[..., None]
    total = cast(hit, q.dtype).astype(jnp.float32).sum(axis=2)
    return cast(total, q.dtype).astype(jnp.float32)


def unpack(rows: Shaped[Array, "*lead row"]) -> Float[Array, "*lead J"]:
    """Values of key rows: bfloat16 ones of packed FP4, or the rows themselves."""
    return unpack_mxfp4(rows, jnp.bfloat16) if rows.dtype == jnp.uint8 else rows


def mask_scores(
    scores: Float32[Array, "B T S"], entries: Int32[Array, "B #T S"], visible: Int32[Array, "B T"]
) -> Float32[Array, "B T S"]:
    """-inf for entries (ids, -1: none) that the query does not see, and for NaN: neither is ever selected."""
    seen = (entries >= 0) & (entries < visible[..., None])
    return jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)


def block_scores(
    scores: Float32[Array, "B T S"], number: Int32[Array, "B T K"], visible: Int32[Array, "B T"], size: int
) -> Float32[Array, "B T K"]:
    """Best masked score of each block of `size` entries; +inf for the one that holds the newest visible entry."""
    best = scores.reshape(*number.shape, size).max(axis=-1)
    newest = (visible - 1) // size  # -1 where nothing is visible: pins no block
    return jnp.where(number == newest[..., None], jnp.inf, best)


def candidate_blocks(
    scores: Float32[Array, "B T S"], visible: Int32[Array, "B T"], *, blocks: int, size: int
) -> Int32[Array, "B T K"]:
    """The `blocks` best blocks of `size` entries per query by their best score; the newest visible entry's is pinned.

    `scores` are masked. Ids ascend, -1 fills: a block without a visible entry is never a candidate.
    """
    short = -scores.shape[-1] % size
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)
    count = padded.shape[-1] // size
    number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*scores.shape[:2], count))
    return topk.topk(block_scores(padded, number, visible, size), blocks)


def pool_entries(blocks: Int32[Array, "B T K"], size: int) -> Int32[Array, "B T P"]:
    """Entry ids of candidate blocks, ascending; -1 for those of missing blocks."""
    entries = blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(blocks[..., None] < 0, -1, entries).reshape(*blocks.shape[:2], -1)


def entries_in_tiles(blocks: Int32[Array, "B T K"], size: int, tile: int) -> Int32[Array, "B T P"]:
    """`pool_entries`, filled with -1 to whole tiles."""
    entries = pool_entries(blocks, size)
    return jnp.pad(entries, ((0, 0), (0, 0), (0, -entries.shape[-1] % tile)), constant_values=-1)


def pool_mask(blocks: Int32[Array, "B T K"], size: int, entries: int) -> Bool[Array, "B T S"]:
    """Which of `entries` entries belong to candidate blocks."""
    count = -(-entries // size)
    slot = jnp.where(blocks < 0, count, blocks)
    mark = jax.vmap(jax.vmap(lambda s: jnp.zeros(count + 1, bool).at[s].set(True)))(slot)
    return jnp.repeat(mark[..., :count], size, axis=-1)[..., :entries]


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
    unpack: Callable[[Array], Array] = unpack,
    tile: int = TILE,
) -> tuple[Int32[Array, "B T C"], Int32[Array, "B T candidates"] | None]:
    """Memory does not grow with the entries, and time grows with those that some query sees, not with the capacity."""
    lead, entries = q.shape[:2], keys.shape[1]
    pooled = blocks is not None and blocks.shape[2] * size < entries
    total = blocks.shape[2] * size if pooled else entries
    tile = size * max(1, min(tile, total) // size)
    tiles = -(-total // tile)
    pool = entries_in_tiles(blocks, size, tile) if pooled else None
    member = pool_mask(blocks, size, tiles * tile) if blocks is not None and not pooled else None

    def score(i: Int32[Array, ""] | int) -> tuple[Float32[Array, "B T tile"], Int32[Array, "B T tile"]]:
        if pool is not None:
            ids = jax.lax.dynamic_slice_in_dim(pool, i * tile, tile, axis=2)
            rows = jax.vmap(lambda k, e: k[e])(keys, jnp.clip(ids, 0, entries - 1))
        else:
            row = i * tile + jnp.arange(tile, dtype=jnp.int32)
            ids = jnp.broadcast_to(jnp.where(row < entries, row, -1), (*lead, tile))
            rows = keys[:, jnp.minimum(row, entries - 1)][:, None]
        scores = mask_scores(index_scores(q, unpack(rows), weights), ids, visible)
        if member is not None:
            scores = jnp.where(jax.lax.dynamic_slice_in_dim(member, i * tile, tile, axis=2), scores, -jnp.inf)
        return scores, ids

    def add(i: Int32[Array, ""] | int, kept: tuple) -> tuple:
        scores, ids = score(i)
        best = topk.merge(kept[0], scores, ids)
        if not candidates:
            return best, kept[1]
        number = i * (tile // size) + jnp.arange(tile // size, dtype=jnp.int32)
        number = jnp.broadcast_to(number, (*lead, tile // size))
        return best, topk.merge(kept[1], block_scores(scores, number, visible, size), number)

    kept = (topk.start(lead, count), topk.start(lead, candidates))
    if tiles == 1:
        kept = add(0, kept)
    else:
        kept = jax.lax.fori_loop(0, tiles if pooled else jnp.minimum(tiles, -(-visible.max() // tile)), add, kept)
    return topk.finish(kept[0]), topk.finish(kept[1]) if candidates else None
