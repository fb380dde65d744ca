"""The forward pass on Hopper: one Mosaic GPU kernel for prefill and decode, for rows that are values and packed ones.

**Why.** XLA gathers 640 rows of 1 KB a query into memory and reads them back: 2.7 GB written for 4096 queries, where
the least that must move is q and o, and the rows once. Here rows go from the cache to where the tensor cores read,
packed ones become bfloat16 on the way, and scores never leave the multiprocessor.

**Numerics.** q and rows are bfloat16 and products are summed in float32. As in the reference, the maximum runs over
blocks of 64 keys (here with base-2 exponentials), exp(s - maximum) is rounded to bfloat16 before it multiplies the
values, and the denominator sums the unrounded ones. The sink enters at the end. Bit-identical from run to run.

**Tiling.** 64 heads x 512 channels of q stay in shared memory (64 KB), and two blocks of 64 rows (128 KB). Two consumer
warpgroups own 256 value channels each: 64 x 256 float32 fill 128 registers a thread. Consumer 0 scores the even blocks
and consumer 1 the odd ones; each tells the other its rounded exponentials (8 KB), maximum and sum through shared
memory, and multiplies both blocks with its own value channels. So nothing is computed twice, and while one is at its
softmax the tensor cores have the products of the other's block. Two producer warpgroups fetch rows (`produce.py`), one
a channel half. Every half block has one last reader, which frees it for the next pair's as soon as it is multiplied.
Packed rows are read into registers before that. Programs stay resident and walk over the queries, so that the next
query's rows and q arrive under the last one's epilogue. With few queries the keys of one are split over programs, which
leave partial sums for `combine.py`. A last block without a partner is handled alone.

Barriers between the threads of a warpgroup are written out (`commit_smem`, before p is told and q is copied): whatever
else is shared passes an mbarrier at which all threads arrive. A consumer waits at a barrier in every phase or in none.

Backend: Mosaic GPU, since Triton cannot give warpgroups different work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.hopper.program import COLUMN, ROW, swizzled
from pallas_kernels.ptx import LOG2E
from pallas_kernels.references import Ref
from pallas_kernels.sparse_attention.produce import produce
from pallas_kernels.sparse_attention.reference import LEAST
from pallas_kernels.sparse_attention.row_ptx import KEYS
from pallas_kernels.sparse_attention.work import H200, LISTS, Arrays, Buffers, Program, Source, Tile, Work, slot_of

PARTS = 2  # accumulators of a consumer; with one, of 256 columns, the compiler wants more than 128 registers a thread


def _zero(interpret: bool) -> Array:
    """0, which the compiler does not know. The descriptors of q's 32 slices, and of an item's first rows, do not
    change; left to itself the compiler computes them once, keeps them in some hundred registers and spills."""
    if interpret:
        return jnp.int32(0)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), plgpu.Layout.WG_SPLAT(())))
    def zero(_: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        value = utils.inline_ptx("mov.b32 $0, 0;", result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def _down(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, (0,))


@dataclass(frozen=True)
class Consumer:
    """One of the two: `wg` scores an item's blocks wg, wg + 2, ... and owns half `wg` of the value channels."""

    program: Program
    wg: int

    @property
    def work(self) -> Work:
        """The program's."""
        return self.program.work

    @property
    def buffers(self) -> Buffers:
        """The program's."""
        return self.program.buffers

    def score(self, step: Array) -> Array:
        """The scores of a block of its own, half by half as they arrive; -inf where the id is -1."""
        buffers = self.buffers

        def multiply(scores: Any) -> Array:
            zero = _zero(self.work.interpret)
            for half in range(2):
                slot = 2 * self.wg + half
                plgpu.barrier_wait(buffers.k_full.at[slot])
                plgpu.wgmma(scores, buffers.q.at[zero, half], plgpu.transpose_ref(buffers.k.at[zero + slot], (1, 0)))
            return scores[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((buffers.q.shape[2], KEYS), jnp.float32))
        taken = plgpu.load(buffers.ids.at[lax.rem(step, LISTS)], layout=COLUMN)
        return jnp.where(lax.broadcast_in_dim(taken, scores.shape, (1,)) >= 0, scores, -jnp.inf)

    def tell(self, scores: Array, top: Array) -> tuple[Array, Array, Array]:
        """(p, maximum, sum) of a block of its own, which the other consumer is told too."""
        buffers, base2 = self.buffers, self.work.scale * LOG2E * 2.0**self.work.down
        # p = exp(s - maximum), rounded; total = sum p, unrounded
        higher = jnp.maximum(top, scores.max(axis=1) * base2)
        p = jnp.exp2(scores * base2 - _down(higher, scores))
        total, p = p.sum(axis=1), p.astype(jnp.bfloat16)
        buffers.p[self.wg] = p
        buffers.stats[self.wg, 0] = higher
        buffers.stats[self.wg, 1] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.p_full.at[self.wg])
        return p, higher, total

    def hear(self) -> tuple[Any, Array, Array]:
        """The same of the other's block."""
        buffers, other = self.buffers, 1 - self.wg
        plgpu.barrier_wait(buffers.p_full.at[other])
        higher, total = (plgpu.load(buffers.stats.at[other, n], layout=ROW, optimized=False) for n in range(2))
        return buffers.p.at[other], higher, total

    def start(self, refs: Any, accs: Any, p: Any, k: int) -> Any:
        """Start adding p times this consumer's half of block k's values to `accs`, in the accumulators `refs`."""
        zero, width = _zero(self.work.interpret), accs[0].shape[1]
        slot = zero + slot_of(k, self.wg)
        values = [self.buffers.k.at[slot, :, pl.ds(n * width, width)] for n in range(len(accs))]
        if self.work.interpret:  # where accumulators start at zero
            dot = partial(lax.dot, preferred_element_type=jnp.float32)
            return [acc + dot(p[...], v[...]) for acc, v in zip(accs, values, strict=True)]
        for ref, acc in zip(refs, accs, strict=True):
            ref[...] = acc
        for ref, v in zip(refs, values, strict=True):
            plgpu.wgmma(ref, p, v)
        return accs

    def done(self, refs: Any, accs: Any, k: int) -> Any:
        """The accumulators once that has ended."""
        accs = [ref[...] for ref in refs] or accs
        plgpu.barrier_arrive(self.buffers.k_free.at[slot_of(k, self.wg)])
        return accs

    def pair(
        self, scores: Array | None, accs: Any, top: Array, total: Array, count: int, scored: Callable[[], None]
    ) -> tuple[Any, Array, Array]:
        """Attend with the two blocks of a pair, or with a last one alone. The products with the first one's values run
        under the softmax of the second's scores. Calls `scored` where the scores of all of them are known to be there.
        """

        def multiply(*refs: Any) -> Any:
            now, before, sums = list(accs), top, total
            for k in range(count):
                if k and k != self.wg:  # nothing to do meanwhile
                    now = self.done(refs, now, k - 1)
                p, higher, more = self.tell(scores, before) if k == self.wg else self.hear()
                if k == self.wg and k == count - 1:
                    scored()
                if k and k == self.wg:
                    now = self.done(refs, now, k - 1)
                # acc = acc exp(top - higher) + p V; total likewise
                shrink = jnp.exp2(before - higher)
                before, sums = higher, sums * shrink + more
                now = self.start(refs, [acc * _down(shrink, acc) for acc in now], p, k)
            return self.done(refs, now, count - 1), before, sums

        if self.work.interpret:
            return multiply()
        return pl.run_scoped(multiply, *(plgpu.ACC(acc.shape, jnp.float32) for acc in accs))


