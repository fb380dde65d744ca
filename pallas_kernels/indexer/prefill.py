"""Index scores of many queries against the keys of one sequence: the tensor cores' side of the indexer.

**Why.** Prefill is 8192 operations a pair of query and key and 2 bytes of output: bound by the tensor cores, if 32
heads of rectified, weighted and rounded dots are summed elsewhere in the meantime. XLA would write those dots.

**Numerics.** As in `decode`: dot, weighted hit and sum are rounded to bfloat16, both sums run in float32.

**Tiling.** A program keeps `queries` x 32 heads in shared memory, in parts of `columns` (the N of a wgmma), and walks
`span` keys; it stops at the last key that one of its queries sees. Its warpgroups take 64 keys each in turn, as the M
of a wgmma, from their own TMA buffer, filled again as soon as the last product has read it. Rounding and summing takes
a warpgroup twice as long as its product, so three of them keep the tensor cores busy. A row of 64 scores goes through
shared memory, where threads pick up chunks of 8 for the maxima. A warpgroup writes and reads its own part of shared
memory, so the barriers that Pallas would put around every access are off; the two that matter are `commit_smem`: after
the last product of a tile, before its buffer is filled again, and between scores written and read.

Backend: Mosaic GPU, with Hopper's wgmma; elsewhere `decode` takes the same keys.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.formats import cast
from pallas_kernels.hopper.program import COLUMN, swizzled
from pallas_kernels.indexer.decode import Levels
from pallas_kernels.references import Ref, named

KEYS = 64  # of a warpgroup's tile: the M of a wgmma
# [queries, 8 chunks, 8 entries]: a thread has the 8 entries of a chunk, a warp 8 chunks of 4 queries.
CHUNKS = plgpu.Layout.TILED(plgpu.Tiling(((16, 8, 8), (4, 8, 8))), (-6,), (-3, -2), -1)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Queries of a program (16 n), columns of a product, keys of a program; warpgroups, and key buffers of each."""

    queries: int = 16
    columns: int = 256
    span: int = 16384
    groups: int = 3
    stages: int = 1


H200 = Tile()


class Arrays(NamedTuple):
    """Device memory: heads of all queries below each other, and for each program the last key that it needs; scores
    and their maxima of chunks of 8 (`fine`) and 64 (`coarse`)."""

    q: Ref
    weights: Ref
    visible: Ref
    last: Ref
    keys: Ref
    scores: Ref
    fine: Ref
    coarse: Ref


class Buffers(NamedTuple):
    """Shared memory. q, weights and visible stay; `keys` by warpgroup and stage, `scores` by warpgroup, twice."""

    q: Ref
    weights: Ref
    visible: Ref
    keys: Ref
    scores: Ref
    q_full: Ref
    keys_full: Ref


