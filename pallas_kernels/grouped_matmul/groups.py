"""Rows sorted by expert, and the tiles of them that a kernel walks.

Each expert's rows start at a multiple of 8, which is what the copy engine asks of a tile; nothing else is padded. A
tile holds rows of one expert, and there are at most rows / width + experts of them, whatever the routing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.hopper.stream import GRANULE, Plan

COMPARED = 4096  # rows: up to so many, comparing each with each is one launch where a sort is several


class Groups(NamedTuple):
    """`slot` of each sorted row, in [0, T * A), of row 0 where there is padding; `place` of each slot among them."""

    plan: Plan
    slot: Int32[Array, " M"]
    place: Int32[Array, "T A"]


# Fused into what reads them, XLA would work them out again for each number: sums over all experts, or the place of a
# row for every number of that row.
in_memory = jax.lax.optimization_barrier


def plan_of(sizes: Int32[Array, " E"], rows: int, width: int) -> Plan:
    """Tiles of at most `width` rows for experts with `sizes` rows, at most `rows` together.

    An expert's tiles are as equal as multiples of 8 allow: blocks of threads take turns, and unequal tiles would leave
    some of them with more work than others.
    """
    experts = sizes.shape[0]
    busy = min(experts, rows)
    tiles = -(-sizes // width)
    granules = -(-sizes // GRANULE)
    share = -(-granules // jnp.maximum(tiles, 1)) * GRANULE
    after, starts = in_memory(jnp.cumsum(tiles)), _starts(sizes)
    number = jnp.arange((rows - busy) // width + busy, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(after <= number[:, None], axis=1, dtype=jnp.int32), experts - 1)
    within = (number - (after - tiles)[expert]) * share[expert]
    live = jnp.clip(sizes[expert] - within, 0, share[expert])
    return Plan(expert, starts[expert] + within, live, after[-1:])


def group(ids: Int32[Array, "T A"], experts: int, width: int) -> Groups:
    """Sort T * A rows by expert, in their own order within one, with room to read `width` rows from any."""
    rows = ids.size
    flat = ids.reshape(-1)
    sizes = in_memory(jnp.sum(flat[:, None] == jnp.arange(experts, dtype=jnp.int32), axis=0, dtype=jnp.int32))
    number = jnp.arange(rows, dtype=jnp.int32)
    if rows <= COMPARED:
        earlier = (flat[:, None] == flat) & (number < number[:, None])
        rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    else:
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        rank = jnp.zeros(rows, jnp.int32).at[order].set(number - (jnp.cumsum(sizes) - sizes)[flat[order]])
    place = _starts(sizes)[flat] + rank
    room = -(-(rows + (GRANULE - 1) * min(experts, rows)) // GRANULE) * GRANULE + width
    slot = jnp.zeros(room, jnp.int32).at[place].set(number, unique_indices=True)
    return in_memory(Groups(plan_of(sizes, rows, width), slot, place.reshape(ids.shape)))


def _starts(sizes: Int32[Array, " E"]) -> Int32[Array, " E"]:
    padded = -(-sizes // GRANULE) * GRANULE
    return in_memory(jnp.cumsum(padded) - padded)
