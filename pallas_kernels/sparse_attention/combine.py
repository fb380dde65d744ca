"""Joins the partial sums of keys that several programs shared: the second launch of a decode step.

**Why.** XLA makes three kernels of it. **Numerics.** float32; the sum runs over the splits in order. **Tiling.** A
program takes a few heads of a query, so that even one query fills many multiprocessors. Triton: nothing here but
loads and sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.ptx import LOG2E

HEADS = 4  # of one program


def _kernel(acc_ref: Any, top_ref: Any, total_ref: Any, sink_ref: Any, o_ref: Any, lse_ref: Any) -> None:
    splits = acc_ref.shape[0]
    sink = sink_ref[...] * LOG2E
    high = sink
    for s in range(splits):
        high = jnp.maximum(high, top_ref[s])
    total = jnp.exp2(sink - high)
    o = jnp.zeros(o_ref.shape, jnp.float32)
    for s in range(splits):
        share = jnp.exp2(top_ref[s] - high)
        total += total_ref[s] * share
        o += acc_ref[s] * share[:, None]
    o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = (high + jnp.log2(total)) / LOG2E


def combine(
    acc: Float32[Array, "splits T N H"],
    top: Float32[Array, "splits T N"],
    total: Float32[Array, "splits T N"],
    sink: Float32[Array, " N"],
    *,
    out_dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float32[Array, "T N"]]:
    """o and lse from the accumulators, base-2 maxima and totals of each split, and the sink."""
    splits, queries, heads, width = acc.shape
    part = pl.BlockSpec((splits, None, HEADS), lambda t, n: (0, t, n))
    return pl.pallas_call(
        _kernel,
        grid=(queries, heads // HEADS),
        in_specs=[
            pl.BlockSpec((splits, None, HEADS, width), lambda t, n: (0, t, n, 0)),
            part,
            part,
            pl.BlockSpec((HEADS,), lambda t, n: (n,)),
        ],
        out_specs=[
            pl.BlockSpec((None, HEADS, width), lambda t, n: (t, n, 0)),
            pl.BlockSpec((None, HEADS), lambda t, n: (t, n)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((queries, heads, width), out_dtype),
            jax.ShapeDtypeStruct((queries, heads), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(acc, top, total, sink)
