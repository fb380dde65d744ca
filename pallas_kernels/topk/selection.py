"""Exact selection on a GPU: a bracket around the threshold, then compaction, one program a row, level by level.

**Why.** XLA sorts whole rows for counts of 512 and 2048 (64 x 131072: 1.1 ms); reading them once takes 8 us. The row is
read once for the maxima of its chunks of 8 and 64 (`kernel.maxima`; the indexer's kernels write them beside the
scores). The C best entries lie in the C best chunks, so C chunks of 64 are chosen, then C of their chunks of 8, then C
entries: every step works in registers, on at most 8 C values. If equal maxima give way to the lower chunk and the
chosen chunks stay in ascending order, the C best with our tie rule are among them: an entry left out loses to C entries
of chunks that have a greater maximum, or an equal one and lower ids.

**Numerics.** Selection is exact: floats are compared as integers of the same order, after -0 became +0, and NaN -inf.
bfloat16 rows have 16-bit keys. There is no float arithmetic, and the result is the same bits on every run.

**Tiling.** A program holds a row's values of one level in its registers. lo and hi bracket the threshold: at least C
values are >= lo, fewer than C are >= hi. The first lo is the least of the maxima of C groups, or the lo of the level
before; each pass counts two pivots at once, packed in one integer, and cuts the bracket to a third. It ends when
exactly C values are >= lo, or when the bracket holds one key, whose ties go to the lower ids. One prefix sum, packed
likewise, gives every chosen value its slot. All levels are one launch: a barrier makes the ids of one level visible
to the next.

Triton, since Mosaic GPU has no prefix sum and no scatter.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from pallas_kernels import BackendError
from pallas_kernels.references import Ref

FACTOR = 8  # entries a chunk, chunks a chunk of the next level
VALUES = 1 << 15  # of one step at most: packed counts have 16 bits
FLOOR, TOP = -0x7F800001, 0x7F800000  # keys of -inf and +inf


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Values of a step in one thread, least and most warps of a step; entries and warps of a program of `maxima`."""

    values: int = 16
    min_warps: int = 4
    max_warps: int = 16
    span: int = 2048
    span_warps: int = 4


H200 = Tile()
B300 = Tile()
TILES = {"sm_90": H200, "sm_103": B300}


