"""The forward pass through Pallas' Triton backend, for rows that are values: what Blackwell runs, and the baseline.

**Why.** As in `forward.py`; packed rows are unpacked by XLA ahead, whole tables at a time. Blackwell's copy engine
gathers four rows at a time and its scaled matmul takes FP4, so a kernel of its own is worth writing once there is one
to measure on. **Numerics.** As in `forward.py`. **Tiling.** A program is a query with all heads, which walks its keys
block by block.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from pallas_kernels.ptx import LOG2E
from pallas_kernels.references import Ref
from pallas_kernels.sparse_attention.reference import LEAST


@dataclass(frozen=True)
class Tile:
    """Keys of a block, warps of a program, blocks on their way."""

    keys: int = 64
    warps: int = 8
    stages: int = 3


H200 = Tile()
B300 = Tile(keys=32, stages=2)


def _kernel(q_ref: Ref, sink_ref: Ref, *refs: Ref, n: int, tile: Tile, queries_per_entry: int, scale: float) -> None:
    given = iter(refs)
    tables, ids = (list(islice(given, n)) for _ in range(2))
    o_ref, lse_ref = given
    q = q_ref[...]
    heads, width = q.shape
    entry = lax.div(pl.program_id(0), queries_per_entry)

    def block(i: Array, carry: Any, table: Any, ids: Any) -> Any:
        acc, top, total = carry
        taken = plt.load(ids.at[pl.ds(i * tile.keys, tile.keys)])
        rows = table[entry, jnp.clip(taken, 0, table.shape[1] - 1), :]
        # s_k = scale q . row_k, in powers of two; -inf without a row
        scores = plt.dot(q, rows, trans_b=True) * (scale * LOG2E)
        scores = jnp.where((taken >= 0)[None, :], scores, -jnp.inf)
        # acc = sum_k exp(s_k - top) row_k, total = sum_k exp(s_k - top)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - higher)
        p = jnp.exp2(scores - higher[:, None])
        total = total * shrink + jnp.sum(p, axis=1)
        acc = acc * shrink[:, None] + plt.dot(p.astype(rows.dtype), rows)
        return acc, higher, total

    carry = (
        jnp.zeros((heads, width), jnp.float32),
        jnp.full((heads,), LEAST, jnp.float32),
        jnp.zeros((heads,), jnp.float32),
    )
    for table, taken in zip(tables, ids, strict=True):
        steps = taken.shape[0] // tile.keys
        carry = lax.fori_loop(0, steps, partial(block, table=table, ids=taken), carry)
    acc, top, total = carry
    # o = acc / (total + exp(sink)), lse = log of that
    sink = sink_ref[...] * LOG2E
    high = jnp.maximum(top, sink)
    share = jnp.exp2(top - high)
    total = total * share + jnp.exp2(sink - high)
    o_ref[...] = (acc * (share / total)[:, None]).astype(o_ref.dtype)
    lse_ref[...] = (high + jnp.log2(total)) / LOG2E


def attend(
    q: BFloat16[Array, "T N H"],
    tables: tuple[BFloat16[Array, "..."], ...],
    ids: tuple[Int32[Array, "..."], ...],
    sink: Float32[Array, " N"],
    *,
    queries_per_entry: int,
    scale: float,
    tile: Tile = H200,
    interpret: bool = False,
    out_dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "T N H"], Float32[Array, "T N"]]:
    """o [T, N, H] and lse; K of each list is a multiple of the tile's keys."""
    queries, heads, width = q.shape
    n = len(tables)
    one = pl.BlockSpec((None, heads, width), lambda t: (t, 0, 0))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda t: (0,) * x.ndim)

    return pl.pallas_call(
        partial(_kernel, n=n, tile=tile, queries_per_entry=queries_per_entry, scale=scale),
        grid=(queries,),
        in_specs=[
            one,
            whole(sink),
            *(whole(table) for table in tables),
            *(pl.BlockSpec((None, taken.shape[1]), lambda t: (t, 0)) for taken in ids),
        ],
        out_specs=[one, pl.BlockSpec((None, heads), lambda t: (t, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((queries, heads, width), out_dtype),
            jax.ShapeDtypeStruct((queries, heads), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(q, sink, *tables, *ids)