def store_ptx(row_bytes: int, columns: int) -> str:
    """Of `_store`. Operands: a query's first row, this part's first byte in a row, then the accumulator's registers:
    two columns each of rows r and r + 8, for every eight columns. Two exchanges transpose four of them over a quad."""
    lines = [
        ".reg .pred odd, high; .reg .b32 t, lane, r, at, x, y, a<4>; .reg .b64 to;",
        "mov.u32 t, %tid.x; and.b32 t, t, 127; and.b32 lane, t, 31; and.b32 x, lane, 3; and.b32 y, x, 1;",
        "setp.ne.u32 odd, y, 0; setp.ge.u32 high, x, 2;",
        "shr.u32 r, t, 5; shl.b32 r, r, 4; shr.u32 y, lane, 2; add.u32 r, r, y;",
        f"shl.b32 x, x, 4; mad.lo.u32 at, r, {row_bytes}, x; add.u32 at, at, $1;",
        "cvt.u64.u32 to, at; add.u64 to, to, $0;",
    ]
    for group in range(columns // 32):
        for half in range(2):
            a = [f"${2 + 2 * (4 * group + j) + half}" for j in range(4)]
            lines += [f"mov.b32 a{j}, {a[j]};" for j in range(4)]
            for lane, bit, pairs in ((1, "odd", ((0, 1), (2, 3))), (2, "high", ((0, 2), (1, 3)))):
                for low, up in pairs:
                    lines += [
                        f"selp.b32 x, a{low}, a{up}, {bit}; shfl.sync.bfly.b32 x, x, {lane}, 31, -1;",
                        f"selp.b32 a{low}, x, a{low}, {bit}; selp.b32 a{up}, a{up}, x, {bit};",
                    ]
            lines += [f"st.global.v4.b32 [to + {half * 8 * row_bytes + group * 64}], {{a0, a1, a2, a3}};"]
    return "\n".join(["{", *lines, "}"])


def _store(value: Array, to: Any, column: int) -> None:
    """An accumulator's bfloat16 values into rows of `to`, in whole sectors: the four lanes that hold a row's 32 columns
    exchange them, so that each writes 16 bytes."""
    columns = value.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())))
    def body(_: Any, to: Any, value: Any, byte: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        words = [utils.bitcast(x, i32) for x in value.registers.flat]
        utils.inline_ptx(store_ptx(2 * to.type.shape[1], columns), utils.memref_ptr(to), byte.registers.item(), *words)

    body(to, value, jnp.int32(2 * column))


def _consume(program: Program, wg: int) -> None:
    """Attend with the rows that arrive; write o and lse, or with splits the accumulators, maxima and totals."""
    me, work, arrays, buffers = Consumer(program, wg), program.work, program.arrays, program.buffers
    heads, width = buffers.q.shape[2:]
    part = width // PARTS
    pairs, last = divmod(work.blocks, 2)
    items = program.items() + _zero(work.interpret)  # of one item the compiler would know the steps: it spills
    per_head = partial(plgpu.layout_cast, new_layout=ROW)

    def load_q(j: Array) -> None:
        query, _ = program.item(j)
        for half in range(2):
            plgpu.copy_gmem_to_smem(
                arrays.q.at[query, :, pl.ds(half * width, width)], buffers.q.at[0, half], buffers.q_full
            )

    def item(j: Array, _: None) -> None:
        query, split = program.item(j)
        plgpu.barrier_wait(buffers.q_full)
        first = j * work.blocks + wg

        def reload() -> None:
            """All of the item's scores are there: the next one's q may come."""
            pl.when(j + 1 < items)(lambda: load_q(j + 1))

        def two(i: Array, carry: Any) -> Any:
            scores, *accs, top, total = carry
            accs, top, total = me.pair(scores, accs, top, total, 2, lambda: None)
            return me.score(first + 2 * i + 2), *accs, top, total

        zeros = jnp.zeros((heads, part), jnp.float32)
        accs = [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in range(PARTS)]
        top, total = (per_head(jnp.full((heads,), start, jnp.float32)) for start in (LEAST, 0.0))
        scores = me.score(first) if wg < work.blocks else None
        if pairs:
            scores, *accs, top, total = lax.fori_loop(0, pairs - 1, two, (scores, *accs, top, total))
            accs, top, total = me.pair(scores, accs, top, total, 2, (lambda: None) if last else reload)
            scores = me.score(first + 2 * pairs) if last and wg == 0 else None
        if last:
            accs, top, total = me.pair(scores, accs, top, total, 1, reload)
        stats: tuple[Array, ...] = (top, total)
        share = per_head(jnp.full((heads,), 2.0**work.down, jnp.float32))
        # o = acc / (total + exp(sink)), lse = log(total + exp(sink)); of packed rows times 2**down
        if work.splits == 1:
            sink = plgpu.load(arrays.sink, layout=ROW, optimized=False) * LOG2E
            high = jnp.maximum(top, sink)
            total = total * jnp.exp2(top - high) + jnp.exp2(sink - high)
            share = share * jnp.exp2(top - high) / total
            stats = ((high + jnp.log2(total)) / LOG2E,)
        for n, acc in enumerate(accs):
            acc = acc * lax.broadcast_in_dim(share, acc.shape, (0,))
            if arrays.o.dtype == jnp.bfloat16 and not work.interpret:
                _store(acc.astype(arrays.o.dtype), arrays.o.at[split, query], wg * width + n * part)
            else:
                arrays.o[split, query, :, pl.ds(wg * width + n * part, part)] = acc.astype(arrays.o.dtype)
        if wg == 0:
            for ref, value in zip(arrays.stats, stats, strict=True):
                ref[split, query] = value

    if wg == 0:
        load_q(jnp.int32(0))
    lax.fori_loop(0, items, item, None)


def _scratch(work: Work, heads: int, half: int) -> list[Any]:
    """In the order of the fields of Buffers. Interpret mode has no tiles."""
    transforms = () if work.interpret else swizzled()
    return [
        plgpu.SMEM((1, 2, heads, half), jnp.bfloat16, transforms=transforms),
        plgpu.SMEM((4, KEYS, half), jnp.bfloat16, transforms=transforms),
        plgpu.SMEM((LISTS, KEYS), jnp.int32),
        plgpu.SMEM((2, heads, KEYS), jnp.bfloat16, transforms=transforms),
        plgpu.SMEM((2, 2, heads), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=LISTS),
        plgpu.Barrier(num_barriers=4),
        plgpu.Barrier(num_barriers=4),
        plgpu.Barrier(num_barriers=2),
    ]


def attend(
    q: Float[Array, "T N H"],
    tables: tuple[Shaped[Array, "..."], ...],
    ids: tuple[Int32[Array, "..."], ...],
    sink: Float32[Array, " N"],
    *,
    sources: tuple[Source, ...],
    splits: int,
    queries_per_entry: int,
    scale: float,
    tile: Tile = H200,
    interpret: bool = False,
    out_dtype: DTypeLike = jnp.float32,
) -> list[Array]:
    """Tables [B S, row] and ids [T, K] of each source. With one split: o [1, T, N, H] and lse [1, T, N]. With more,
    which divide the blocks of keys: accumulators, maxima (base 2) and totals of each split, without the sink."""
    queries, heads, width = q.shape
    work = Work(
        sources=sources,
        queries=queries,
        splits=splits,
        queries_per_entry=queries_per_entry,
        scale=scale,
        interpret=interpret,
        tile=tile,
    )
    n = len(sources)
    stats = jax.ShapeDtypeStruct((splits, queries, heads), jnp.float32)
    o = jax.ShapeDtypeStruct((splits, queries, heads, width), out_dtype if splits == 1 else jnp.float32)
    out_type = [o, stats] if splits == 1 else [o, stats, stats]

    def body(*refs: Ref) -> None:
        given = iter(refs)
        arrays = Arrays(
            q=next(given),
            sink=next(given),
            tables=tuple(islice(given, n)),
            ids=tuple(islice(given, n)),
            o=next(given),
            stats=tuple(islice(given, len(out_type) - 1)),
        )
        wg, number = lax.axis_index("wg"), lax.axis_index("program")
        program = Program(work, arrays, Buffers(*given), number)

        @pl.when(wg >= 2)
        def _producers() -> None:
            plgpu.set_max_registers(tile.producer_registers, action="decrease")
            produce(program, wg - 2)

        @pl.when(wg < 2)
        def _consumers() -> None:
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
            for n in range(2):
                pl.when(wg == n)(partial(_consume, program, n))

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=_scratch(work, heads, width // 2),
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(q, sink, *tables, *ids)
