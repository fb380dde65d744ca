"""Cached rows in plain jnp: norm, rope on the last R channels, quantize, and write where a slot says.

normed = rmsnorm(x) * weight                     in float32, rounded to x's dtype      (`pallas_kernels.norm`)
turned = channels (2i, 2i+1) of the last R by position * f_i, rounded again            (`pallas_kernels.rotary`)
row    = the bytes of its format: fp8, nvfp4 or mxfp4                                  (`pallas_kernels.quantize`)

A cache that keeps values, not bytes, keeps a quantizer's of `turned`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels.formats import GROUP, NVFP4_GROUP
from pallas_kernels.norm import rmsnorm
from pallas_kernels.quantize import FLOOR, pack_fp8, pack_mxfp4, pack_nvfp4
from pallas_kernels.rotary import rotate

__all__ = ["FLOOR", "GROUPS", "insert", "pack", "turned", "width"]

GROUPS = {"fp8": GROUP, "nvfp4": NVFP4_GROUP, "mxfp4": GROUP}
PACK = {"fp8": pack_fp8, "nvfp4": pack_nvfp4, "mxfp4": pack_mxfp4}


def width(channels: int, layout: str) -> int:
    return (channels if layout == "fp8" else channels // 2) + channels // GROUPS[layout]


def turned(
    x: Float[Array, "B T K"],
    positions: Int32[Array, "B T"],
    freqs: Float32[Array, " pairs"],
    norm: Float[Array, " K"] | None,
    *,
    eps: float,
) -> Float[Array, "B T K"]:
    return rotate(x if norm is None else rmsnorm(x, norm, eps=eps, dtype=x.dtype), positions, freqs)


def pack(
    x: Float[Array, "B T K"],
    positions: Int32[Array, "B T"],
    freqs: Float32[Array, " pairs"],
    norm: Float[Array, " K"] | None,
    *,
    eps: float,
    layout: str,
) -> UInt8[Array, "B T row"]:
    return PACK[layout](turned(x, positions, freqs, norm, eps=eps))


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
) -> UInt8[Array, "B S row"]:
    rows = pack(x, positions, freqs, norm, eps=eps, layout=layout)
    live = (slots >= 0) & (slots < store.shape[1])
    slot = jnp.where(live, slots, store.shape[1])
    return jax.vmap(lambda kept, at, row: kept.at[at].set(row, mode="drop"))(store, slot, rows)
