"""Sparse attention over two sets of rows: the layer's window and the selected compressed entries (paper 2.3)."""

import jax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import require_xla
from pallas_kernels.sparse_attention import reference

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
    backend: str = "xla",
) -> tuple[Float32[jax.Array, "B T N H"], Float32[jax.Array, "B T N"]]:
    """Joint softmax over `window[window_ids]` and `main[main_ids]` with a sink per head; K = V = the row.

    o = sum_k exp(s_k) row_k / (sum_k exp(s_k) + exp(sink)), s_k = scale * q . row_k. Ids are row numbers, -1 reads
    nothing, and a query whose ids are all -1 gives 0. Rows have q's width and dtype, or are packed: then
    `unpack_*(rows, dtype)` reads them. Returns o and the log of the denominator (`lse`), both float32. `scale` is
    required: it is H**-0.5 of the head width, never of the latent's or a kernel's. Raises BackendError where the
    backend has no kernel. Source: paper 2.3; the released `sparse_attn`.
    """
    require_xla("sparse_attention", backend)
    return reference.sparse_attention(
        q,
        window,
        window_ids,
        main,
        main_ids,
        sink,
        scale=scale,
        unpack_window=unpack_window,
        unpack_main=unpack_main,
    )
