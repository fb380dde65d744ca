"""The site between two sublayers: streams read once, written once, in two launches; of many tokens, in multiples of 8
and where the GPU has `wgmma`, in the one launch of `stream.py`.

**Why.** XLA runs update, collapse, norm and coefficients as separate passes over the M streams: 1.46 ms at T = 8192 on
an H200, 7.5 times the floor of (2M + 2) D values a token. Here a sweep reads X and y and writes X' and the collapse,
2 bytes each, and a finish reads the collapse again. Few tokens are a matter of latency: the sweep splits the width over
blocks too, and the Sinkhorn chain holds its 16 numbers in registers, without a shuffle.

**Numerics.** float32 throughout; X' and the collapse are rounded to bfloat16 and read back rounded, as the reference
does. The product with fn runs on bfloat16 tensor cores with fn split in two, hi + lo, 16 bits of its 24: a relative
error of 2**-17 a term, a hundredth of what bfloat16 streams carry. Sums over blocks of columns run in a fixed order.

**Tiling.** Sweep: a block takes `tokens` rows and `steps` strips of `columns` of each stream, and leaves the float32
partial sums of its 24 products, of X'^2 and of collapse^2. Every block of rows reads all of fn (2 MB of L2), so many
tokens want tall blocks. Finish: some blocks add the partial sums and turn them into coefficients, the others normalize.
A ragged last block repeats the last row, and writes equal values.

Backend: Pallas-Triton; its elementwise part and dot share one layout here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Float32

from pallas_kernels import BackendError, ptx
from pallas_kernels.formats import cast
from pallas_kernels.mhc import stream
from pallas_kernels.mhc.mixes import READ_SQUARE, RECORD, SQUARE, Sizes, mixes, wanted
from pallas_kernels.references import Ref, named
from pallas_kernels.target import choose_tile


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes of the two launches for calls of up to `limit` tokens.

    `lanes` 0: a finishing block turns one token's sums into coefficients, all threads on the same numbers. Else it does
    so for that many tokens, one a thread, and the partial sums are kept with tokens last.
    """

    limit: int
    tokens: int = 16
    columns: int = 64
    steps: int = 1
    warps: int = 4
    stages: int = 1
    lanes: int = 0
    finish_tokens: int = 1
    finish_columns: int = 1024
    finish_warps: int = 4
    granule: ClassVar[int] = 1  # what the tokens are a multiple of

    @property
    def step(self) -> int:
        """What the width is a multiple of."""
        return math.lcm(self.columns * self.steps, self.finish_columns)


ANY = 1 << 30  # tokens
Tiles = tuple[Tile | stream.Tile, ...]  # a call takes the first of a kind it can use that is for so many tokens
H200: Tiles = (
    Tile(limit=16, finish_columns=512, finish_warps=2),
    Tile(limit=256),
    Tile(limit=1024, tokens=32, finish_warps=1),
    stream.Tile(limit=ANY),
    Tile(limit=ANY, tokens=64, columns=32, steps=16, stages=3, lanes=128, finish_tokens=2),
)
B300: Tiles = tuple(tile for tile in H200 if isinstance(tile, Tile))  # it has no wgmma


def split_fn(fn: Float32[Array, "coefficients hidden"]) -> BFloat16[Array, "halves hidden"]:
    """fn as the kernel reads it, once per weight: its high and then its low halves in bfloat16."""
    hi = cast(fn, jnp.bfloat16)
    return jnp.concatenate([hi, cast(fn - hi.astype(jnp.float32), jnp.bfloat16)])


def join_fn(fn: Float[Array, "rows hidden"]) -> Float32[Array, "coefficients hidden"]:
    """fn in float32, from its halves too."""
    return fn if fn.dtype == jnp.float32 else jnp.sum(fn.astype(jnp.float32).reshape(2, -1, fn.shape[1]), axis=0)


def _rows(block: Array, size: int, tokens: int) -> Array:
    """Rows of a block; past the end, the last row again."""
    return jnp.minimum(block * size + jnp.arange(size, dtype=jnp.int32), tokens - 1)


class Sweep(NamedTuple):
    """References of the first launch: arrays in, arrays out."""

    x: Ref
    y: Ref
    post: Ref
    comb: Ref
    mix: Ref
    fn: Ref
    new: Ref
    read: Ref
    part: Ref


class Finish(NamedTuple):
    """References of the second launch: arrays in, arrays out."""

    part: Ref
    scale: Ref
    base: Ref
    read: Ref
    norm: Ref
    normed: Ref
    pre: Ref
    post: Ref
    comb: Ref


