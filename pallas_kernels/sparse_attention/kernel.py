"""Sparse attention on a GPU: shapes checked, ids padded to whole blocks, the schedule chosen, the kernel called.

The kernels are in `forward.py` (Hopper: Mosaic GPU), `triton.py` (Blackwell), `combine.py` (joins split keys) and
`backward.py`; each says why it is as it is.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import BackendError, target
from pallas_kernels.sparse_attention import backward, combine, forward, triton
from pallas_kernels.sparse_attention.reference import Unpack
from pallas_kernels.sparse_attention.row_ptx import HEAD, KEYS, row_format
from pallas_kernels.sparse_attention.work import Source

HEADS = 64
BLOCK_US, JOIN_US, PART_US = 2.0, 3.0, 0.065  # a block of keys; the second launch; a part written and read
Tile = forward.Tile | triton.Tile
H200, B300 = forward.H200, triton.B300
TILES: dict[str, Tile] = {"sm_90": H200, "sm_103": B300}


def _check(q: Array, interpret: bool) -> None:
    if q.dtype != jnp.bfloat16:
        raise BackendError(f"backend 'pallas': sparse_attention takes queries of bfloat16, not {q.dtype}")
    if q.shape[2:] != (HEADS, HEAD) and not interpret:
        raise BackendError(f"backend 'pallas': sparse_attention takes {HEADS} heads of {HEAD}, not {q.shape[2:]}")


def _whole_blocks(ids: Int32[Array, "B T K"]) -> Int32[Array, "queries padded"]:
    """One list a query, padded with -1 to whole blocks of keys."""
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, -ids.shape[-1] % KEYS)), constant_values=-1)
    return ids.reshape(-1, ids.shape[-1])


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What a call of the kernel is beside its arrays."""

    time: int
    scale: float
    unpacks: tuple[Unpack | None, ...]
    tile: Tile
    interpret: bool
    out_dtype: DTypeLike


def _values(call: _Call, tables: tuple[Array, ...], dtype: DTypeLike) -> tuple[Array, ...]:
    """The rows unpacked."""
    pairs = zip(tables, call.unpacks, strict=True)
    return tuple(table if unpack is None else unpack(table, dtype) for table, unpack in pairs)


def splits_of(queries: int, blocks: int, programs: int) -> int:
    """Over how many programs the keys of a query are split: the cheapest, by what an H200 was measured to take."""

    def microseconds(splits: int) -> float:
        rounds = -(-queries * splits // programs)
        joined = JOIN_US + PART_US * queries * splits if splits > 1 else 0.0
        return rounds * -(-blocks // splits) * BLOCK_US + joined

    return min((n for n in range(1, blocks + 1) if blocks % n == 0), key=microseconds)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: _Call, q: Array, tables: tuple[Array, ...], ids: tuple[Array, ...], sink: Array
) -> tuple[Array, Array]:
    """q [queries, N, H], tables [B, S, row], ids [queries, K]."""
    shared: dict[str, Any] = {"queries_per_entry": call.time, "scale": call.scale, "interpret": call.interpret}
    tile, queries = call.tile, q.shape[0]
    if isinstance(tile, triton.Tile):
        values = _values(call, tables, q.dtype)
        return triton.attend(q, values, ids, sink, tile=tile, out_dtype=call.out_dtype, **shared)
    if call.interpret:  # which has no PTX: rows are unpacked ahead
        tables = _values(call, tables, q.dtype)
    sources = tuple(
        Source(row_format(table, q.shape[-1]), table.shape[1], taken.shape[-1])
        for table, taken in zip(tables, ids, strict=True)
    )
    if len({source.fmt.down for source in sources}) > 1:
        kinds = " and ".join(source.fmt.name for source in sources)
        raise BackendError(
            f"backend 'pallas': sparse_attention takes two sets of values or two packed ones, not {kinds}"
        )
    tables = tuple(table.reshape(-1, table.shape[-1]) for table in tables)
    splits = splits_of(queries, sum(taken.shape[-1] for taken in ids) // KEYS, tile.programs)
    acc, *stats = forward.attend(
        q, tables, ids, sink, sources=sources, splits=splits, tile=tile, out_dtype=call.out_dtype, **shared
    )
    if splits == 1:
        return acc[0], stats[0][0]
    return combine.combine(acc, *stats, sink, out_dtype=call.out_dtype, interpret=call.interpret)


def _attend_forward(call: _Call, *args: Any) -> tuple[Any, Any]:
    o, lse = _attend(call, *args)
    return (o, lse), (*args, o, lse)


def _attend_backward(call: _Call, kept: Any, given: tuple[Array, Array]) -> tuple[Any, ...]:
    q, tables, ids, sink, o, lse = kept
    do, dlse = given
    rounded = do.astype(q.dtype)
    exact, delta = (jnp.sum(x.astype(jnp.float32) * o.astype(jnp.float32), axis=-1) - dlse for x in (do, rounded))
    dq, sums = backward.attend_backward(
        q,
        _values(call, tables, q.dtype),
        ids,
        lse,
        rounded,
        delta,  # of the rounded one: it cancels against that one's products
        queries_per_entry=call.time,
        scale=call.scale,
        tile=backward.B300 if isinstance(call.tile, triton.Tile) else backward.H200,
        interpret=call.interpret,
    )
    dsink = -jnp.sum(jnp.exp(sink - lse) * exact, axis=0)
    drows = tuple(
        None if table.dtype == jnp.uint8 else drow.astype(table.dtype) for drow, table in zip(sums, tables, strict=True)
    )
    return dq.astype(q.dtype), drows, tuple(None for _ in ids), dsink


_attend.defvjp(_attend_forward, _attend_backward)


_STATIC = ("scale", "unpack_window", "unpack_main", "out_dtype", "tile", "interpret")


@partial(jax.jit, static_argnames=_STATIC)  # a model traces it once a shape
def sparse_attention(
    q: Float[Array, "B T N H"],
    window: Shaped[Array, "B X window_row"],
    window_ids: Int32[Array, "B T W"],
    main: Shaped[Array, "B S main_row"],
    main_ids: Int32[Array, "B T C"],
    sink: Float32[Array, " N"],
    *,
    scale: float,
    unpack_window: Unpack | None = None,
    unpack_main: Unpack | None = None,
    out_dtype: DTypeLike = jnp.float32,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float32[Array, "B T N"]]:
    """The public function's kernel; the rows' bytes tell their format. Differentiable in q, sink and rows of values."""
    _check(q, interpret)
    tile = tile or target.choose_tile(TILES)
    sets = [(window, window_ids, unpack_window), (main, main_ids, unpack_main)]
    sets = [(rows, _whole_blocks(ids), unpack) for rows, ids, unpack in sets if rows.shape[1] and ids.shape[-1]]
    if not sets:
        return jnp.zeros(q.shape, out_dtype), jnp.broadcast_to(sink, q.shape[:-1])
    tables, ids = tuple(rows for rows, *_ in sets), tuple(taken for _, taken, _ in sets)
    call = _Call(
        time=q.shape[1],
        scale=scale,
        unpacks=tuple(unpack for *_, unpack in sets),
        tile=tile,
        interpret=interpret,
        out_dtype=out_dtype,
    )
    o, lse = _attend(call, q.reshape(-1, *q.shape[2:]), tables, ids, sink)
    return o.reshape(q.shape), lse.reshape(q.shape[:-1])