def depth(entries: int, count: int) -> int:
    """Levels of maxima that a row of `entries` needs, at most two: a step takes the coarsest level at once."""
    return next((n for n in (0, 1, 2) if entries // FACTOR**n <= max(4096, FACTOR * count)), 2)


def keys_of(x: Array) -> Array:
    """int32 in the order of the floats; NaN as -inf, -0 as +0; 16 bits for bfloat16."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x.astype(jnp.float32)), jnp.int32)
    key = jnp.where(x != x, FLOOR, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return key >> 16 if x.dtype == jnp.bfloat16 else key


def bracket(key: Array, count: int, floor: int) -> tuple[Array, Array]:
    """(lo, hi) around the threshold: the least of the maxima of `count` groups or more, and past the greatest key."""
    groups = min(pl.next_power_of_2(count), key.size)
    return jnp.maximum(jnp.min(jnp.max(key.reshape(groups, -1), axis=1)), floor + 1), jnp.max(key) + 1


def _counts(key: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """How many keys are >= low and >= high, by one sum."""
    both = jnp.sum((key >= low).astype(jnp.int32) + ((key >= high).astype(jnp.int32) << 16))
    return both & 0xFFFF, lax.shift_right_logical(both, jnp.int32(16))


def threshold(key: Array, count: int, lo: Array, hi: Array, start: int) -> tuple[Array, Array, Array, Array]:
    """(lo, hi, keys >= lo, keys >= hi): the `count` best are those >= hi and the first of those in [lo, hi).

    The first pass counts lo itself and a pivot 2**-start of the bracket above it.
    """

    def unsettled(state: tuple) -> Array:
        lo, hi, many, _ = state
        return (many > count) & (hi - lo != 1)  # their difference is an unsigned number

    def narrow(state: tuple) -> tuple:
        lo, hi, many, few = state
        third = sum(lax.shift_right_logical(hi - lo, jnp.int32(n)) for n in (2, 4, 6))
        third = jnp.where(third == 0, 1, third)
        low, high = lo + third, hi - third
        c_low, c_high = _counts(key, low, high)
        up, mid = c_high >= count, c_low >= count
        return (
            jnp.where(up, high, jnp.where(mid, low, lo)),
            jnp.where(up, hi, jnp.where(mid, high, low)),
            jnp.where(up, c_high, jnp.where(mid, c_low, many)),
            jnp.where(up, few, jnp.where(mid, c_high, c_low)),
        )

    pivot = lo + jnp.maximum(lax.shift_right_logical(hi - lo, jnp.int32(start)), 1)
    many, few = _counts(key, lo, pivot)
    up = few >= count
    state = jnp.where(up, pivot, lo), jnp.where(up, hi, pivot), jnp.where(up, few, many), jnp.where(up, 0, few)
    return lax.while_loop(unsettled, narrow, state)


def _ids(chunks_ref: Ref, count: int, size: int) -> tuple[Array, Array]:
    """(ids, whether they exist) of a level's first `size` values, or of those in the chunks that were chosen."""
    if chunks_ref is None:
        ids = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(size),), 0)
        return ids, ids < size
    slots = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(count),), 0)
    chunk = plt.load(chunks_ref.at[...], mask=slots < count, other=-1)
    ids = (jnp.maximum(chunk, 0) * FACTOR)[:, None] + lax.broadcasted_iota(jnp.int32, (chunk.size, FACTOR), 1)
    return ids.reshape(-1), jnp.broadcast_to((chunk >= 0)[:, None], ids.shape).reshape(-1)


def _keys(x_ref: Ref, chunks_ref, length: Array, newest: bool, *, count: int, size: int) -> Array:
    """Keys of a level's values; the floor's for what is not live, the greatest for what is pinned."""
    ids, live = _ids(chunks_ref, count, size)
    live &= ids < length
    if chunks_ref is None:
        x = plt.load(x_ref.at[...], mask=live, other=jnp.asarray(-jnp.inf, x_ref.dtype))
    else:
        x = x_ref[ids.reshape(-1, FACTOR)].reshape(-1)
    key = jnp.where(live, keys_of(x), FLOOR >> _shift(x_ref))
    return jnp.where(ids == length - 1, TOP >> _shift(x_ref), key) if newest else key


def _shift(x_ref: Ref) -> int:
    return 16 if x_ref.dtype == jnp.bfloat16 else 0


def _choose(key: Array, ids: Callable[[], Array], o_ref: Ref, lo: Array, hi: Array, *, count: int, start: int) -> Array:
    """Write the ids of the `count` best keys in order, then -1; the lo that all of them reach."""
    # sure: the keys >= hi; of those in [lo, hi), which are equal, the first `count - few`
    lo, hi, many, few = threshold(key, count, lo, hi, start)
    sure, tied = key >= hi, (key >= lo) & (key < hi)
    # slot = how many chosen ones come before
    before = jnp.cumsum((sure.astype(jnp.int32) << 16) + tied.astype(jnp.int32), axis=0)
    ties = before & 0xFFFF
    slot = lax.shift_right_logical(before, jnp.int32(16)) + jnp.minimum(ties, count - few) - 1
    chosen = sure | (tied & (ties <= count - few))
    # A slot past the end for those left out: interpret mode scatters them too, and drops them there.
    plt.store(o_ref.at[jnp.where(chosen, slot, o_ref.shape[0])], ids(), mask=chosen)
    slots = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(count),), 0)
    plt.store(o_ref.at[...], jnp.full(slots.shape, -1, jnp.int32), mask=(slots >= many) & (slots < count))
    return lo


