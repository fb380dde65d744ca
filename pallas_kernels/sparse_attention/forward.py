"""The forward pass on Hopper: one Mosaic GPU kernel for prefill and decode, for rows that are values and packed ones.

**Why.** XLA gathers 640 rows of 1 KB a query into memory and reads them back: 2.7 GB written for 4096 queries, where
the least that must move is q and o, and the rows once. Here rows go from the cache to where the tensor cores read,
packed ones become bfloat16 on the way, and scores never leave registers.

**Numerics.** q and rows are bfloat16 and products are summed in float32. As in the reference, the maximum runs over
blocks of 64 keys (here with base-2 exponentials), exp(s - maximum) is rounded to bfloat16 before it multiplies the
values, and the denominator sums the unrounded ones. The sink enters at the end. Bit-identical from run to run.

**Tiling.** 64 heads x 512 channels of q stay in shared memory (64 KB). Two consumer warpgroups own 256 value channels
each: 64 x 256 float32 fill 128 registers a thread. Both compute all scores of a block of 64 keys. That is 1.5 times the
least arithmetic, but they exchange nothing: they take turns at the tensor cores, one at its products while the other is
at its softmax. Two producer warpgroups fetch rows (`rows.py`), one a channel half, into rings of two and three half
blocks: the second half is free again later than the first, so it has more room. Programs stay resident and walk over
the queries, so that the next query's rows and q arrive under the last one's epilogue. With few queries the keys of one
are split over programs, which leave partial sums for `combine.py`.

Mosaic GPU, since Triton cannot give warpgroups different work. Tried on an H200, 4096 queries x 640 rows of bfloat16:
Triton's best tile 222 TFLOP/s; this without turns and with one producer 308; with turns and two 373. Rows that all come
from the L2, or that the L2 is asked for ahead, change nothing: rows are not what it waits for. A consumer that scores
the next block behind its values, in one turn, closes the pause between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

from pallas_kernels.sparse_attention.reference import LEAST
from pallas_kernels.sparse_attention.rows import KEYS, SWIZZLED, Format, fetch, fetch_interpreted

LOG2E = 1.4426950408889634
STAGES = 2  # half blocks in shared memory: so many of half 0, and one more of half 1
LISTS = 8  # ids of so many blocks in shared memory
AHEAD = LISTS - STAGES  # steps between the copy of a block's ids and the fetch of its rows
PARTS = 2  # accumulators of a consumer; with one, of 256 columns, the compiler wants more than 128 registers a thread


@dataclass(frozen=True)
class Tile:
    """How many programs stay resident, and the registers of a thread: two consumer and two producer warpgroups share
    the 65,536 of an SM, so consumer + producer <= 256."""

    programs: int = 132
    consumer_registers: int = 208
    producer_registers: int = 48


H200 = Tile()


@dataclass(frozen=True)
class Source:
    """One set of rows: how they are stored, how many a batch entry has, and how many ids of it a query has."""

    fmt: Format
    count: int
    ids: int


@dataclass(frozen=True)
class Work:
    """What the programs share. An item is one of the `splits` equal parts of a query's keys; program p has the items
    p, p + programs, ...; the blocks of all its items are its steps 0, 1, ..."""

    sources: tuple[Source, ...]
    queries: int
    splits: int
    queries_per_entry: int
    scale: float
    interpret: bool
    tile: Tile

    @property
    def blocks(self) -> int:
        """Of an item."""
        return sum(source.ids for source in self.sources) // KEYS // self.splits

    @property
    def programs(self) -> int:
        """How many there are."""
        return min(self.tile.programs, self.queries * self.splits)

    @property
    def down(self) -> int:
        """Rows are 2**-down of their values."""
        return 0 if self.interpret else self.sources[0].fmt.down

    def items(self, program: Array) -> Array:
        """How many items a program has."""
        return lax.div(self.queries * self.splits - 1 - program, self.programs) + 1

    def item(self, program: Array, j: Array) -> tuple[Array, Array]:
        """(query, split) of a program's item j."""
        number = program + j * self.programs
        return lax.div(number, self.splits), lax.rem(number, self.splits)

    def step(self, program: Array, s: Array) -> tuple[Array, Array]:
        """(query, first key) of a program's step s."""
        query, split = self.item(program, lax.div(s, self.blocks))
        return query, (split * self.blocks + lax.rem(s, self.blocks)) * KEYS


