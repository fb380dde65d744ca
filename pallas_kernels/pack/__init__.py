"""Rows of the three caches in one launch: norm, rope, quantize, write by slot (paper 2.3; the released formats)."""

import jax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels.pack import kernel, reference
from pallas_kernels.pack.reference import turned, width
from pallas_kernels.target import use_kernel

__all__ = ["insert", "pack", "turned", "width"]

LAYOUTS = tuple(reference.GROUPS)


def pack(
    x: Float[Array, "B T K"],
    positions: Int32[Array, "B T"],
    freqs: Float32[Array, " pairs"],
    norm: Float[Array, " K"] | None,
    *,
    eps: float,
    layout: str,
    backend: str = "xla",
) -> UInt8[jax.Array, "B T row"]:
    """The bytes of each token's cached row: quantize(rope(rmsnorm(x) * norm)); `reference.py` has the equations.

    `layout`: "fp8" (window: 512 channels, 528 bytes), "nvfp4" (main: 288 bytes) or "mxfp4" (index keys: 128 channels,
    68 bytes). The last 2 * pairs channels turn by position * freqs. Without `norm` x is taken as normed. Each row
    equals the packers of the model's numerics bit for bit where float32 leaves no bfloat16 rounding open. The kernel
    takes bfloat16. Source: paper 2.3; config keys rms_norm_eps, rope_theta; the released cache formats.
    """
    _known(layout, x.shape[-1])
    if use_kernel("pack", backend):
        return kernel.pack(x, positions, freqs, norm, eps=eps, layout=layout)
    return reference.pack(x, positions, freqs, norm, eps=eps, layout=layout)


def insert(
    store: UInt8[Array, "B S row"],
    x: Float[Array, "B T K"],
    positions: Int32[Array, "B T"],
    slots: Int32[Array, "B T"],
    freqs: Float32[Array, " pairs"],
    norm: Float[Array, " K"] | None,
    *,
    eps: float,
    layout: str,
    backend: str = "xla",
) -> UInt8[jax.Array, "B S row"]:
    """The store with `pack`'s row of token t of sequence b at row slots[b, t]; slots outside 0..S-1 write nothing.

    A call names a slot once at most. The kernel writes in place where the store is donated; else XLA copies it first.
    """
    _known(layout, x.shape[-1])
    if store.shape[-1] != width(x.shape[-1], layout):
        raise ValueError(
            f"store: rows of {store.shape[-1]} bytes, {layout} of {x.shape[-1]} channels has "
            f"{width(x.shape[-1], layout)}"
        )
    if use_kernel("pack.insert", backend):
        return kernel.insert(store, x, positions, slots, freqs, norm, eps=eps, layout=layout)
    return reference.insert(store, x, positions, slots, freqs, norm, eps=eps, layout=layout)


def _known(layout: str, channels: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
    if channels % reference.GROUPS[layout]:
        raise ValueError(f"x: {channels} channels are not a multiple of {layout}'s group {reference.GROUPS[layout]}")
