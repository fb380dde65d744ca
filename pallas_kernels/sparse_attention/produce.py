"""The producers of the Hopper kernel: rows of a cache into shared memory (`row_ptx`), a channel half for each."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector
from jaxtyping import Array

from pallas_kernels.hopper.program import swizzled
from pallas_kernels.references import Ref
from pallas_kernels.sparse_attention.reference import gather
from pallas_kernels.sparse_attention.row_ptx import KEYS, Format
from pallas_kernels.sparse_attention.work import AHEAD, LISTS, Program, Source, slot_of


def _fetch(source: Source, table: Ref, ids: Ref, to: Ref, first: Array, half: Array) -> None:
    """The values of rows `first + ids` of `table`, channel half `half`, into the tile `to`."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled()), plgpu.RefType(), plgpu.RefType(), scalar, scalar))
    def body(_: Any, to: Any, table: Any, ids: Any, first: Any, half: Any) -> None:
        pointers = [mgpu.memref_ptr(ref) for ref in (to, table, ids)]
        mgpu.inline_ptx(source.fmt.fetch_ptx(source.count), *pointers, first.registers.item(), half.registers.item())

    body(to, table, ids, first, half)


def _fetch_interpreted(source: Source, table: Ref, ids: Ref, to: Ref, first: Array, half: Array) -> None:
    """`_fetch` for interpret mode, which has no PTX: there the table holds values."""
    width, taken = to.shape[-1], ids[...]
    at = jnp.where(taken >= 0, jnp.minimum(taken, source.count - 1) + first, -1)
    rows = gather(table[...][None], at[None, None], 2 * width, to.dtype, None)[0, 0]
    to[...] = lax.dynamic_slice_in_dim(rows, half * width, width, axis=1)


def _words_layout(fmt: Format) -> Any:
    return plgpu.Layout.WG_STRIDED((128 * fmt.words,), vec_size=1)


def _read(source: Source, table: Ref, ids: Ref, first: Array, half: Array) -> Array:
    """`_fetch`'s first part for packed rows that registers can hold: their words, a warpgroup's."""
    words, scalar, layout = source.fmt.words, plgpu.Layout.WG_SPLAT(()), _words_layout(source.fmt)
    result = plgpu.ShapeDtypeStruct((128 * words,), jnp.dtype(jnp.int32), layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar, scalar), return_type=result)
    def body(_: Any, table: Any, ids: Any, first: Any, half: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        args = (mgpu.memref_ptr(table), mgpu.memref_ptr(ids), first.registers.item(), half.registers.item())
        got = mgpu.inline_ptx(
            source.fmt.load_ptx(source.count), *args, result_types=[i32] * words, has_side_effects=True
        )
        one = ir.VectorType.get((1,), i32)
        registers = np.array([vector.broadcast(one, x) for x in got], dtype=object)
        return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return body(table, ids, first, half)


def _unpack(fmt: Format, words: Array, to: Ref) -> None:
    """`_fetch`'s second part."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled()), _words_layout(fmt)))
    def body(_: Any, to: Any, words: Any) -> None:
        values = [vector.extract(x, dynamic_position=[], static_position=[0]) for x in words.registers.flat]
        mgpu.inline_ptx(fmt.unpack_ptx(), mgpu.memref_ptr(to), *values)

    body(to, words)


class Turn(NamedTuple):
    """What a step is for one source."""

    mine: Array  # whether the step's keys are its
    at: Array  # where in its lists the step's ids are
    query: Array
    first: Array  # the first row of the query's batch entry


def _turns(program: Program, step: Array) -> Iterator[tuple[int, Source, Turn]]:
    """(index, source, its turn) of every source at a step."""
    work = program.work
    query, key = program.step(step)
    start = 0
    for n, source in enumerate(work.sources):
        mine = (key >= start) & (key < start + source.ids)
        yield n, source, Turn(mine, key - start, query, lax.div(query, work.queries_per_entry) * source.count)
        start += source.ids


def produce(program: Program, half: Array) -> None:
    """A producer: fetch one channel half of the rows of every step. Half 0 also copies the ids, `AHEAD` steps ahead.
    Packed rows that registers can hold are on their way before their place is free."""
    work, arrays, buffers = program.work, program.arrays, program.buffers
    steps = program.items() * work.blocks

    def copy_ids(s: Array) -> None:
        slot = lax.rem(s, LISTS)
        for n, _, turn in _turns(program, s):
            list_ = arrays.ids[n].at[turn.query, pl.ds(turn.at, KEYS)]
            pl.when((s < steps) & turn.mine)(
                partial(plgpu.copy_gmem_to_smem, list_, buffers.ids.at[slot], buffers.ids_full.at[slot])
            )

    def read_early(s: Array) -> dict[int, Array]:
        words = {}
        for n, source, turn in _turns(program, s):
            if source.fmt.words and not work.interpret:
                none = plgpu.layout_cast(jnp.zeros((128 * source.fmt.words,), jnp.int32), _words_layout(source.fmt))
                read = partial(_read, source, arrays.tables[n], buffers.ids.at[lax.rem(s, LISTS)], turn.first, half)
                words[n] = lax.cond(turn.mine, read, lambda none=none: none)
        return words

    def fill(s: Array, nothing: None) -> None:
        slot, ids = slot_of(lax.rem(s, work.blocks), half), lax.rem(s, LISTS)
        plgpu.barrier_wait(buffers.ids_full.at[ids])
        # FP4 rows into registers: words = table[ids]
        words = read_early(s)
        pl.when(s >= min(2, work.blocks))(lambda: plgpu.barrier_wait(buffers.k_free.at[slot]))
        # The left halves up to step s - 2 are free, so everyone has read that step's ids: these take their place.
        pl.when(half == 0)(lambda: copy_ids(s + AHEAD))
        # The others straight to their place, and k = unpack(words): exact zeros where the id is -1
        fetch = _fetch_interpreted if work.interpret else _fetch
        for n, source, turn in _turns(program, s):
            if n in words:
                pl.when(turn.mine)(partial(_unpack, source.fmt, words[n], buffers.k.at[slot]))
            else:
                given = arrays.tables[n], buffers.ids.at[ids], buffers.k.at[slot], turn.first, half
                pl.when(turn.mine)(partial(fetch, source, *given))
        plgpu.barrier_arrive(buffers.k_full.at[slot])

    @pl.when(half == 0)
    def _start() -> None:
        lax.fori_loop(0, AHEAD, lambda s, _: copy_ids(s), None)

    lax.fori_loop(0, steps, fill, None)
    if work.interpret:  # where who waits at a barrier must see its every phase (JAX 0.11)
        for k in range(min(2, work.blocks)):
            plgpu.barrier_wait(buffers.k_free.at[slot_of(k, half)])