@dataclass(frozen=True)
class Memory:
    """The references of a program. `k` holds half blocks, `ids` the ids of blocks, in rings. Barriers: `*_full` says
    that something has arrived, `*_free` that both consumers are done with it."""

    q_in: Any
    tables: tuple[Any, ...]
    ids_in: tuple[Any, ...]
    q: Any
    k: Any
    ids: Any
    q_full: Any
    q_free: Any
    ids_full: Any
    k_full: Any
    k_free: Any
    turn: Any


def _slot(step: Array, half: Array | int) -> Array:
    """Where in `k` a half of a step's block is."""
    return STAGES * half + lax.rem(step, STAGES + half)


def _produce(work: Work, mem: Memory, program: Array, half: Array) -> None:
    """Fetch one channel half of the rows of every step. Half 0 also copies the ids, `AHEAD` steps ahead."""
    steps = work.items(program) * work.blocks

    def for_source(s: Array, do: Callable[..., None]) -> None:
        """Call do(index, source, query, place of the step's ids in the source's list, the entry's first row)."""
        query, key = work.step(program, s)
        start = 0
        for n, source in enumerate(work.sources):
            first = lax.div(query, work.queries_per_entry) * source.count
            chosen = (key >= start) & (key < start + source.ids)
            pl.when(chosen)(partial(do, n, source, query, key - start, first))
            start += source.ids

    def copy_ids(s: Array) -> None:
        def copy(n: int, source: Source, query: Array, at: Array, first: Array) -> None:
            slot = lax.rem(s, LISTS)
            plgpu.copy_gmem_to_smem(mem.ids_in[n].at[query, pl.ds(at, KEYS)], mem.ids.at[slot], mem.ids_full.at[slot])

        pl.when(s < steps)(lambda: for_source(s, copy))

    def fill(s: Array, _: None) -> None:
        slot, ids = _slot(s, half), lax.rem(s, LISTS)
        pl.when(s >= STAGES + half)(lambda: plgpu.barrier_wait(mem.k_free.at[slot]))
        # Half 0 of step s - 2 is free: both consumers and half 1 have read that step's ids, and these take their place.
        pl.when(half == 0)(lambda: copy_ids(s + AHEAD))
        plgpu.barrier_wait(mem.ids_full.at[ids])

        def get(n: int, source: Source, query: Array, at: Array, first: Array) -> None:
            do = fetch_interpreted if work.interpret else partial(fetch, source.fmt)
            do(mem.tables[n], mem.ids.at[ids], mem.k.at[slot], first, source.count, half)

        for_source(s, get)
        plgpu.barrier_arrive(mem.k_full.at[slot])

    @pl.when(half == 0)
    def _start() -> None:
        lax.fori_loop(0, AHEAD, lambda s, _: copy_ids(s), None)

    lax.fori_loop(0, steps, fill, None)


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


def _swap(mem: Memory) -> None:
    """The consumers meet, and the one that had the tensor cores leaves them to the other."""
    plgpu.barrier_arrive(mem.turn)
    plgpu.barrier_wait(mem.turn)


def _score(work: Work, mem: Memory, step: Array, scores: Any, between: Callable[[], None] = lambda: None) -> None:
    """Start the products of q with the rows of a step's block, half by half as they arrive."""
    zero = _zero(work.interpret)
    for half in range(2):
        slot = _slot(step + zero, half)
        plgpu.barrier_wait(mem.k_full.at[slot])
        plgpu.wgmma(scores, mem.q.at[zero, half], plgpu.transpose_ref(mem.k.at[slot], (1, 0)))
        if half == 0:
            between()


