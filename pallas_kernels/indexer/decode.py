"""Index scores of few queries straight from the cache's rows: decode, and each query's own pool of candidate blocks.

**Why.** A decode step reads every key once: 68 bytes of packed FP4 against 256 of bfloat16, and XLA would write the
unpacked keys and 32 scores a key to memory. Here a key is read once and 2 bytes a query are written, with the maxima
of chunks of 8 and 64 entries that `pallas_kernels.topk` selects from.

**Numerics.** FP4 values times power-of-two scales are exact in bfloat16, so each product is exact; the dot is summed in
float32 and rounded to bfloat16, each weighted hit is rounded to bfloat16, hits are summed in float32 (heads in an order
that the compiler chooses) and the sum is rounded to bfloat16: the released program's rounding points. A sum of 32
bfloat16 hits within 2^11 of each other is exact in float32, so scores of FP4 keys equal the reference's bit for bit but
for the rare sum that is inexact and next to a tie. Keys are read as 2^-64 of their value, and weights as 2^64 of
theirs: this changes no bit, and makes room for every scale from 2^-60 to 2^65 (a larger one gives inf or NaN).

**Tiling.** Keys are the rows of the product and 32 heads of each query its columns. A byte holds an even channel (low
nibble) and an odd one, so there are two products, of even and of odd channels; their columns are permuted alike in keys
and queries so that a thread reads the 16 bytes of a quarter row, which share one scale, as its operand registers. A
program walks `span` keys, stops at the last one that a query sees, and takes the maxima of its scores at the end.

Backend: Triton, since the pool needs a gather, which Mosaic GPU does not have on Hopper. Unpacking is bound by integer
operations (10 for 8 values on a half-rate pipe), not by bytes.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Int32, Shaped

from pallas_kernels import BackendError
from pallas_kernels.formats import cast, e8m0_value
from pallas_kernels.ptx import e2m1_nibbles, elementwise
from pallas_kernels.references import Ref, named

FP4_ROW, BYTES = 68, 64  # bytes of a packed row, of its codes
EXPONENT = 64  # keys are read as 2**-64 of their value: room for large scales beside E2M1's subnormal bfloat16 form
Levels = tuple[BFloat16[Array, "R all"], BFloat16[Array, "R all//8"], BFloat16[Array, "R all//64"]]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Keys of a product with one query, half of those with more; most keys of a program, most queries of one; programs
    that fill the GPU, for which spans are cut; warps and pipeline stages."""

    keys: int = 128
    span: int = 1024
    queries: int = 4
    programs: int = 512
    warps: int = 4
    stages: int = 3


H200 = Tile()
B300 = Tile()
MANY = Tile(span=2048, queries=8)  # where `prefill` cannot run

# Four bytes to 16 bits each, two a register.
_WIDEN = "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;"
# Low (high) nibbles of two bytes to values times the scales $2, two bfloat16 a register.
_NIBBLES = tuple(
    f"{{ .reg .b32 a; {e2m1_nibbles('a', '$1', high)}\nmul.rn.bf16x2 $0, a, $2; }}" for high in (False, True)
)
# Two sums $2, $3 and their weights $4: both rounded and rectified in one instruction, both multiplied in one.
_HIT = """{ .reg .b32 t; cvt.rn.relu.bf16x2.f32 t, $3, $2; mul.rn.bf16x2 t, t, $4;
shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }"""


