"""The routed experts in plain jnp: rows sorted by expert, then one tile of rows and one expert's weights at a time.

    y[t] = sum_a w2[e] (p[t, a] * silu(min(w1[e] x, limit)) * clip(w3[e] x, -limit, limit)),   e = ids[t, a]

A tile holds rows of a single expert, so that only that expert's weights are dequantized for it, and the tiles of all
experts together number at most rows / tile + experts, whatever the routing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.formats import cast, dequantize_fp4


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: the power of two at or above an even share of the rows, within 8..128."""
    share = -(-rows // experts)
    return min(128, max(8, 1 << (share - 1).bit_length()))


def _tiles(ids: Int32[Array, " rows"], experts: int, tile: int) -> tuple[Int32[Array, " n"], Int32[Array, "n tile"]]:
    """Each tile's expert, and its row numbers (`rows`, one past the last, where the tile is not full)."""
    rows = ids.shape[0]
    busy = min(experts, rows)
    count = (rows - busy) // tile + busy
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    sizes = jnp.sum(ids[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    tiles_after = jnp.cumsum(-(-sizes // tile))
    number = jnp.arange(count, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(tiles_after, number, side="right").astype(jnp.int32), experts - 1)
    first_tile = tiles_after - -(-sizes // tile)
    offset = (number - first_tile[expert])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)
    start = jnp.cumsum(sizes) - sizes
    live = (offset < sizes[expert][:, None]) & (number < tiles_after[-1])[:, None]
    place = jnp.where(live, start[expert][:, None] + offset, 0)
    return expert, jnp.where(live, order[place], rows)


def swiglu(gate: Float32[Array, "*s F"], up: Float32[Array, "*s F"], limit: float) -> Float32[Array, "*s F"]:
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def experts(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T A"],
    weights: Float32[Array, "T A"],
    w1: tuple[Array, Array],
    w2: tuple[Array, Array],
    w3: tuple[Array, Array],
    *,
    limit: float,
    round_input: Callable[[Array], Array],
) -> Float32[Array, "T D"]:
    tokens, per_token = ids.shape
    total, dtype = tokens * per_token, x.dtype
    if total == 0:
        return jnp.zeros(x.shape, jnp.float32)
    tile = tile_rows(total, w1[0].shape[0])
    expert, rows = _tiles(ids.reshape(-1), w1[0].shape[0], tile)
    x = round_input(x)
    flat = weights.reshape(-1)

    def dot(a: Array, weight: tuple[Array, Array], e: Array) -> Array:
        dense = dequantize_fp4(weight[0][e], weight[1][e], dtype)
        out = jnp.einsum("tk,nk->tn", a, dense, precision="highest", preferred_element_type=jnp.float32)
        return cast(out, dtype).astype(jnp.float32)

    def one_tile(done: Array, tile_of: tuple[Array, Array]) -> tuple[Array, None]:
        e, row = tile_of
        slot = jnp.minimum(row, total - 1)
        here = x[slot // per_token]
        hidden = swiglu(dot(here, w1, e), dot(here, w3, e), limit) * flat[slot][:, None]
        return done.at[row].set(dot(round_input(cast(hidden, dtype)), w2, e), mode="drop"), None

    out, _ = jax.lax.scan(one_tile, jnp.zeros((total, x.shape[1]), jnp.float32), (expert, rows))
    return out.reshape(tokens, per_token, -1).sum(axis=1)