def _masked(mem: Memory, wg: Array, step: Array, scores: Array) -> Array:
    """Finished scores, -inf where the id is -1. The half whose values the other consumer takes is done with."""
    ids = lax.rem(step, LISTS)
    plgpu.barrier_wait(mem.ids_full.at[ids])
    taken = plgpu.load(mem.ids.at[ids], layout=plgpu.Layout.WGMMA.reduce(0))
    plgpu.barrier_arrive(mem.k_free.at[_slot(step, 1 - wg)])
    return jnp.where(lax.broadcast_in_dim(taken, scores.shape, (1,)) >= 0, scores, -jnp.inf)


def _down(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, (0,))


def _softmax(work: Work, scores: Array, accs: Any, top: Array, total: Array) -> tuple[Array, Any, Array, Array]:
    """(p, and the accumulators, maximum and total brought to the new maximum)."""
    base2 = work.scale * LOG2E * 2.0**work.down
    higher = jnp.maximum(top, scores.max(axis=1) * base2)
    shrink = jnp.exp2(top - higher)
    p = jnp.exp2(scores * base2 - _down(higher, scores))
    total = total * shrink + p.sum(axis=1)
    return p.astype(jnp.bfloat16), [acc * _down(shrink, acc) for acc in accs], higher, total


def _multiply(work: Work, mem: Memory, wg: Array, step: Array, p: Array, accs: Any, score_next: bool) -> Any:
    """Add p times this consumer's half of the values; and behind that, with no pause, score the next step's block.
    Both while it is this consumer's turn. Returns the accumulators, and the next scores if asked for."""
    mine, width = mem.k.at[_slot(step, wg)], accs[0].shape[1]
    values = [mine.at[:, pl.ds(n * width, width)] for n in range(PARTS)]
    _swap(mem)

    def release() -> None:
        plgpu.barrier_arrive(mem.k_free.at[_slot(step, wg)])

    if work.interpret:  # which does not run `run_state`
        dot = partial(lax.dot, preferred_element_type=jnp.float32)
        done = [acc + dot(p, v[...]) for acc, v in zip(accs, values, strict=True)]
        release()
        if score_next:
            done.append(_first_scores(work, mem, step + 1))
        else:
            _swap(mem)
        return done

    def values_done() -> None:
        plgpu.wgmma_wait(1)  # all but the first half of the scores
        release()

    def products(refs: Any) -> None:
        for acc, v in zip(refs, values, strict=False):
            plgpu.wgmma(acc, p, v)
        if score_next:
            _score(work, mem, step + 1, refs[-1], values_done)
        _swap(mem)

    zeros = plgpu.layout_cast(jnp.zeros((p.shape[0], KEYS), jnp.float32), plgpu.Layout.WGMMA)
    done = pl.run_state(products)([plgpu.ACC.init(x) for x in (*accs, *([zeros] if score_next else []))])
    if not score_next:
        release()
    return done


def _first_scores(work: Work, mem: Memory, step: Array) -> Array:
    """The scores of a step's block, in a turn that has begun."""

    def multiply(scores: Any) -> Array:
        _score(work, mem, step, scores)
        _swap(mem)
        return scores[...]

    return pl.run_scoped(multiply, plgpu.ACC((mem.q.shape[2], KEYS), jnp.float32))


