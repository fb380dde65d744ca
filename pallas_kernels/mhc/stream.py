"""The site of many tokens on Hopper in one launch: every byte of the streams, y and the next input moves once.

**Why.** The two launches of `kernel.py` keep what they load in registers, so too few loads are in flight, and their
blocks have a part of a row each, so the collapse is written, read again and normed by the second. Here copies run
ahead into shared memory, and a row's collapse stays there until its sum of squares is known.

**Numerics.** As in `kernel.py`: float32, X' and the collapse rounded to bfloat16 where the reference rounds them, fn in
two bfloat16 halves, sums over parts of a row in a fixed order.

**Tiling.** A team of `slices` programs has 64 rows at a time, each every `slices`-th strip of `columns`: those that run
together touch neighbouring bytes. A program is four warpgroups, which hand each other buffers by barriers:

    load      copies a strip of the M streams and of y into one of `stages` buffers, and of fn into one of `fn_stages`
    mix       updates it in the layout in which the tensor core takes X' from registers; X' takes X's place there
    collapse  copies X' out; puts the collapse into a ring that holds the strips of an item and `lag` more
    finish    waits until all of the team have left their sums of these rows, a counter in device memory; norms the
              ring's strips in place and copies them out, while the next rows are being mixed; in the end turns the
              sums of every `slices`-th item of the team into coefficients

Programs stay resident, one a multiprocessor. A team waits only for its own programs, neighbours in launch order, so it
gets through on a smaller GPU too. A ragged last block takes the last 64 rows, and writes some again with equal values.

Backend: Mosaic GPU, for its copy engine and `wgmma`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.program import COLUMN, repeat, swizzled
from pallas_kernels.mhc.mixes import READ_SQUARE, RECORD, SQUARE, Sizes, mixes, wanted
from pallas_kernels.mhc.team import ROWS, Arrays, Buffers, Team, Tile
from pallas_kernels.references import Ref, named

PIECE = 32  # columns of a strip that a thread holds in float32 at a time
LANES = 8
WARPGROUPS = 4

__all__ = ["Tile", "site"]


def site(
    x: jax.Array,
    given: Sequence[jax.Array],
    norm: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    *,
    sizes: Sizes,
    tile: Tile,
    interpret: bool = False,
) -> list[jax.Array]:
    """On flat rows: x [T, M, D], given y [T, D], post, comb [T, M*M], mix, fn in halves [2C, M*D]. Returns X', what the
    next sublayer reads, pre, post, comb [T, M*M]."""
    tokens, streams, width = x.shape
    blocks, halves = -(-tokens // ROWS), fn.shape[0]
    strips, teams = width // tile.step, min(tile.teams, blocks)

    def body(*refs: Ref) -> None:
        given = iter(refs)
        arrays, buffers = named(Arrays, given), named(Buffers, given)
        program, role = lax.axis_index("program"), lax.axis_index("warpgroup")
        work = _Program(
            arrays=arrays,
            buffers=buffers,
            counters=None if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))),
            tile=tile,
            teams=teams,
            sizes=sizes,
            team=lax.div(program, tile.slices),
            part=lax.rem(program, tile.slices),
            strips=strips,
            blocks=blocks,
            interpret=interpret,
        )
        launched = 512 // WARPGROUPS
        for n, run in enumerate((work.load, work.mix, work.collapse, work.finish)):

            def start(run: Callable[[], None] = run, registers: int = tile.registers[n]) -> None:
                if not interpret:
                    plgpu.set_max_registers(registers, action="increase" if registers > launched else "decrease")
                run()

            pl.when(role == n)(start)

    transforms = () if interpret else swizzled(tile.columns)
    tiled = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=transforms)
    like = partial(jax.ShapeDtypeStruct, dtype=x.dtype)
    numbers = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    coefficients = [numbers((tokens, n)) for n in (streams, streams, streams**2)]
    call = plgpu.kernel(
        body,
        out_type=[like(x.shape), like((tokens, width)), *coefficients, numbers((blocks * ROWS, tile.slices, RECORD))],
        scratch_types=[
            tiled((tile.stages, streams + 1, ROWS, tile.columns)),
            tiled((tile.fn_stages, streams, halves, tile.columns)),
            tiled((strips + tile.lag, ROWS, tile.columns)),
            plgpu.Barrier(num_arrivals=streams + 1, num_barriers=tile.stages),
            plgpu.Barrier(num_arrivals=streams, num_barriers=tile.fn_stages),
            plgpu.Barrier(num_barriers=tile.stages),
            plgpu.Barrier(num_barriers=strips + tile.lag),
            plgpu.Barrier(num_barriers=strips + tile.lag),
            plgpu.Barrier(num_barriers=tile.stages),
            plgpu.Barrier(num_barriers=tile.fn_stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=blocks if interpret else 1),
        ],
        grid=(teams * tile.slices,),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="mhc_site",
        # The rows that a ragged block writes again, with equal values, would count as a race.
        interpret=plgpu.InterpretGPUParams(detect_races=tokens % ROWS == 0) if interpret else None,
    )
    return call(x, *given, norm, fn.reshape(halves, streams, width), scale, base)[:-1]


class _Program(Team):
    """The four warpgroups of a program."""

    def load(self) -> None:
        """The warpgroup that loads: x and y run ahead of fn, whose buffers are fewer."""
        arrays, buffers, tile = self.arrays, self.buffers, self.tile
        ahead = tile.stages - tile.fn_stages

        def streams(n: Any) -> None:
            slot = lax.rem(n, tile.stages)
            rows, columns = self.rows(lax.div(n, self.strips)), self.columns(lax.rem(n, self.strips))
            full = buffers.full.at[slot]
            for j in self.every:
                plgpu.copy_gmem_to_smem(arrays.x.at[rows, j, columns], buffers.strips.at[slot, j], full)
            plgpu.copy_gmem_to_smem(arrays.y.at[rows, columns], buffers.strips.at[slot, len(self.every)], full)

        def weights(n: Any) -> None:
            slot, columns = lax.rem(n, tile.fn_stages), self.columns(lax.rem(n, self.strips))
            for j in self.every:
                full = buffers.fn_full.at[slot]
                plgpu.copy_gmem_to_smem(arrays.fn.at[:, j, columns], buffers.fn.at[slot, j], full)

        def free(barriers: Any, n: Any, count: int) -> None:
            pl.when((n >= count) & (n < self.steps))(lambda: plgpu.barrier_wait(barriers.at[lax.rem(n, count)]))

        def step(n: Any) -> None:
            free(buffers.empty, n, tile.stages)
            pl.when(n < self.steps)(lambda: streams(n))
            free(buffers.fn_empty, n - ahead, tile.fn_stages)
            pl.when(n >= ahead)(lambda: weights(n - ahead))

        def run() -> None:
            repeat(self.steps + ahead, step)
            self.drain(buffers.empty, tile.stages)
            self.drain(buffers.fn_empty, tile.fn_stages)

        if self.interpret:
            run()
            return

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def warps() -> None:  # one issues the copies: each lane arrives for each
            pl.when(lax.axis_index("warp") == 0)(run)

    def mix(self) -> None:
        """The warpgroup that updates the streams and multiplies them with fn."""
        arrays, halves, fn_stages = self.arrays, self.buffers.fn.shape[2], self.tile.fn_stages
        count = halves // 2

        def item(k: Any) -> None:
            rows = self.rows(k)
            post = [self.get(arrays.post.at[rows, j]) for j in self.every]
            comb = [[self.get(arrays.comb.at[rows, i * len(self.every) + j]) for j in self.every] for i in self.every]

            def strips(accumulator: Any) -> Any:
                def step(strip: Any, product: Any) -> Any:
                    return self.mix_strip(k * self.strips + strip, strip, product, accumulator, post, comb)

                product = jnp.zeros((ROWS, halves), jnp.float32) if self.interpret else 0
                product = lax.fori_loop(0, self.strips, step, product)
                if not self.interpret:
                    plgpu.wgmma_wait(0)
                    product = accumulator[...]
                last = (k + 1) * self.strips - 1
                plgpu.barrier_arrive(self.buffers.fn_empty.at[lax.rem(last, fn_stages)])
                return product[:, :count] + product[:, count:]  # hi and lo

            product = strips(None) if self.interpret else pl.run_scoped(strips, plgpu.ACC((ROWS, halves)))
            arrays.parts[pl.ds(self.block(k) * ROWS, ROWS), self.part, pl.ds(0, count)] = product
            self.leave(k)

        self.each_item(item)

    def mix_strip(self, n: Any, strip: Any, product: Any, accumulator: Any, post: Any, comb: Any) -> Any:
        """Update one strip in place; returns the products, in interpret mode."""
        buffers, tile = self.buffers, self.tile
        slot, fn_slot = lax.rem(n, tile.stages), lax.rem(n, tile.fn_stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        updated: list[list[jax.Array]] = [[] for _ in self.every]
        for start in range(0, tile.columns, PIECE):
            *old, y = [
                self.strip(buffers.strips.at[slot, j])[:, start : start + PIECE].astype(jnp.float32)
                for j in range(len(self.every) + 1)
            ]
            for j in self.every:
                # X'_j = post_j y + sum_i comb[i, j] X_i, rounded
                new = _wide(post[j], y) * y
                for i in self.every:
                    new += _wide(comb[i][j], y) * old[i]
                updated[j].append(new.astype(jnp.bfloat16))

        @pl.when(strip > 0)
        def release() -> None:  # by now the products of the last strip are done
            if not self.interpret:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(buffers.fn_empty.at[lax.rem(n - 1, tile.fn_stages)])

        plgpu.barrier_wait(buffers.fn_full.at[fn_slot])
        # z fn^T, fn in halves; X' takes X's place
        for j in self.every:
            rounded = updated[j][0] if len(updated[j]) == 1 else jnp.concatenate(updated[j], axis=1)
            buffers.strips[slot, j] = rounded
            if self.interpret:  # which has no matrix instruction with an operand in registers
                product += jnp.dot(rounded, buffers.fn[fn_slot, j].T, preferred_element_type=jnp.float32)
            else:
                plgpu.wgmma(accumulator, rounded, plgpu.transpose_ref(buffers.fn.at[fn_slot, j], (1, 0)))
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.mixed.at[slot])
        return product

    def leave(self, k: Any) -> None:
        """Tell the team that this warpgroup's sums of an item are in device memory."""
        if self.interpret:
            plgpu.barrier_arrive(self.buffers.done.at[k])
        else:
            plgpu.commit_smem()  # all threads have written
            plgpu.semaphore_signal(self.counters.at[self.block(k)], memory_scope="gpu")

    def collapse(self) -> None:
        """The warpgroup that copies X' out, and collapses it into the ring."""
        arrays, buffers, tile = self.arrays, self.buffers, self.tile

        def item(k: Any) -> None:
            rows = self.rows(k)
            mix = [self.get(arrays.mix.at[rows, j]) for j in self.every]

            def step(strip: Any, sums: Any) -> Any:
                square, read_square = sums
                n = k * self.strips + strip
                slot, place = lax.rem(n, tile.stages), lax.rem(n, self.ring)
                plgpu.barrier_wait(buffers.mixed.at[slot])
                for j in self.every:
                    to = arrays.new.at[rows, j, self.columns(strip)]
                    plgpu.copy_smem_to_gmem(buffers.strips.at[slot, j], to)
                # read = sum_j mix_j X'_j, rounded; sums of X'^2 and of read^2
                read = None
                for j in self.every:
                    new = self.strip(buffers.strips.at[slot, j]).astype(jnp.float32)
                    square = _add_squares(square, new)
                    read = _wide(mix[j], new) * new + (0.0 if read is None else read)
                rounded = _bfloat16(read)
                read_square = _add_squares(read_square, rounded.astype(jnp.float32))
                pl.when(n >= self.ring)(lambda: plgpu.barrier_wait(buffers.free.at[place]))
                buffers.ring[place] = rounded
                plgpu.commit_smem()  # what was read here is copied over next
                plgpu.barrier_arrive(buffers.taken.at[place])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(buffers.empty.at[slot])
                return square, read_square

            zero = jnp.zeros((ROWS, LANES), jnp.float32)
            if not self.interpret:
                zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)
            square, read_square = lax.fori_loop(0, self.strips, step, (zero, zero))
            self.part_of(k, self.part, SQUARE)[...] = square.sum(axis=1)
            self.part_of(k, self.part, READ_SQUARE)[...] = read_square.sum(axis=1)
            self.leave(k)

        self.each_item(item)
        plgpu.wait_smem_to_gmem(0)
        self.drain(buffers.free, self.ring)

    def summed(self, value: Callable[[int], jax.Array]) -> jax.Array:
        """The sum of `value(part)`, in order; unrolled, so that all the loads are in flight at once."""
        return reduce(operator.add, map(value, range(self.tile.slices)))

    def finish(self) -> None:
        """The warpgroup that waits for the team's sums, norms, and makes coefficients of some items."""
        arrays, buffers, tile = self.arrays, self.buffers, self.tile
        width = arrays.y.shape[1]

        def item(k: Any) -> None:
            if self.interpret:
                plgpu.barrier_wait(buffers.done.at[k])
            else:
                counter = self.counters.at[self.block(k)]
                plgpu.semaphore_wait(counter, 2 * tile.slices, decrement=False, memory_scope="gpu")
            # norm * (read * rsqrt(mean(read^2) + eps))
            total = self.summed(lambda part: self.get(self.part_of(k, part, READ_SQUARE)))
            inverse = lax.rsqrt(total / width + self.sizes.eps)

            def step(strip: Any) -> None:
                n = k * self.strips + strip
                place, columns = lax.rem(n, self.ring), self.columns(strip)
                weight = self.get(arrays.norm.at[columns], COLUMN).astype(jnp.float32)
                plgpu.barrier_wait(buffers.taken.at[place])
                read = self.strip(buffers.ring.at[place]).astype(jnp.float32)
                normed = lax.broadcast_in_dim(weight, read.shape, (1,)) * (read * _wide(inverse, read))
                buffers.ring[place] = normed.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffers.ring.at[place], arrays.read.at[self.rows(k), columns])

                @pl.when(n > 0)
                def release() -> None:
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    plgpu.barrier_arrive(buffers.free.at[lax.rem(n - 1, self.ring)])

            repeat(self.strips, step)

        self.each_item(item)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(buffers.free.at[lax.rem(self.steps - 1, self.ring)])
        # Only now: while it made coefficients, its whole team would wait for its part of the ring.
        repeat(lax.div(self.items - self.part + (tile.slices - 1), tile.slices), self.coefficients)

    def coefficients(self, i: Any) -> None:
        """The coefficients of the rows of item i of those that are this program's."""
        arrays, streams, k = self.arrays, len(self.every), self.part + i * self.tile.slices
        block = pl.ds(self.block(k) * ROWS, ROWS)
        total = self.summed(lambda part: self.get(arrays.parts.at[block, part], plgpu.Layout.WGMMA))
        column = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        if not self.interpret:
            column = plgpu.layout_cast(column, plgpu.Layout.WGMMA)

        def number(n: int) -> jax.Array:
            piece = total[:, n // LANES * LANES :][:, :LANES]
            return jnp.where(column == n % LANES, piece, 0.0).sum(axis=1)

        how = {"streams": streams, "width": arrays.y.shape[1], "sizes": self.sizes}
        numbers = [number(n) for n in wanted(streams)]
        pre, post, comb = mixes(numbers, arrays.scale, arrays.base, reciprocal=lambda v: 1.0 / v, **how)
        rows = self.rows(k)
        for ref, values in ((arrays.pre_out, pre), (arrays.post_out, post), (arrays.comb_out, chain(*comb))):
            for j, value in enumerate(values):
                ref[rows, j] = value


def _wide(value: jax.Array, like: jax.Array) -> jax.Array:
    """One number a row, in all of its columns."""
    return lax.broadcast_in_dim(value, like.shape, (0,))


def _add_squares(total: jax.Array, value: jax.Array) -> jax.Array:
    """Adds the squares of a strip to sums of every eighth column, which take few registers."""
    for start in range(0, value.shape[1], LANES):
        piece = value[:, start : start + LANES]
        total += piece * piece
    return total


def _bfloat16(value: jax.Array) -> jax.Array:
    """Rounded two at a time: left alone, the compiler rounds what is widened again one at a time, at a quarter of the
    rate."""
    return lax.optimization_barrier(value.astype(jnp.bfloat16))
