"""Products of quantized weight rows with groups of tokens: one persistent, warp-specialized Mosaic GPU kernel.

    out[m, r] = combine(first[e, r] . x[m], second[e, r] . x[m])      m of a tile of tokens, all of expert e

**Why.** Quantized weights are the bytes of a decode step. XLA writes them out as bfloat16 and reads those; here each is
read once, as stored, and becomes bfloat16 in the registers from which the matrix instruction takes it (`fragments`).

**Numerics.** Weights are exact in bfloat16; products and sums are float32, in an order that depends on nothing but K.

**Tiling.** A block of threads is one warpgroup that loads and `warpgroups` that multiply, one block on every
multiprocessor for all of the work: block b takes the items b, b + blocks, ... An item is a tile of tokens by 64 rows a
warpgroup of both matrices, over all columns or a split of them. Loads run `stages` steps ahead, past the end of an
item. Of a step, a warpgroup decodes 64 columns of 64 rows while the matrix instruction works on the ones before, and
gives buffers back when the first product of the next step has replaced the last one in flight. Tokens are the
instruction's N dimension, which may be any multiple of 8, so that a tile of few tokens costs few. Scales go from device
memory straight to the threads that need them, a step ahead.

Backend: Mosaic GPU, since Triton keeps no operand out of its own schedule. On Hopper `wgmma`; where that is missing
(B300) the same kernel with `mma.sync`, `wgmma=False`, which agrees on an H200 and was only compiled for a B300.
Offsets are the copy engine's coordinates and 64-bit pointers: operands may pass 2**31 elements, which Triton's
lowering addresses with 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.fragments import CHUNK, COLUMNS, ROWS, UNSCALE, Format
from pallas_kernels.hopper.program import COLUMN, repeat, swizzled
from pallas_kernels.references import Ref, named
from pallas_kernels.target import multiprocessors

REGISTERS = 512  # that an SM has for each of the 128 threads of a warpgroup
LOADING_REGISTERS = 40  # of a thread that loads
GRANULE = 8  # tokens: tiles start at multiples of it, and are written in multiples of it


@dataclass(frozen=True, kw_only=True)
class Tile:
    """`widths`: the token counts that a tile may have, ascending multiples of 8; it takes the least that holds it.

    `stages` buffers of `chunks` x 128 columns; `ahead` matrix instructions in flight while the next operand is decoded.
    """

    widths: tuple[int, ...]
    warpgroups: int = 2
    chunks: int = 2
    stages: int = 4
    ahead: int = 1
    wgmma: bool = True
    blocks: int = multiprocessors("sm_90")


def registers(warpgroups: int) -> int:
    """Registers of a thread that multiplies: 240, 232, 152, 104 for one to four such warpgroups.

    A launch gives every warpgroup the same part of the SM's, in multiples of 8; the loading one keeps LOADING_REGISTERS
    of its own, and the others share the rest. More than 240 the compiler has no use for.

        warpgroups 4, one more that loads:   512 / 5 -> 96 at launch       5 * 96 = 480 in all
        (480 - 40) / 4 = 110 -> 104
    """
    launched = (warpgroups + 1) * _eights(REGISTERS // (warpgroups + 1))
    return min(_eights((launched - LOADING_REGISTERS) // warpgroups), 240)


def _eights(count: int) -> int:
    return count // 8 * 8


class Plan(NamedTuple):
    """Tiles of tokens: whose weights, first row of x (a multiple of 8), rows; [1] how many tiles there are."""

    expert: jax.Array
    start: jax.Array
    live: jax.Array
    tiles: jax.Array


class Arrays(NamedTuple):
    """Device memory. `second` is `first` where there is one matrix; `weights` is None where nothing combines."""

    x: Ref
    first: Ref
    first_scales: Ref
    second: Ref
    second_scales: Ref
    expert: Ref
    start: Ref
    live: Ref
    tiles: Ref
    weights: Ref | None
    out: Ref


class Buffers(NamedTuple):
    """Shared memory, by stage, and `out` by multiplying warpgroup. A stage is `full` when x and both matrices have
    arrived, and `empty` when every multiplying warpgroup is done with it."""

    x: Ref
    first: Ref
    second: Ref
    out: Ref
    full: Ref
    empty: Ref


def stream(
    x: jax.Array,
    first: tuple[jax.Array, jax.Array],
    second: tuple[jax.Array, jax.Array] | None,
    plan: Plan,
    weights: jax.Array | None = None,
    *,
    form: Format,
    tile: Tile,
    combine: Callable[..., jax.Array] | None = None,
    dtype: Any = jnp.bfloat16,
    splits: int = 1,
    tokens_inner: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """x [M, K], columns in the order of `form.permute`; codes uint8 [E, R, bytes], scales uint8 [E, R / n, K / 32].

    `combine(a, b, weights)` gets float32 products [64, tokens] of both matrices and the tokens' `weights` [M]. Without
    it there is no `second`, and an item takes twice the rows of `first`. Returns [M, R]; with `splits` of x's columns,
    [splits * M, R] of partial sums. x may have more columns than the matrices, zeros, so that it splits evenly. Rows of
    no tile are not written. `tokens_inner`: neighbouring items share weights rather than tokens.
    """
    columns, span = CHUNK * tile.chunks, ROWS * tile.warpgroups
    rows = first[0].shape[1]
    apart = 0 if combine else span
    width = tile.widths[-1]

    def body(*refs: Ref) -> None:
        given = iter(refs)
        block = Block(
            arrays=named(Arrays, given, absent=("weights",) if weights is None else ()),
            buffers=named(Buffers, given),
            form=form,
            tile=tile,
            combine=combine,
            steps=x.shape[1] // columns // splits,
            row_blocks=rows // (span + apart),
            splits=splits,
            apart=apart,
            tokens_inner=tokens_inner,
            interpret=interpret,
        )
        role = lax.axis_index("warpgroup")
        pl.when(role == tile.warpgroups)(block.load)
        pl.when(role < tile.warpgroups)(lambda: block.multiply(role))

    stored = form.chunk_bytes * tile.chunks
    scratch: Any = [
        plgpu.SMEM((tile.stages, width, columns), jnp.bfloat16, transforms=swizzled()),
        plgpu.SMEM((tile.stages, span, stored), jnp.uint8),
        plgpu.SMEM((tile.stages, span, stored), jnp.uint8),
        plgpu.SMEM((tile.warpgroups, width, ROWS), dtype, transforms=swizzled(128 // jnp.dtype(dtype).itemsize, dtype)),
        plgpu.Barrier(num_arrivals=3, num_barriers=tile.stages),
        plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    ]
    arguments = [x, *first, *(second or first), *plan, *([] if weights is None else [weights])]
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits * x.shape[0], rows), dtype),
        grid=(tile.blocks,),
        grid_names=("block",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return call(*arguments)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of threads: one warpgroup that loads, the others multiply."""

    arrays: Arrays
    buffers: Buffers
    form: Format
    tile: Tile
    combine: Callable[..., jax.Array] | None
    steps: int
    row_blocks: int
    splits: int
    apart: int  # rows between the two that a warpgroup multiplies
    tokens_inner: bool
    interpret: bool

    @property
    def last(self) -> int:
        """The last step that the matrices have columns for; a later one takes them again, times zeros."""
        return self.arrays.first.shape[2] // (self.form.chunk_bytes * self.tile.chunks) - 1

    def each_item(self, body: Callable[[Any, Any, Any, Any], None]) -> Any:
        """body(ordinal, tile of tokens, first row, split of the columns) for the items of this block; their number."""
        tile, tiles, block = self.tile, self.arrays.tiles[0], lax.axis_index("block")
        mine = lax.div(tiles * (self.row_blocks * self.splits) - block + (tile.blocks - 1), tile.blocks)

        def one(i: jax.Array) -> None:
            n = block + i * tile.blocks
            split, n = lax.div(n, tiles * self.row_blocks), lax.rem(n, tiles * self.row_blocks)
            inner = tiles if self.tokens_inner else self.row_blocks
            fast, slow = lax.rem(n, inner), lax.div(n, inner)
            t, r = (fast, slow) if self.tokens_inner else (slow, fast)
            body(i, t, r * (ROWS * tile.warpgroups + self.apart), split)

        repeat(mine, one)
        return mine

    def each_width(self, live: Any, body: Callable[[int], None]) -> None:
        """body(w) for the width that the live rows of a tile take."""
        below = 0
        for width in self.tile.widths:
            pl.when((live > below) & (live <= width))(lambda width=width: body(width))
            below = width

    def slot(self, ordinal: Any, step: Any) -> tuple[Any, Any]:
        """(number, stage) of a step of this block's `ordinal`-th item."""
        n = ordinal * self.steps + step
        return n, lax.rem(n, self.tile.stages)

    def release(self, n: Any) -> None:
        """A multiplying warpgroup needs the buffers of its n-th step no more."""
        plgpu.barrier_arrive(self.buffers.empty.at[lax.rem(n, self.tile.stages)])

    def load(self) -> None:
        """The loading warpgroup."""
        tile, arrays, buffers = self.tile, self.arrays, self.buffers
        columns, stored = CHUNK * tile.chunks, self.form.chunk_bytes * tile.chunks
        span = ROWS * tile.warpgroups
        if not self.interpret:
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

        def item(ordinal: Any, t: Any, row: Any, split: Any) -> None:
            expert, start, live = arrays.expert[t], pl.multiple_of(arrays.start[t], GRANULE), arrays.live[t]

            def step(k: jax.Array) -> None:
                n, slot = self.slot(ordinal, k)
                pl.when(n >= tile.stages)(lambda: plgpu.barrier_wait(buffers.empty.at[slot]))
                full = buffers.full.at[slot]
                at = split * self.steps + k
                here = pl.ds(lax.min(at, self.last) * stored, stored)
                plgpu.copy_gmem_to_smem(arrays.first.at[expert, pl.ds(row, span), here], buffers.first.at[slot], full)
                far = pl.ds(row + self.apart, span)
                plgpu.copy_gmem_to_smem(arrays.second.at[expert, far, here], buffers.second.at[slot], full)
                self.each_width(
                    live,
                    lambda width: plgpu.copy_gmem_to_smem(
                        arrays.x.at[pl.ds(start, width), pl.ds(at * columns, columns)],
                        buffers.x.at[slot, pl.ds(0, width)],
                        full,
                    ),
                )

            repeat(self.steps, step)

        steps = self.each_item(item) * self.steps
        last = lax.min(steps, tile.stages)  # every arrival is waited for
        repeat(last, lambda k: plgpu.barrier_wait(buffers.empty.at[lax.rem(steps - last + k, tile.stages)]))

    def multiply(self, role: Any) -> None:
        """A multiplying warpgroup."""
        arrays = self.arrays
        if not self.interpret:
            plgpu.set_max_registers(registers(self.tile.warpgroups), action="increase")

        def item(ordinal: Any, t: Any, row: Any, split: Any) -> None:
            expert, live = arrays.expert[t], arrays.live[t]
            start = pl.multiple_of(arrays.start[t], GRANULE)
            row += role * ROWS

            def tokens(width: int) -> None:
                sums = self.products(role, ordinal, expert, row, split, width)
                sums = [value * UNSCALE for value in sums]
                # out = combine(first . x, second . x, weights), or both products
                if self.combine:
                    layout = None if self.interpret else COLUMN
                    weights = plgpu.load(arrays.weights.at[pl.ds(start, width)], layout=layout, optimized=False)
                    sums = [self.combine(*sums, lax.broadcast_in_dim(weights, sums[0].shape, (1,)))]
                base = pl.multiple_of(split * arrays.x.shape[0] + start, GRANULE)
                for n, value in enumerate(sums):
                    self.store(role, value, live, base, row + n * self.apart)

            self.each_width(live, tokens)

        self.each_item(item)
        plgpu.wait_smem_to_gmem(0)

    def products(self, role: Any, ordinal: Any, expert: Any, row: Any, split: Any, width: int) -> Any:
        """Float32 sums over the columns, [64, width] of both matrices, times 1 / UNSCALE."""
        buffers, chunks = self.buffers, self.tile.chunks
        matrices = buffers.first, buffers.second
        in_registers = self.interpret or not self.tile.wgmma
        rows = pl.ds(role * ROWS, ROWS)

        def product(*accumulators: Any) -> Any:
            def step(k: Any, carry: Any) -> Any:
                scales, partial = carry
                n, slot = self.slot(ordinal, k)
                plgpu.barrier_wait(buffers.full.at[slot])
                following = self.scales(expert, row, split, k + 1)
                # sums += matrix[rows, 64 columns] x[tokens, 64 columns]^T
                for chunk in range(chunks):
                    codes = [self.form.read(ref.at[slot, rows], chunk, interpret=self.interpret) for ref in matrices]
                    for half in range(2):
                        at = pl.ds(chunk * CHUNK + half * COLUMNS, COLUMNS)
                        right = buffers.x.at[slot, pl.ds(0, width), at].transpose((1, 0))
                        partial = [
                            self.accumulate(acc, value, self.fragment(words, scale, chunk, half), right)
                            for acc, value, words, scale in zip(accumulators, partial, codes, scales, strict=True)
                        ]
                        if (chunk, half) == (0, 0):  # no instruction of the step before is in flight any more
                            pl.when(k > 0)(lambda: self.release(n - 1))
                return following, tuple(partial)

            begin = (self.zeros(width) if in_registers else 0,) * 2
            _, partial = lax.fori_loop(0, self.steps, step, (self.scales(expert, row, split, 0), begin))
            sums = partial if in_registers else tuple(acc[...] for acc in accumulators)
            self.release(self.slot(ordinal, self.steps - 1)[0])
            return sums

        if in_registers:
            return product(None, None)
        return pl.run_scoped(product, plgpu.ACC((ROWS, width)), plgpu.ACC((ROWS, width)))

    def scales(self, expert: Any, row: Any, split: Any, step: Any) -> tuple[jax.Array, jax.Array]:
        """Scale words of both matrices for a step, the last one's again past the end."""
        form, chunks = self.form, self.tile.chunks
        at = lax.min(split * self.steps + lax.min(step, self.steps - 1), self.last)
        groups = pl.ds(at * (4 * chunks), 4 * chunks)

        def words(ref: Any, row: Any) -> jax.Array:
            here = pl.ds(lax.div(row, form.block_rows), ROWS // form.block_rows)
            return form.scales(ref.at[expert, here, groups], chunks, interpret=self.interpret)

        return words(self.arrays.first_scales, row), words(self.arrays.second_scales, row + self.apart)

    def fragment(self, codes: jax.Array, scales: jax.Array, chunk: int, half: int) -> jax.Array:
        """64 rows x 64 columns of a matrix in bfloat16, as the matrix instruction takes them."""
        return self.form.fragment(codes, scales, chunk, half, interpret=self.interpret, wgmma=self.tile.wgmma)

    def zeros(self, width: int) -> jax.Array:
        """Sums in registers, before the first product."""
        value = jnp.zeros((ROWS, width), jnp.float32)
        return value if self.interpret else plgpu.layout_cast(value, plgpu.Layout.MMA_ACC(jnp.bfloat16))

    def accumulate(self, accumulator: Any, partial: Any, left: jax.Array, right: Any) -> Any:
        """Adds left @ right to `accumulator`, or without `wgmma` to `partial`, which is returned.

        The interpreter has no matrix instruction with an operand in registers."""
        if self.interpret:
            return partial + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        if self.tile.wgmma:
            plgpu.wgmma(accumulator, left, right)
            plgpu.wgmma_wait(self.tile.ahead)
            return partial
        return plgpu.mma(partial, left, plgpu.load(right, layout=plgpu.Layout.MMA_RHS(jnp.bfloat16), optimized=False))

    def store(self, role: Any, value: jax.Array, live: Any, base: Any, column: Any) -> None:
        """64 columns of the first `live` tokens, in whole granules: the next tile starts after them."""
        width, out, columns = value.shape[1], self.arrays.out, pl.ds(column, ROWS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer = self.buffers.out.at[role, pl.ds(0, width)].transpose((1, 0))
        value = value.astype(out.dtype)
        buffer[...] = value if self.interpret else plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

        @pl.when(live > width - GRANULE)
        def whole() -> None:
            plgpu.copy_smem_to_gmem(self.buffers.out.at[role, pl.ds(0, width)], out.at[pl.ds(base, width), columns])

        @pl.when(live <= width - GRANULE)
        def part() -> None:
            def granule(g: Any) -> None:
                g = pl.multiple_of(g * GRANULE, GRANULE)
                to = pl.ds(pl.multiple_of(base + g, GRANULE), GRANULE)
                plgpu.copy_smem_to_gmem(self.buffers.out.at[role, pl.ds(g, GRANULE)], out.at[to, columns])

            repeat(lax.div(live + (GRANULE - 1), GRANULE), granule)