def _refine(
    *refs: Ref, count: int, sizes: tuple[int, ...], first: int, newest: bool, whole: bool, named: bool, interpret: bool
) -> None:
    """One row: choose among the coarsest level's values, then among those of the chosen chunks, level by level."""
    given = iter(refs)
    x_refs = list(islice(given, len(sizes)))
    entries = jnp.int32(sizes[0] << 3 * first) if whole else next(given)[0]
    names_ref = next(given) if named else None
    o_refs = list(given)  # of level 0, 1, ...: what level n chooses is read by level n - 1
    chunks_ref, lo, hi, start = None, None, None, 1
    for level in reversed(range(len(sizes))):
        scale = 3 * (first + level)

        def ids(level: int = level, chunks_ref=chunks_ref) -> Array:
            found, _ = _ids(chunks_ref, count, sizes[level])  # read again: cheaper than keeping them in registers
            return found if level or names_ref is None else names_ref[found // FACTOR] * FACTOR + found % FACTOR

        length = (entries + (1 << scale) - 1) >> scale
        key = _keys(x_refs[level], chunks_ref, length, newest, count=count, size=sizes[level])
        if chunks_ref is None:
            lo, hi = bracket(key, count, FLOOR >> _shift(x_refs[level]))
        # Later levels have the same greatest key, and C keys that reach the lo of the level before, just above it.
        lo = _choose(key, ids, o_refs[level], lo, hi, count=count, start=start)
        chunks_ref, start = o_refs[level], 5
        if level and not interpret:
            plt.debug_barrier()  # every thread has written its ids


def refine(
    levels: tuple[Float[Array, "R _"], ...],
    lengths: Int32[Array, " R"] | None = None,
    names: Int32[Array, "R K"] | None = None,
    *,
    count: int,
    first: int = 0,
    newest: bool = False,
    tile: Tile,
    interpret: bool = False,
) -> Int32[Array, "R {count}"]:
    """Ids of the `count` best of each row's `levels[0]`, ascending, -1 filled.

    The other levels are maxima of 8 of the level before. An id of `levels[0]` stands for 8**first entries: ids that
    hold none of the first `lengths` entries are left out, and with `newest` the last one that does counts as +inf.
    With `names`, id 8 i + j is written as 8 names[i] + j.
    """
    rows, slots = levels[0].shape[0], pl.next_power_of_2(count)
    sizes = tuple(level.shape[1] for level in levels)
    widths = [pl.next_power_of_2(size) for size in sizes[-1:]] + [slots * FACTOR] * (len(levels) - 1)
    if max(widths) > VALUES:
        raise BackendError(f"topk: {max(widths)} values of one step are more than {VALUES}")
    row = lambda n: pl.BlockSpec((None, n), lambda r: (r, 0))  # noqa: E731
    one = pl.BlockSpec((1,), lambda r: (r,))
    given = [(x, row(n)) for x, n in zip(levels, (*sizes[:-1], widths[0]), strict=True)]
    given += [(lengths, one)] if lengths is not None else []
    given += [(names, row(names.shape[1]))] if names is not None else []
    body = functools.partial(
        _refine, count=count, sizes=sizes, first=first, newest=newest,
        whole=lengths is None, named=names is not None, interpret=bool(interpret),
    )  # fmt: skip
    warps = min(max(max(widths) // (32 * tile.values), tile.min_warps), tile.max_warps)
    ids, *_ = pl.pallas_call(
        body,
        grid=(rows,),
        in_specs=[spec for _, spec in given],
        out_specs=[row(slots)] * len(levels),
        out_shape=[jax.ShapeDtypeStruct((rows, count if i == 0 else slots), jnp.int32) for i in range(len(levels))],
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="topk_refine",
    )(*(array for array, _ in given))
    return ids