@dataclass(frozen=True, kw_only=True)
class Program:
    """`tile.queries` queries of one sequence against `tile.span` of its keys."""

    arrays: Arrays
    buffers: Buffers
    tile: Tile
    heads: int
    interpret: bool

    def run(self) -> None:
        """One warpgroup: its tiles of 64 keys in turn."""
        arrays, buffers, tile = self.arrays, self.buffers, self.tile
        batch, group, part, wg = (lax.axis_index(name) for name in ("batch", "group", "part", "wg"))
        first = part * tile.span
        tiles = (jnp.clip(arrays.last[batch, group] - first, 0, tile.span) + KEYS - 1) // KEYS
        mine = (tiles - wg + tile.groups - 1) // tile.groups  # tiles wg, wg + groups, ...
        queries = pl.ds(group * tile.queries, tile.queries)

        def fetch(i: Array | int) -> None:
            slot = wg * tile.stages + i % tile.stages
            rows = pl.ds(first + (i * tile.groups + wg) * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(arrays.keys.at[batch, rows], buffers.keys.at[slot], buffers.keys_full.at[slot])

        pl.when(wg == 0)(lambda: self.load_queries(batch, group, queries))
        for stage in range(tile.stages):
            pl.when(stage < mine)(functools.partial(fetch, stage))
        plgpu.barrier_wait(buffers.q_full)

        def step(i: Array, _: None) -> None:
            start = first + (i * tile.groups + wg) * KEYS
            slot = wg * tile.stages + i % tile.stages
            out = buffers.scores.at[wg, i % 2]

            def release() -> None:
                plgpu.commit_smem()  # every warp's product has read the buffer
                pl.when(i + tile.stages < mine)(lambda: fetch(i + tile.stages))

            plgpu.barrier_wait(buffers.keys_full.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            self.score(buffers.keys.at[slot], out, release)
            plgpu.copy_smem_to_gmem(out, arrays.scores.at[batch, queries, pl.ds(start, KEYS)])
            fine = arrays.fine.at[batch, queries, pl.ds(start // 8, 8)]
            self.maxima(out, start, fine, arrays.coarse.at[batch, queries, start // 64])

        lax.fori_loop(0, mine, step, None)
        plgpu.wait_smem_to_gmem(0)

    def load_queries(self, batch: Array, group: Array, queries: Any) -> None:
        """Start the copies of what stays."""
        arrays, buffers = self.arrays, self.buffers
        parts, columns, _ = buffers.q.shape
        for part in range(parts):
            rows = pl.ds((group * parts + part) * columns, columns)
            plgpu.copy_gmem_to_smem(arrays.q.at[batch, rows], buffers.q.at[part], buffers.q_full)
            plgpu.copy_gmem_to_smem(arrays.weights.at[batch, rows], buffers.weights.at[part], buffers.q_full)
        plgpu.copy_gmem_to_smem(arrays.visible.at[batch, queries], buffers.visible, buffers.q_full)

    def score(self, keys: Ref, out: Ref, release: Callable[[], None]) -> None:
        """Scores of 64 keys for all queries of the program, into shared memory; calls `release` after the last product
        of the keys."""
        buffers, heads = self.buffers, self.heads
        parts, columns, _ = buffers.q.shape
        for part in range(parts):
            # dot = q_i . k
            def product(acc: Ref, part: int = part) -> Array:
                plgpu.wgmma(acc, keys, buffers.q.at[part].transpose((1, 0)))
                return acc[...]

            dot = pl.run_scoped(product, plgpu.ACC((KEYS, columns), jnp.float32))
            if part == parts - 1:
                release()
            # hit = weight_i * relu(dot), dot and hit rounded
            weight = lax.broadcast_in_dim(plgpu.load(buffers.weights.at[part], layout=COLUMN), dot.shape, [1])
            dot = cast(dot, jnp.bfloat16) if self.interpret else dot.astype(jnp.bfloat16)
            hit = jnp.maximum(dot, jnp.bfloat16(0)) * weight
            # score = sum_i hit_i
            for n in range(columns // heads):
                score = hit[:, n * heads : (n + 1) * heads].astype(jnp.float32).sum(axis=1)
                out[part * (columns // heads) + n] = score.astype(jnp.bfloat16)
        plgpu.commit_smem()

    def maxima(self, out: Ref, start: Array, fine: Ref, coarse: Ref) -> None:
        """Maxima of the chunks of 8 and 64 entries of scores [queries, 64] in shared memory, of what each query
        sees."""
        shape, visible = (out.shape[0], 8, 8), self.buffers.visible
        if self.interpret:
            x, seen = out[...].reshape(shape), visible[...]
            iota = lax.broadcasted_iota
        else:
            x, seen = plgpu.load(out.reshape(shape), layout=CHUNKS), plgpu.load(visible, layout=CHUNKS.reduce((1, 2)))
            iota = functools.partial(plgpu.broadcasted_iota, layout=CHUNKS)
        # scores of entries that a query does not see, and NaN: -inf
        entry = start + 8 * iota(jnp.int32, shape, 1) + iota(jnp.int32, shape, 2)
        live = (entry < lax.broadcast_in_dim(seen, shape, [0])) & (x == x)
        eights = jnp.where(live, x, -jnp.inf).max(axis=2)
        fine[...] = eights
        coarse[...] = eights.max(axis=1)


def score(
    q: BFloat16[Array, "B T I J"],
    keys: BFloat16[Array, "B S J"],
    weights: BFloat16[Array, "B T I"],
    visible: Int32[Array, "B T"],
    *,
    tile: Tile = H200,
    interpret: bool = False,
) -> Levels:
    """Scores [B T, S] and their maxima of chunks of 8 and 64. S is a multiple of 64, T one of the tile's queries.

    Scores that a query does not see may be anything; a chunk's maximum is that of what it sees, NaN left out.
    """
    (batch, tokens, heads, width), size = q.shape, keys.shape[1]
    parts = tile.queries * heads // tile.columns
    tiled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=swizzled())

    def body(*refs: Ref) -> None:
        given = iter(refs)
        arrays, buffers = named(Arrays, given), named(Buffers, given)
        Program(arrays=arrays, buffers=buffers, tile=tile, heads=heads, interpret=interpret).run()

    levels = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((batch, tokens, size // n), jnp.bfloat16) for n in (1, 8, 64)],
        scratch_types=[
            tiled((parts, tile.columns, width)),
            plgpu.SMEM((parts, tile.columns), jnp.bfloat16),
            plgpu.SMEM((tile.queries,), jnp.int32),
            tiled((tile.groups * tile.stages, KEYS, width)),
            plgpu.SMEM((tile.groups, 2, tile.queries, KEYS), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2 * parts + 1),
            plgpu.Barrier(num_barriers=tile.groups * tile.stages),
        ],
        grid=(batch, tokens // tile.queries, pl.cdiv(size, tile.span)),
        grid_names=("batch", "group", "part"),
        num_threads=tile.groups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="index_prefill",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(
        q.reshape(batch, tokens * heads, width),
        weights.reshape(batch, tokens * heads),
        visible,
        visible.reshape(batch, -1, tile.queries).max(axis=2),
        keys,
    )
    return tuple(level.reshape(batch * tokens, -1) for level in levels)