def _consume(work: Work, mem: Memory, sink_ref: Any, out: tuple[Any, ...], program: Array, wg: Array) -> None:
    """Attend with the rows that arrive; write o and lse, or with splits the accumulators, maxima and totals."""
    o_ref, *stats_out = out
    heads, width = mem.q.shape[2:]
    part = width // PARTS
    items = work.items(program) + _zero(work.interpret)  # of one item the compiler would know the steps: it spills
    per_head = partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA.reduce(1))

    def load_q(j: Array) -> None:
        query, _ = work.item(program, j)
        for half in range(2):
            plgpu.copy_gmem_to_smem(mem.q_in.at[query, :, pl.ds(half * width, width)], mem.q.at[0, half], mem.q_full)

    def item(j: Array, _: None) -> None:
        query, split = work.item(program, j)
        plgpu.barrier_wait(mem.q_full)
        _swap(mem)

        def reload() -> None:
            """Once both have the item's last scores, the next one's q may come."""
            plgpu.barrier_arrive(mem.q_free)

            @pl.when((wg == 1) & (j + 1 < items))
            def _reload() -> None:
                plgpu.barrier_wait(mem.q_free)
                load_q(j + 1)

        first = j * work.blocks
        scores = _masked(mem, wg, first, _first_scores(work, mem, first))
        if work.blocks == 1:
            reload()

        def block(i: Array, carry: Any) -> Any:
            scores, *accs, top, total = carry
            p, accs, top, total = _softmax(work, scores, accs, top, total)
            *accs, scores = _multiply(work, mem, wg, first + i, p, accs, score_next=True)
            scores = _masked(mem, wg, first + i + 1, scores)
            pl.when(i + 1 == work.blocks - 1)(reload)
            return scores, *accs, top, total

        zeros = jnp.zeros((heads, part), jnp.float32)
        accs = [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in range(PARTS)]
        top, total = (per_head(jnp.full((heads,), start, jnp.float32)) for start in (LEAST, 0.0))
        scores, *accs, top, total = lax.fori_loop(0, work.blocks - 1, block, (scores, *accs, top, total))
        p, accs, top, total = _softmax(work, scores, accs, top, total)
        accs = _multiply(work, mem, wg, first + work.blocks - 1, p, accs, score_next=False)
        stats: tuple[Array, ...] = (top, total)
        share = per_head(jnp.full((heads,), 2.0**work.down, jnp.float32))
        if work.splits == 1:
            sink = plgpu.load(sink_ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) * LOG2E
            high = jnp.maximum(top, sink)
            total = total * jnp.exp2(top - high) + jnp.exp2(sink - high)
            share = share * jnp.exp2(top - high) / total
            stats = ((high + jnp.log2(total)) / LOG2E,)
        for n, acc in enumerate(accs):
            acc = acc * lax.broadcast_in_dim(share, acc.shape, (0,))
            o_ref[split, query, :, pl.ds(wg * width + n * part, part)] = acc.astype(o_ref.dtype)

        @pl.when(wg == 0)
        def _stats() -> None:
            for ref, value in zip(stats_out, stats, strict=True):
                ref[split, query] = value

    @pl.when(wg == 1)
    def _start() -> None:
        load_q(jnp.int32(0))
        _swap(mem)

    lax.fori_loop(0, items, item, None)
    pl.when(wg == 0)(lambda: _swap(mem))


def _scratch(work: Work, heads: int, half: int) -> list[Any]:
    """In the order of Memory's fields from q on. Interpret mode has no tiles."""
    swizzled = () if work.interpret else SWIZZLED
    slots = 2 * STAGES + 1
    return [
        plgpu.SMEM((1, 2, heads, half), jnp.bfloat16, transforms=swizzled),
        plgpu.SMEM((slots, KEYS, half), jnp.bfloat16, transforms=swizzled),
        plgpu.SMEM((LISTS, KEYS), jnp.int32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=LISTS),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_arrivals=2),
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
    work = Work(sources, queries, splits, queries_per_entry, scale, interpret, tile)
    n = len(sources)
    stats = jax.ShapeDtypeStruct((splits, queries, heads), jnp.float32)
    o = jax.ShapeDtypeStruct((splits, queries, heads, width), out_dtype if splits == 1 else jnp.float32)
    out_type = [o, stats] if splits == 1 else [o, stats, stats]

    def body(q_ref: Any, sink_ref: Any, *refs: Any) -> None:
        out = refs[2 * n : 2 * n + len(out_type)]
        mem = Memory(q_ref, refs[:n], refs[n : 2 * n], *refs[2 * n + len(out_type) :])
        wg, program = lax.axis_index("wg"), lax.axis_index("program")

        @pl.when(wg >= 2)
        def _producers() -> None:
            plgpu.set_max_registers(tile.producer_registers, action="decrease")
            _produce(work, mem, program, wg - 2)

        @pl.when(wg < 2)
        def _consumers() -> None:
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
            _consume(work, mem, sink_ref, out, program, wg)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=_scratch(work, heads, width // 2),
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(q, sink, *tables, *ids)
