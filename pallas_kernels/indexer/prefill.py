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

Mosaic GPU, with Hopper's wgmma; elsewhere `decode` takes the same keys. Tried on one H200, 2048 x 65536, in TFLOP/s (a
bf16 matmul: 793): three warpgroups 636, two 569; products of 128 columns 610, with four warpgroups 632, of 64
columns 526; heads summed by a second wgmma with a matrix of ones 640 (no gain, and it spills); Triton 529, where all
warps of a program wait for each other.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.formats import cast
from pallas_kernels.indexer.decode import Levels

KEYS = 64  # of a warpgroup's tile: the M of a wgmma
COLUMN = plgpu.Layout.WGMMA.reduce(0)
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


def _maxima(out, visible, start: Array, fine, coarse, interpret: bool) -> None:
    """Maxima of the chunks of 8 and 64 entries of scores [queries, 64] in shared memory, of what each query sees."""
    shape = (out.shape[0], 8, 8)
    if interpret:
        x, seen = out[...].reshape(shape), visible[...]
        iota = lax.broadcasted_iota
    else:
        x, seen = plgpu.load(out.reshape(shape), layout=CHUNKS), plgpu.load(visible, layout=CHUNKS.reduce((1, 2)))
        iota = functools.partial(plgpu.broadcasted_iota, layout=CHUNKS)
    entry = start + 8 * iota(jnp.int32, shape, 1) + iota(jnp.int32, shape, 2)
    live = (entry < lax.broadcast_in_dim(seen, shape, [0])) & (x == x)
    eights = jnp.where(live, x, -jnp.inf).max(axis=2)
    fine[...] = eights
    coarse[...] = eights.max(axis=1)


def _tile(q_smem, w_smem, keys, out, release, *, heads: int, interpret: bool) -> None:
    """Scores of 64 keys for all queries of a program, into shared memory."""
    halves, columns, _ = q_smem.shape
    for half in range(halves):

        def product(acc, half=half):
            plgpu.wgmma(acc, keys, q_smem.at[half].transpose((1, 0)))
            return acc[...]

        dot = pl.run_scoped(product, plgpu.ACC((KEYS, columns), jnp.float32))
        if half == halves - 1:
            release()
        weight = lax.broadcast_in_dim(plgpu.load(w_smem.at[half], layout=COLUMN), dot.shape, [1])
        dot = cast(dot, jnp.bfloat16) if interpret else dot.astype(jnp.bfloat16)
        hit = jnp.maximum(dot, jnp.bfloat16(0)) * weight
        for n in range(columns // heads):
            score = hit[:, n * heads : (n + 1) * heads].astype(jnp.float32).sum(axis=1)
            out[half * (columns // heads) + n] = score.astype(jnp.bfloat16)
    plgpu.commit_smem()


def _score(*refs, tile: Tile, heads: int, interpret: bool) -> None:
    """Scores and maxima of `span` keys for the queries of one program."""
    q_gmem, w_gmem, visible_gmem, last_gmem, k_gmem, *outs, q_smem, w_smem, v_smem, k_smem, o_smem, q_bar, k_bar = refs
    batch, group, part, wg = (lax.axis_index(name) for name in ("batch", "group", "part", "wg"))
    first = part * tile.span
    tiles = (jnp.clip(last_gmem[batch, group] - first, 0, tile.span) + KEYS - 1) // KEYS
    mine = (tiles - wg + tile.groups - 1) // tile.groups  # tiles wg, wg + groups, ...
    queries = pl.ds(group * tile.queries, tile.queries)

    def fetch(i: Array | int) -> None:
        slot = wg * tile.stages + i % tile.stages
        rows = pl.ds(first + (i * tile.groups + wg) * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(k_gmem.at[batch, rows], k_smem.at[slot], k_bar.at[slot])

    @pl.when(wg == 0)
    def _():
        halves, columns, _ = q_smem.shape
        for half in range(halves):
            rows = pl.ds((group * halves + half) * columns, columns)
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows], q_smem.at[half], q_bar)
            plgpu.copy_gmem_to_smem(w_gmem.at[batch, rows], w_smem.at[half], q_bar)
        plgpu.copy_gmem_to_smem(visible_gmem.at[batch, queries], v_smem, q_bar)

    for stage in range(tile.stages):
        pl.when(stage < mine)(functools.partial(fetch, stage))
    plgpu.barrier_wait(q_bar)

    def step(i: Array, _: None) -> None:
        start = first + (i * tile.groups + wg) * KEYS
        slot = wg * tile.stages + i % tile.stages
        out = o_smem.at[wg, i % 2]

        def release() -> None:
            plgpu.commit_smem()  # every warp's product has read the buffer
            pl.when(i + tile.stages < mine)(lambda: fetch(i + tile.stages))

        plgpu.barrier_wait(k_bar.at[slot])
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        _tile(q_smem, w_smem, k_smem.at[slot], out, release, heads=heads, interpret=interpret)
        scores, fine, coarse = outs
        plgpu.copy_smem_to_gmem(out, scores.at[batch, queries, pl.ds(start, KEYS)])
        fine, coarse = fine.at[batch, queries, pl.ds(start // 8, 8)], coarse.at[batch, queries, start // 64]
        _maxima(out, v_smem, start, fine, coarse, interpret)

    lax.fori_loop(0, mine, step, None)
    plgpu.wait_smem_to_gmem(0)


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
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    swizzled = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=transforms)
    levels = plgpu.kernel(
        functools.partial(_score, tile=tile, heads=heads, interpret=interpret),
        out_type=[jax.ShapeDtypeStruct((batch, tokens, size // n), jnp.bfloat16) for n in (1, 8, 64)],
        scratch_types=[
            swizzled((parts, tile.columns, width)),
            plgpu.SMEM((parts, tile.columns), jnp.bfloat16),
            plgpu.SMEM((tile.queries,), jnp.int32),
            swizzled((tile.groups * tile.stages, KEYS, width)),
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
