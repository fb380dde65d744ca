"""The gradient of sparse attention: of q, of the rows of both sets, and of the sinks.

    p = exp(s - lse)     dp = do . row     ds = p (dp - delta)     delta = do . o - dlse
    dq = scale sum_k ds row_k     drow_k = scale ds q + p do, summed over queries and heads
    dsink = -exp(sink - lse) delta, summed over queries

**Why.** Autodiff of the reference keeps the gathered rows and all scores: 1.4 MB a query. Here only o and lse are kept,
scores are computed again, and a row's gradient goes straight from registers into its place.

**Numerics.** p, ds and do are rounded to bfloat16 before they are multiplied; sums are float32. Queries that share a
row add to it with float32 atomics, whose order differs from run to run: drows need not be bit-identical.

**Tiling.** A program is a query and half of its channels: 64 x 256 of dq fill 64 registers a thread. Both halves
compute the scores of all channels, `channels` at a time, so that q, do and rows need not all be in shared memory.
Triton, since rows are gathered and scattered by id.
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
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.ptx import LOG2E
from pallas_kernels.references import Ref


@dataclass(frozen=True)
class Tile:
    """Rows of a block, channels of a step, warps of a program, steps on their way."""

    keys: int = 32
    channels: int = 128
    warps: int = 8
    stages: int = 2


H200 = Tile()
B300 = Tile(keys=64, stages=1)


def _scatter_add(ref: Any, entry: Array, rows: Array, valid: Array, column: Any, value: Array, interpret: bool) -> None:
    if interpret:  # whose atomics take no mixed index and lose duplicates
        value = jnp.where(valid[:, None], value, 0.0)
        ref[entry, :, column] = ref[entry, :, column].at[rows].add(value)
    else:
        mask = lax.broadcast_in_dim(valid, value.shape, (0,))
        plt.atomic_add(ref, (entry, rows, column), value, mask=mask)


def _kernel(
    q_ref: Ref,
    do_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    *refs: Ref,
    n: int,
    tile: Tile,
    queries_per_entry: int,
    scale: float,
    interpret: bool,
) -> None:
    given = iter(refs)
    tables, ids, _zeros = (list(islice(given, n)) for _ in range(3))  # drows starts from the zeros, in their place
    dq_ref, *drows = given
    heads, half = dq_ref.shape
    channels = min(tile.channels, half)
    first = pl.program_id(1) * half
    entry = lax.div(pl.program_id(0), queries_per_entry)
    lse, delta = lse_ref[...] * LOG2E, delta_ref[...]
    mine = [pl.ds(first + k * channels, channels) for k in range(half // channels)]

    def block(i: Array, dqs: tuple[Array, ...], table: Any, ids: Any, drow: Any) -> tuple[Array, ...]:
        taken = plt.load(ids.at[pl.ds(i * tile.keys, tile.keys)])
        at, valid = jnp.clip(taken, 0, table.shape[1] - 1), taken >= 0

        # s = scale q . row; dp = do . row
        def score(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            column = pl.ds(c * channels, channels)
            rows = table[entry, at, column]
            return tuple(
                x + plt.dot(ref[:, column], rows, trans_b=True) for x, ref in zip(carry, (q_ref, do_ref), strict=True)
            )

        zero = jnp.zeros((heads, tile.keys), jnp.float32)
        scores, dp = lax.fori_loop(0, 2 * half // channels, score, (zero, zero))
        # p = exp(s - lse); ds = p (dp - delta)
        p = jnp.where(valid[None, :], jnp.exp2(scores * (scale * LOG2E) - lse[:, None]), 0.0)
        ds = (p * (dp - delta[:, None]) * scale).astype(do_ref.dtype)
        p = p.astype(do_ref.dtype)
        out = []
        for dq, column in zip(dqs, mine, strict=True):
            # drow = scale ds q + p do; dq = scale sum_k ds row_k
            value = plt.dot(ds, q_ref[:, column], trans_a=True) + plt.dot(p, do_ref[:, column], trans_a=True)
            _scatter_add(drow, entry, at, valid, column, value, interpret)
            out.append(dq + plt.dot(ds, table[entry, at, column]))
        return tuple(out)

    dqs = tuple(jnp.zeros((heads, channels), jnp.float32) for _ in mine)
    for table, taken, drow in zip(tables, ids, drows, strict=True):
        steps = taken.shape[0] // tile.keys
        dqs = lax.fori_loop(0, steps, partial(block, table=table, ids=taken, drow=drow), dqs)
    for k, dq in enumerate(dqs):
        dq_ref[:, pl.ds(k * channels, channels)] = dq


def attend_backward(
    q: BFloat16[Array, "T N H"],
    tables: tuple[BFloat16[Array, "..."], ...],
    ids: tuple[Int32[Array, "..."], ...],
    lse: Float32[Array, "T N"],
    do: BFloat16[Array, "T N H"],
    delta: Float32[Array, "T N"],
    *,
    queries_per_entry: int,
    scale: float,
    tile: Tile = H200,
    interpret: bool = False,
) -> tuple[Float32[Array, "T N H"], list[Float32[Array, "..."]]]:
    """dq, and the gradient of every table [B, S, H]; ids [T, K] with K a multiple of the tile's keys."""
    queries, heads, width = q.shape
    n = len(tables)
    one = pl.BlockSpec((None, heads, width), lambda t, c: (t, 0, 0))
    per_head = pl.BlockSpec((None, heads), lambda t, c: (t, 0))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda t, c: (0,) * x.ndim)

    zeros = [jnp.zeros(table.shape, jnp.float32) for table in tables]
    lists = [pl.BlockSpec((None, taken.shape[1]), lambda t, c: (t, 0)) for taken in ids]
    dq, *drows = pl.pallas_call(
        partial(_kernel, n=n, tile=tile, queries_per_entry=queries_per_entry, scale=scale, interpret=interpret),
        grid=(queries, 2),
        in_specs=[one, one, per_head, per_head, *map(whole, tables), *lists, *map(whole, zeros)],
        out_specs=[pl.BlockSpec((None, heads, width // 2), lambda t, c: (t, 0, c)), *map(whole, zeros)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            *(jax.ShapeDtypeStruct(zero.shape, jnp.float32) for zero in zeros),
        ],
        input_output_aliases={4 + 2 * n + k: 1 + k for k in range(n)},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(q, do, lse, delta, *tables, *ids, *zeros)
    return dq, drows