def _sweep(*refs: Ref, tile: Tile, streams: int, width: int, fused: bool, interpret: bool) -> None:
    """One block of rows and columns. Unfused, the streams stand as they are: only the sums for their coefficients.

    Arrays are [columns, tokens]: so the rounded streams are a tensor core's right operand as they are, in the layout
    that they are loaded and stored in, and fn's 64 rows fill the left one.
    """
    of = named(Sweep, iter(refs), absent=() if fused else ("y", "post", "comb", "mix", "new", "read"))
    every, chunk, shape = range(streams), pl.program_id(0), (tile.columns, tile.tokens)
    rows = _rows(pl.program_id(1), tile.tokens, of.x.shape[0])
    row = jnp.broadcast_to(rows[None, :], shape)
    # A tensor core's 64 rows: eight of the one half, eight of the other, and so on; the last ones repeat. A thread's
    # accumulator has rows eight apart, so that the halves are added where they are. Of 24 coefficients:
    #     rows 0..7, 16..23, 32..39    hi of 0..7, 8..15, 16..23      rows 48..55    hi of 23
    #     rows 8..15, 24..31, 40..47   lo of the same                 rows 56..63    lo of 23
    count, fn_shape = of.fn.shape[0] // 2, (2 * RECORD, tile.columns)
    fn_row = lax.broadcasted_iota(jnp.int32, fn_shape, 0)
    fn_row = fn_row // 8 % 2 * count + jnp.minimum(fn_row // 16 * 8 + fn_row % 8, count - 1)
    fma = partial(ptx.fma, interpret=interpret)
    if fused:
        post = [of.post[rows, j][None, :] for j in every]
        mix = [of.mix[rows, j][None, :] for j in every]
        comb = [[of.comb[rows, i * streams + j][None, :] for j in every] for i in every]

    def step(k: Array | int, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        product, square, read_square = sums
        first = (k * pl.num_programs(0) + chunk) * tile.columns  # blocks that run together read side by side
        column = first + lax.broadcasted_iota(jnp.int32, shape, 0)
        now = [of.x[row, column + i * width] for i in every]
        fn_column = first + lax.broadcasted_iota(jnp.int32, fn_shape, 1)
        fn = [of.fn[fn_row, fn_column + i * width] for i in every]  # here: no load may wait for a store
        if fused:
            y = of.y[row, column].astype(jnp.float32)
            old, read = [x.astype(jnp.float32) for x in now], jnp.zeros(shape, jnp.float32)
        for j in every:
            rounded = now[j]
            if fused:
                # X'_j = post_j y + sum_i comb[i, j] X_i, rounded
                new = post[j] * y
                for i in every:
                    new = fma(comb[i][j], old[i], new)
                rounded = new.astype(jnp.bfloat16)
                of.new[row, column + j * width] = rounded
            # sum of X'^2
            new = rounded.astype(jnp.float32)
            square = fma(new, new, square)
            if fused:
                # read = sum_j mix_j X'_j
                read = fma(mix[j], new, read)
            # z fn^T
            product += plt.dot(fn[j], rounded)
        if fused:
            # read rounded, and the sum of its squares
            rounded = read.astype(jnp.bfloat16)
            of.read[row, column] = rounded
            read = rounded.astype(jnp.float32)
            read_square = fma(read, read, read_square)
        return product, square, read_square

    zero = jnp.zeros(shape, jnp.float32)
    sums = jnp.zeros((2 * RECORD, tile.tokens), jnp.float32), zero, zero
    product, square, read_square = step(0, sums) if tile.steps == 1 else lax.fori_loop(0, tile.steps, step, sums)
    # z fn^T = z hi^T + z lo^T
    record = product.reshape(-1, 2, 8, tile.tokens).sum(axis=1).reshape(RECORD, tile.tokens)
    place = lax.broadcasted_iota(jnp.int32, record.shape, 0)
    to = _part(of.part, jnp.broadcast_to(rows[None, :], record.shape), chunk * RECORD + place, tile)
    plt.store(to, record, mask=place < count)
    for n, values in ((SQUARE, square), (READ_SQUARE, read_square)):
        _part(of.part, rows, jnp.full(rows.shape, chunk * RECORD + n), tile)[...] = values.sum(axis=0)


def _part(part: Ref, row: Array, place: Array, tile: Tile) -> Ref:
    """Partial sums of tokens `row`, number `place` (chunk * RECORD + n)."""
    return part.at[(place, row) if tile.lanes else (row, place)]


def _sum(part: Ref, rows: Array, n: int, tile: Tile, chunks: int) -> Array:
    """Number n of some tokens, summed over the chunks."""
    shape = (rows.shape[0], pl.next_power_of_2(chunks))
    chunk = lax.broadcasted_iota(jnp.int32, shape, 1)
    row = jnp.broadcast_to(rows[:, None], shape)
    found = _part(part, row, jnp.minimum(chunk, chunks - 1) * RECORD + n, tile)[...]
    return jnp.where(chunk < chunks, found, 0.0).sum(axis=1)


def _sums_of_lanes(part: Ref, rows: Array, numbers: list[int], chunks: int) -> list[Array]:
    """Several numbers of many tokens, one a thread."""

    def add(chunk: Array, total: list[Array]) -> list[Array]:
        return [value + part[chunk * RECORD + n, rows] for value, n in zip(total, numbers, strict=True)]

    return lax.fori_loop(0, chunks, add, [jnp.zeros(rows.shape, jnp.float32)] * len(numbers))


def _sums_of_one(part: Ref, rows: Array, numbers: list[int], chunks: int) -> list[Array]:
    """Several numbers of one token: its partial sums are read as they lie, then picked from the total."""
    shape = (1, pl.next_power_of_2(chunks), RECORD)
    place = lax.broadcasted_iota(jnp.int32, shape, 1) * RECORD + lax.broadcasted_iota(jnp.int32, shape, 2)
    found = part[jnp.broadcast_to(rows[:, None, None], shape), jnp.minimum(place, chunks * RECORD - 1)]
    record = jnp.where(place < chunks * RECORD, found, 0.0).sum(axis=1)
    column = lax.broadcasted_iota(jnp.int32, record.shape, 1)
    return [jnp.where(column == n, record, 0.0).sum(axis=1) for n in numbers]


def _coefficients(
    of: Finish, rows: Array, *, tile: Tile, sizes: Sizes, streams: int, width: int, chunks: int, interpret: bool
) -> None:
    """pre, post and comb of some tokens: `mixes` of their sums."""
    count = streams * (streams + 2)
    scale, base = [of.scale[i] for i in range(3)], [of.base[i] for i in range(count)]  # before any store
    number = (_sums_of_lanes if tile.lanes else _sums_of_one)(of.part, rows, wanted(streams), chunks)
    reciprocal = partial(ptx.reciprocal, interpret=interpret)
    pre, post, comb = mixes(number, scale, base, streams=streams, width=width, sizes=sizes, reciprocal=reciprocal)
    for j in range(streams):
        of.pre[rows, j] = pre[j]
        of.post[rows, j] = post[j]
    for i, line in enumerate(comb):
        for j, value in enumerate(line):
            of.comb[rows, i * streams + j] = value


def _finish(
    *refs: Ref, tile: Tile, sizes: Sizes, streams: int, width: int, chunks: int, fused: bool, interpret: bool
) -> None:
    """Some blocks make coefficients, the rest normalize: both read the sweep's sums."""
    of = named(Finish, iter(refs), absent=() if fused else ("read", "norm", "normed"))
    tokens = of.comb.shape[0]
    block, each = pl.program_id(0), max(tile.lanes, 1)
    makers = -(-tokens // each)

    @pl.when(block < makers)
    def coefficients() -> None:
        static: dict[str, Any] = {"streams": streams, "width": width, "chunks": chunks, "interpret": interpret}
        _coefficients(of, _rows(block, each, tokens), tile=tile, sizes=sizes, **static)

    if not fused:
        return

    @pl.when(block >= makers)
    def normalize() -> None:
        parts = width // tile.finish_columns
        rows = _rows((block - makers) // parts, tile.finish_tokens, tokens)
        here = pl.ds((block - makers) % parts * tile.finish_columns, tile.finish_columns)
        # norm * (read * rsqrt(mean(read^2) + eps))
        read, weight = of.read[rows, here].astype(jnp.float32), of.norm[here].astype(jnp.float32)
        inverse = lax.rsqrt(_sum(of.part, rows, READ_SQUARE, tile, chunks) / width + sizes.eps)
        of.normed[rows, here] = (weight[None, :] * (read * inverse[:, None])).astype(jnp.bfloat16)


def _launches(
    x: Array,
    given: tuple[Array, ...],
    norm: Array | None,
    fn: Float[Array, "rows hidden"],
    scale: Array,
    base: Array,
    *,
    sizes: Sizes,
    tile: Tile,
    interpret: bool,
) -> list[Array]:
    """The two launches on flat rows: [X', what the next sublayer reads,] pre, post, comb."""
    (tokens, streams, width), fused = x.shape, norm is not None
    chunks = width // (tile.columns * tile.steps)
    sums = (chunks * RECORD, tokens) if tile.lanes else (tokens, chunks * RECORD)
    part = jax.ShapeDtypeStruct(sums, jnp.float32)
    read = jax.ShapeDtypeStruct((tokens, width), x.dtype)
    new = jax.ShapeDtypeStruct((tokens, streams * width), x.dtype)
    static: dict[str, Any] = {"tile": tile, "streams": streams, "width": width, "fused": fused, "interpret": interpret}
    *written, part = pl.pallas_call(
        partial(_sweep, **static),
        grid=(chunks, -(-tokens // tile.tokens)),
        out_shape=[new, read, part] if fused else [part],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        name="mhc_sweep",
        interpret=interpret,
    )(x.reshape(tokens, -1), *given, fn)
    coefficients = [jax.ShapeDtypeStruct((tokens, n), jnp.float32) for n in (streams, streams, streams * streams)]
    blocks = -(-tokens // max(tile.lanes, 1))
    blocks += -(-tokens // tile.finish_tokens) * (width // tile.finish_columns) if fused else 0
    *normed, pre, post, comb = pl.pallas_call(
        partial(_finish, sizes=sizes, chunks=chunks, **static),
        grid=(blocks,),
        out_shape=[*[read] * fused, *coefficients],
        compiler_params=plt.CompilerParams(num_warps=tile.finish_warps, num_stages=1),
        name="mhc_finish",
        interpret=interpret,
    )(part, scale, base, *([written[1], norm] if fused else []))
    return [*written[:1], *normed, pre, post, comb.reshape(tokens, streams, streams)]


def _fits[T: Tile | stream.Tile](
    x: Array, fn: Array, tiles: Tiles | None, kinds: tuple[type[T], ...], **others: Array
) -> T:
    """The tile for this call, of one of the `kinds` of kernel, or the rule that it breaks."""
    for name, array in {"x": x, **others}.items():
        if array.dtype != jnp.bfloat16:
            raise BackendError(f"backend 'pallas': mhc takes {name} in bfloat16, not {array.dtype}")
    streams, width = x.shape[-2:]
    tokens, count = math.prod(x.shape[:-2]), streams * (streams + 2)
    tiles = choose_tile({"sm_90": H200, "sm_103": B300}) if tiles is None else tiles
    tile = next(t for t in tiles if isinstance(t, kinds) and tokens <= t.limit and tokens % t.granule == 0)
    if width % tile.step or count > RECORD - 2 or tokens == 0:
        rule = f"a width in multiples of {tile.step}, at most {RECORD - 2} coefficients and a token"
        raise BackendError(f"backend 'pallas': mhc takes {rule}; x is {x.shape}")
    return tile


_STATIC = ("iterations", "eps", "hc_eps", "tile", "interpret")


@partial(jax.jit, static_argnames=_STATIC)  # a model traces it once a shape
def coefficients(
    x: Float[Array, "*lead M D"],
    fn: Float[Array, "rows hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
    tile: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """As the reference's; `fn` may be its halves."""
    chosen, lead = _fits(x, fn, tile, (Tile,)), x.shape[:-2]
    flat = x.reshape(-1, *x.shape[-2:])
    sizes, fn = Sizes(iterations, eps, hc_eps), split_fn(fn) if fn.dtype == jnp.float32 else fn
    out = _launches(flat, (), None, fn, scale, base, sizes=sizes, tile=chosen, interpret=interpret)
    pre, post, comb = (value.reshape(*lead, *value.shape[1:]) for value in out)
    return pre, post, comb


@partial(jax.jit, static_argnames=_STATIC)
def site(
    x: Float[Array, "*lead M D"],
    y: Float[Array, "*lead D"],
    post: Float32[Array, "*lead M"],
    comb: Float32[Array, "*lead M M"],
    mix: Float32[Array, "*lead M"],
    norm: Float[Array, " D"],
    fn: Float[Array, "rows hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
    tile: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """As the reference's; `fn` may be its halves."""
    chosen = _fits(x, fn, tile, (Tile, stream.Tile), y=y, norm=norm)
    lead, (streams, width) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(-1, streams, width)
    given = y.reshape(-1, width), post.reshape(-1, streams), comb.reshape(-1, streams**2), mix.reshape(-1, streams)
    sizes, fn = Sizes(iterations, eps, hc_eps), split_fn(fn) if fn.dtype == jnp.float32 else fn
    arrays = flat, given, norm, fn, scale, base
    if isinstance(chosen, stream.Tile):
        out = stream.site(*arrays, sizes=sizes, tile=chosen, interpret=interpret)
    else:
        out = _launches(*arrays, sizes=sizes, tile=chosen, interpret=interpret)
    new, read, pre, post, made = (value.reshape(*lead, *value.shape[1:]) for value in out)
    return new.reshape(x.shape), read, pre, post, made.reshape(comb.shape)
