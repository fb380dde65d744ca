"""The indexer on a GPU: scores with the maxima of their chunks, then selection from the maxima.

**Why.** XLA writes 32 scores a key and query before it sums them, unpacks the keys to memory, and sorts. Here a row of
scores is written once, 2 bytes a key, with its maxima (`decode`, `prefill`), and selection reads the coarsest maxima
and 8 values for every chunk that it keeps (`pallas_kernels.topk.selection`). The scratch is bounded: queries are taken
in groups whose scores take 0.5 GB.

**Numerics.** The rounding points of the reference, as `decode` says; a selection is exact for the scores it is given.

**Tiling.** From `MANY` queries of a sequence on, keys are unpacked to bfloat16 once and scored by `prefill` where its
instructions exist (Hopper); else `decode` reads them as they are, several queries at a time, or each query's own pool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Float32, Int32, Shaped

from pallas_kernels import BackendError
from pallas_kernels.indexer import decode, prefill, reference
from pallas_kernels.target import choose_tile
from pallas_kernels.topk import selection

MANY = 32  # queries of a sequence that pay for unpacking its keys
SCRATCH = 1 << 28  # scores that exist at a time


@dataclass(frozen=True)
class Tile:
    """Tiles of few queries (and of pools), of many, and of the selection."""

    few: decode.Tile = decode.H200
    many: prefill.Tile | decode.Tile = prefill.H200
    topk: selection.Tile = selection.H200


H200 = Tile()
B300 = Tile(few=decode.B300, many=decode.MANY, topk=selection.B300)
TILES = {"sm_90": H200, "sm_103": B300}


def _require(q: Array, heads_of: Array, size: int = 8) -> None:
    heads, width = q.shape[2:]
    if q.dtype != jnp.bfloat16 or heads_of.dtype != jnp.bfloat16:
        raise BackendError(
            f"indexer: queries and weights are {q.dtype} and {heads_of.dtype}; the kernel takes bfloat16"
        )
    if width != 128 or heads not in (8, 16, 32, 64) or size != selection.FACTOR:
        raise BackendError(f"indexer: {heads} heads of {width}, blocks of {size}; the kernel takes 8..64 of 128, and 8")


def scores(
    q: BFloat16[Array, "B T I J"],
    keys: Shaped[Array, "B S row"],
    weights: BFloat16[Array, "B T I"],
    visible: Int32[Array, "B T"],
    blocks: Int32[Array, "B T K"] | None = None,
    *,
    unpack: Callable[[Array], Array] = reference.unpack,
    tile: Tile | None = None,
    interpret: bool = False,
) -> decode.Levels:
    """Scores [B T, S'] and their maxima of chunks of 8 and 64, by the kernel that fits; T in whole groups of queries.

    S' is S in whole tiles, or 8 K. Entries past those that a query sees are -inf or left as they are.
    """
    tile = tile or choose_tile(TILES)
    if blocks is None and q.shape[1] >= MANY:
        values = unpack(keys)
        if isinstance(tile.many, decode.Tile):
            return decode.score(q, values, weights, visible, tile=tile.many, interpret=interpret)
        values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % prefill.KEYS), (0, 0)))
        seen = jnp.minimum(visible, keys.shape[1])
        return prefill.score(q, values, weights, seen, tile=tile.many, interpret=interpret)
    if keys.dtype == jnp.uint8 and keys.shape[2] != decode.FP4_ROW:
        keys = unpack(keys)
    return decode.score(q, keys, weights, visible, blocks, tile=tile.few, interpret=interpret)


def _unit(tokens: int, tile: Tile) -> int:
    """Queries that the kernels take together."""
    return tile.many.queries if tokens >= MANY else min(tile.few.queries, pl.next_power_of_2(tokens))


def index_scores(
    q: Float[Array, "B T I J"],
    keys: Float[Array, "B #T S J"],
    weights: Float[Array, "B T I"],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float32[Array, "B T S"]:
    """The kernel behind the public `index_scores`."""
    _require(q, weights)
    tile = tile or choose_tile(TILES)
    (batch, tokens, heads, width), (_, own, size, _) = q.shape, keys.shape
    keys = keys.astype(jnp.bfloat16)
    if own > 1:  # each query has its keys: a batch of single queries
        q, weights = q.reshape(-1, 1, heads, width), weights.reshape(-1, 1, heads)
        keys = keys.reshape(-1, 1, size, width)
    short = -q.shape[1] % _unit(q.shape[1], tile)
    q, weights = (jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2)) for x in (q, weights))
    visible = jnp.full(q.shape[:2], size, jnp.int32)
    found, _, _ = scores(q, keys[:, 0], weights, visible, tile=tile, interpret=interpret)
    found = found.reshape(*q.shape[:2], -1)[:, : q.shape[1] - short, :size]
    return found.reshape(batch, tokens, size).astype(jnp.float32)


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
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, "B T C"], Int32[Array, "B T candidates"] | None]:
    """The kernels behind the public `select`, over groups of queries."""
    _require(q, weights, size)
    tile = tile or choose_tile(TILES)
    batch, tokens = visible.shape
    unit = _unit(tokens, tile)
    if blocks is not None:  # to whole tiles: a kernel reads past a shorter list
        short = -blocks.shape[2] % (tile.few.keys // selection.FACTOR)
        blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, short)), constant_values=-1)
    entries = keys.shape[1] if blocks is None else blocks.shape[2] * selection.FACTOR
    limit = max(SCRATCH // (batch * entries * unit), -(-MANY // unit) if tokens >= MANY else 1) * unit
    groups = -(-tokens // limit)
    each = -(-tokens // (groups * unit)) * unit

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, groups * each - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, groups, each, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, groups * each, -1)[:, :tokens]

    def one(given: tuple) -> tuple:
        q, weights, visible, blocks = given
        levels = scores(q, keys, weights, visible, blocks, unpack=unpack, tile=tile, interpret=interpret)
        found = choose(levels, visible.reshape(-1), blocks, count=count, candidates=candidates, tile=tile.topk,
                       interpret=interpret)  # fmt: skip
        return jax.tree.map(lambda x: x.reshape(batch, each, -1), found)

    given = jax.tree.map(split, (q, weights, visible, blocks))
    if groups > 1:
        return jax.tree.map(join, lax.map(one, given))
    return jax.tree.map(lambda x: join(x[None]), one(jax.tree.map(lambda x: x[0], given)))


def choose(
    levels: decode.Levels,
    visible: Int32[Array, " R"],
    blocks: Int32[Array, "B T K"] | None,
    *,
    count: int,
    candidates: int,
    tile: selection.Tile,
    interpret: bool = False,
) -> tuple[Int32[Array, "R C"], Int32[Array, "R candidates"] | None]:
    """Selected entries and candidate blocks of rows of scores and maxima."""
    wanted: dict[str, Any] = {"tile": tile, "interpret": interpret}
    depth = selection.depth(levels[0].shape[1], count)
    if blocks is not None:
        names = blocks.reshape(len(visible), -1)
        return selection.refine(levels[: depth + 1], None, names, count=count, **wanted), None
    ids = selection.refine(levels[: depth + 1], visible, count=count, **wanted)
    if not candidates:
        return ids, None
    depth = min(selection.depth(levels[1].shape[1], candidates), 1)
    return ids, selection.refine(levels[1 : depth + 2], visible, count=candidates, first=1, newest=True, **wanted)