def unpack(codes: Array, scales: Array, interpret: bool) -> tuple[Array, Array]:
    """bfloat16 [K, 64] of even and of odd channels of 2**-64 x keys, from code bytes [K, 64] and scale bytes [K, 4]."""
    rows = codes.shape[0]
    if interpret:
        scale = jnp.repeat(e8m0_value(scales), BYTES // 4, axis=1) * 2.0**-EXPONENT
        even, odd = (_value(code.astype(jnp.int32)) * scale for code in (codes & 15, codes >> 4))
        return even.astype(jnp.bfloat16), odd.astype(jnp.bfloat16)
    exponent = jnp.minimum(scales.astype(jnp.int32) + (126 - EXPONENT), 255)
    factor = lax.bitcast_convert_type((exponent << 7).astype(jnp.int16), jnp.bfloat16)
    factor = jnp.broadcast_to(factor[..., None], (rows, 4, BYTES // 4)).reshape(rows, BYTES)
    wide = elementwise(_WIDEN, [codes], jnp.int16, constraints="=r,=r,r", pack=4)
    even, odd = (
        elementwise(nibbles, [wide, factor], jnp.bfloat16, constraints="=r,r,r", pack=2) for nibbles in _NIBBLES
    )
    return even, odd


def _value(code: Array) -> Array:
    """E2M1 values by arithmetic: a kernel has no table."""
    size, sign = code & 7, 1 - (code & 8) // 4
    return (sign * jnp.where(size < 2, 2 * size, (2 + size % 2) << (size // 2))).astype(jnp.float32) / 4


def hits(dot: Array, weights: Array, interpret: bool) -> Array:
    """relu(bf16(dot)) x weight, rounded to bfloat16, as float32."""
    if interpret:
        hit = jnp.maximum(cast(dot, jnp.bfloat16), 0).astype(jnp.float32) * weights.astype(jnp.float32)
        return cast(hit, jnp.bfloat16).astype(jnp.float32)
    given = [dot, jnp.broadcast_to(weights, dot.shape)]
    return elementwise(_HIT, given, jnp.float32, constraints="=f,=f,f,f,r", pack=2)


def operand_order(x: Array) -> Array:
    """Columns of [K, 64] so that the 16 of a quarter row are those that one thread feeds to the tensor core."""
    return x.reshape(-1, 4, 4, 2, 2).transpose(0, 2, 3, 1, 4).reshape(-1, BYTES)


def load_rows(keys: Ref, first: Array, live: Array | None, rows: int, start: int, columns: int) -> Array:
    """Columns of some rows; of those that are `live`, where the last ones may not exist."""
    shape = (rows, columns)
    part = keys.at[pl.ds(first, rows), pl.ds(start, columns)]
    if live is None:
        return part[...]
    return plt.load(part, mask=jnp.broadcast_to(live[:, None], shape), other=jnp.asarray(0, keys.dtype))


class Refs(NamedTuple):
    """Arrays in, arrays out. `blocks` is there with pools only."""

    q: Ref
    weights: Ref
    visible: Ref
    keys: Ref
    blocks: Ref | None
    scores: Ref
    fine: Ref
    coarse: Ref


def _score(*refs: Ref, keys: int, size: int, places: int, pooled: bool, interpret: bool) -> None:
    """Scores and maxima of `span` keys, as far as there are `places`, for the queries of one program."""
    of = named(Refs, iter(refs), absent=() if pooled else ("blocks",))
    queries, heads, width = of.q.shape
    span = of.scores.shape[1]
    columns = queries * heads
    q, w = of.q[...].reshape(columns, width), of.weights[...].reshape(1, columns)
    packed = of.keys.shape[1] == FP4_ROW
    if packed:
        w = (w.astype(jnp.float32) * 2.0**EXPONENT).astype(jnp.bfloat16)
        even, odd = (operand_order(x) for x in jnp.unstack(q.reshape(columns, BYTES, 2), axis=2))
    visible = of.visible[...]
    first = pl.program_id(1) * span
    row = lax.broadcasted_iota(jnp.int32, (keys,), 0)

    def tile(i: Array, _: None) -> None:
        at = i * keys + row
        if pooled:
            block = plt.load(of.blocks.at[pl.ds(i * (keys // 8), keys // 8)])
            block = jnp.broadcast_to(block[:, None], (keys // 8, 8)).reshape(keys)
            entry = jnp.where(block < 0, size, block * 8 + row % 8)
            from_ = jnp.minimum(entry, size - 1)
            load = lambda start, n: of.keys[from_, pl.ds(start, n)]  # noqa: E731
        else:
            entry = first + at
            live = None if size % keys == 0 else entry < size
            load = lambda start, n: load_rows(of.keys, i * keys, live, keys, start, n)  # noqa: E731
        # dot = q_i . k: of the even channels and of the odd ones
        if packed:
            low, high = unpack(load(0, BYTES), load(BYTES, 4), interpret)
            dot = plt.dot(operand_order(low), even, trans_b=True) + plt.dot(operand_order(high), odd, trans_b=True)
        else:
            dot = plt.dot(load(0, width), q, trans_b=True)
        # hit = weight_i * relu(dot), rounded; score = sum_i hit_i
        hit = hits(dot, w, interpret)
        # The reshape that splits one query off makes Triton move every hit through shared memory.
        score = hit.sum(axis=1)[:, None] if queries == 1 else hit.reshape(keys, queries, heads).sum(axis=2)
        # -inf for what a query does not see, and for NaN
        seen = (entry[:, None] < visible[None, :]) & (score == score)
        score = jnp.where(seen, score, -jnp.inf).astype(jnp.bfloat16)
        of.scores[:, pl.ds(i * keys, keys)] = score.T

    last = jnp.clip((places if pooled else jnp.minimum(jnp.max(visible), size)) - first, 0, span)
    tiles = (last + keys - 1) // keys
    lax.fori_loop(0, tiles, tile, None)
    if not interpret:
        plt.debug_barrier()  # the scores of all threads are written
    # maxima of chunks of 8, and of 8 of those
    written = lax.broadcasted_iota(jnp.int32, (span,), 0) < tiles * keys
    for query in range(queries):
        found = plt.load(of.scores.at[jnp.int32(query), :], mask=written, other=jnp.asarray(-jnp.inf, jnp.bfloat16))
        for ref in (of.fine, of.coarse):
            found = jnp.max(found.astype(jnp.float32).reshape(-1, 8), axis=1)
            number = lax.broadcasted_iota(jnp.int32, found.shape, 0)
            plt.store(
                ref.at[jnp.int32(query), :],
                found.astype(jnp.bfloat16),
                mask=number * (span // found.size) < tiles * keys,
            )


def score(
    q: BFloat16[Array, "B T I J"],
    rows: Shaped[Array, "B S row"],
    weights: BFloat16[Array, "B T I"],
    visible: Int32[Array, "B T"],
    blocks: Int32[Array, "B T K"] | None = None,
    *,
    tile: Tile = H200,
    interpret: bool = False,
) -> Levels:
    """Scores [B T, S'] and their maxima of chunks of 8 and 64: of all rows, or of the blocks of 8 of each query.

    S' is S in whole tiles, or 8 K, which must be whole tiles. Entries that a query does not see are -inf or, past the
    last tile that its program needs, left as they are.
    """
    (batch, tokens, heads, width), size = q.shape, rows.shape[1]
    if 1 << 31 < rows.nbytes <= 1 << 32 and rows.dtype == jnp.uint8:
        raise BackendError(f"indexer: rows of {rows.nbytes} bytes; between 2 and 4 GiB Triton's offsets overflow")
    queries = 1 if blocks is not None else min(tile.queries, pl.next_power_of_2(tokens))
    if tokens % queries:
        raise BackendError(f"indexer: {tokens} queries are not a multiple of {queries}")
    entries = size if blocks is None else blocks.shape[2] * 8
    keys = tile.keys if queries == 1 else tile.keys // 2
    if blocks is not None and entries % keys:
        raise BackendError(f"indexer: pools of {entries} entries are not in multiples of {keys}")
    padded = pl.cdiv(entries, keys) * keys
    span = max(min(tile.span, pl.next_power_of_2(padded)), keys)
    while span > keys and batch * tokens // queries * (padded // span) < tile.programs:
        span //= 2
    of_queries = lambda *shape: pl.BlockSpec((queries, *shape), lambda r, j: (r,) + (0,) * len(shape))  # noqa: E731
    specs = [of_queries(heads, width), of_queries(heads), of_queries()]
    given = [q.reshape(-1, heads, width), weights.reshape(-1, heads), visible.reshape(-1)]
    given.append(rows)
    if blocks is None:
        specs.append(pl.BlockSpec((None, span, rows.shape[2]), lambda r, j: (r * queries // tokens, j, 0)))
    else:
        specs.append(pl.BlockSpec((None, size, rows.shape[2]), lambda r, j: (r // tokens, 0, 0)))
        specs.append(pl.BlockSpec((None, span // 8), lambda r, j: (r, j)))
        given.append(blocks.reshape(batch * tokens, -1))
    levels = pl.pallas_call(
        functools.partial(
            _score, keys=keys, size=size, places=padded, pooled=blocks is not None, interpret=bool(interpret)
        ),
        grid=(batch * tokens // queries, pl.cdiv(padded, span)),
        in_specs=specs,
        out_specs=[pl.BlockSpec((queries, span // n), lambda r, j: (r, j)) for n in (1, 8, 64)],
        out_shape=[jax.ShapeDtypeStruct((batch * tokens, padded // n), jnp.bfloat16) for n in (1, 8, 64)],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="index_rows",
    )(*given)
    return tuple(levels)
