"""Sparse attention over two sets of rows: the layer's window and the selected compressed entries (paper 2.3)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.formats import cast
from pallas_kernels.sparse_attention import reference
from pallas_kernels.target import use_kernel

__all__ = ["sparse_attention"]


def sparse_attention(
    q: Float[Array, "B T N H"],
    window: Shaped[Array, "B X window_row"],
    window_ids: Int32[Array, "B T W"],
    main: Shaped[Array, "B S main_row"],
    main_ids: Int32[Array, "B T C"],
    sink: Float32[Array, " N"],
    *,
    scale: float,
    unpack_window: reference.Unpack | None = None,
    unpack_main: reference.Unpack | None = None,
    out_dtype: DTypeLike = jnp.float32,
    backend: str = "xla",
) -> tuple[Float[jax.Array, "B T N H"], Float32[jax.Array, "B T N"]]:
    """Joint softmax over `window[window_ids]` and `main[main_ids]` with a sink per head; K = V = the row.

    o = sum_k exp(s_k) row_k / (sum_k exp(s_k) + exp(sink)), s_k = scale * q . row_k. Ids are row numbers, -1 reads
    nothing, and a query whose ids are all -1 gives 0. Rows have q's width and dtype, or are packed: then
    `unpack_*(rows, dtype)` reads them. Returns o in `out_dtype` and the log of the denominator (`lse`) in float32.
    `scale` is required: it is H**-0.5 of the head width, never of the latent's or a kernel's.

    The kernel takes bfloat16 queries of 64 heads x 512 and tells the format of packed rows from their bytes: 528 (FP8),
    288 (NVFP4) or 1024 (bfloat16). It is differentiable in q, the sinks, and rows that are values. Raises BackendError
    where the backend has no kernel. Source: paper 2.3; the released `sparse_attn`.
    """
    arrays = q, window, window_ids, main, main_ids, sink
    rows: dict[str, Any] = {"scale": scale, "unpack_window": unpack_window, "unpack_main": unpack_main}
    if use_kernel("sparse_attention", backend, "mosaic"):
        from pallas_kernels.sparse_attention import kernel

        return kernel.sparse_attention(*arrays, **rows, out_dtype=out_dtype)
    o, lse = reference.sparse_attention(*arrays, **rows)
    return cast(o, out_dtype), lse
