"""Quantized rows: the quantizers of the released program, and the bytes that caches keep.

    FP8    K E4M3 codes, then K / 32 E8M0 scales              scale 2**ceil(log2(max(amax, 1e-4) / 448))
    NVFP4  K / 2 E2M1 pairs, low nibble the even channel,
           then K / 16 E4M3 scales                            scale E4M3(max(amax, 6 * 2**-9) / 6)
    MXFP4  K / 2 E2M1 pairs, then K / 32 E8M0 scales          scale 2**ceil(log2(max(amax, 6 * 2**-126) / 6))
    BF16   K bfloat16, low byte first

amax is that of a group of 32 channels, of 16 for NVFP4. Of 512 channels these are 528, 288, 272 and 1,024 bytes; of 128
channels 132, 72, 68 and 256. Unpacking a row gives the values that its codes stand for, exactly.
Source: numerics of the released inference program.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

from pallas_kernels.formats import (
    E2M1_MAX,
    E4M3_MAX,
    GROUP,
    NVFP4_GROUP,
    cast,
    e2m1_codes,
    e2m1_value,
    e8m0_ceil,
    e8m0_value,
    round_e4m3,
    round_e4m3_ratio,
    unpack_e2m1,
)

# The least amax that a scale is made of.
FLOOR = {"fp8": 1e-4, "nvfp4": E2M1_MAX * 2.0**-9, "mxfp4": E2M1_MAX * 2.0**-126}


def _grouped(x: Float[Array, "*shape"], size: int) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    if x.shape[-1] % size:
        raise ValueError(f"last axis: {x.shape[-1]} is not a multiple of the quantization group {size}")
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    return groups, jnp.max(jnp.abs(groups), axis=-1)


def quantize_fp8(
    x: Float[Array, "*lead K"],
) -> tuple[Float[Array, "*lead K"], UInt8[Array, "*lead K//32"]]:
    """E4M3 values (dtype float8_e4m3fn) and E8M0 scale bytes of groups of 32."""
    groups, amax = _grouped(x, GROUP)
    scale = e8m0_ceil(jnp.maximum(amax, np.float32(FLOOR["fp8"])) * np.float32(1 / E4M3_MAX))
    values = round_e4m3(groups * e8m0_value(254 - scale)[..., None])
    return values.reshape(x.shape).astype(jnp.float8_e4m3fn), scale


def quantize_mxfp4(x: Float[Array, "*lead K"]) -> tuple[UInt8[Array, "*lead K"], UInt8[Array, "*lead K//32"]]:
    """E2M1 codes (one a byte) and E8M0 scale bytes of groups of 32."""
    groups, amax = _grouped(x, GROUP)
    scale = e8m0_ceil(jnp.maximum(amax, np.float32(FLOOR["mxfp4"])) * np.float32(1 / E2M1_MAX))
    return e2m1_codes(groups, e8m0_value(scale)[..., None]).reshape(x.shape), scale


def quantize_nvfp4(x: Float[Array, "*lead K"]) -> tuple[UInt8[Array, "*lead K"], Float32[Array, "*lead K//16"]]:
    """E2M1 codes (one a byte) and E4M3-valued scales of groups of 16; there is no second-level scale."""
    groups, amax = _grouped(x, NVFP4_GROUP)
    scale = round_e4m3_ratio(jnp.maximum(amax, np.float32(FLOOR["nvfp4"])), E2M1_MAX)
    return e2m1_codes(groups, scale[..., None]).reshape(x.shape), scale


def round_fp8(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """Fake-quantize as activations and window KV are: E4M3 in groups of 32."""
    values, scale = quantize_fp8(x)
    return (values.astype(jnp.float32) * jnp.repeat(e8m0_value(scale), GROUP, axis=-1)).astype(x.dtype)


def round_mxfp4(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """Fake-quantize as index keys and queries are: E2M1 in groups of 32 with power-of-two scales."""
    codes, scale = quantize_mxfp4(x)
    return (e2m1_value(codes) * jnp.repeat(e8m0_value(scale), GROUP, axis=-1)).astype(x.dtype)


def round_nvfp4(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """Fake-quantize as main KV entries are: E2M1 in groups of 16 with E4M3 scales."""
    codes, scale = quantize_nvfp4(x)
    return (e2m1_value(codes) * jnp.repeat(scale, NVFP4_GROUP, axis=-1)).astype(x.dtype)


def pack_e2m1(codes: UInt8[Array, "*lead K"]) -> UInt8[Array, "*lead half"]:
    """Two codes a byte, the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _e4m3_bytes(values: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)


def _e4m3_values(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _codes_width(row: UInt8[Array, "*lead row"], channels: int, codes: int, scales: int, name: str) -> int:
    """Bytes of codes in a row of `channels`, after a check that the row has just those and the scales."""
    if channels < 1 or codes + scales != row.shape[-1]:
        raise ValueError(f"row: {row.shape[-1]} bytes are no {name} row of whole groups")
    return codes


def pack_fp8(x: Float[Array, "*lead K"]) -> UInt8[Array, "*lead row"]:
    """K E4M3 codes, then K / 32 E8M0 scales."""
    values, scale = quantize_fp8(x)
    return jnp.concatenate([_e4m3_bytes(values), scale], axis=-1)


def unpack_fp8(row: UInt8[Array, "*lead row"], dtype: DTypeLike) -> Float[Array, "*lead K"]:
    """The values of `pack_fp8` rows."""
    channels = row.shape[-1] // (GROUP + 1) * GROUP
    width = _codes_width(row, channels, channels, channels // GROUP, "FP8")
    return cast(_e4m3_values(row[..., :width]) * jnp.repeat(e8m0_value(row[..., width:]), GROUP, axis=-1), dtype)


def pack_nvfp4(x: Float[Array, "*lead K"]) -> UInt8[Array, "*lead row"]:
    """K / 2 bytes of E2M1 pairs, then K / 16 E4M3 scales."""
    codes, scale = quantize_nvfp4(x)
    return jnp.concatenate([pack_e2m1(codes), _e4m3_bytes(scale)], axis=-1)


def unpack_nvfp4(row: UInt8[Array, "*lead row"], dtype: DTypeLike) -> Float[Array, "*lead K"]:
    """The values of `pack_nvfp4` rows."""
    channels = row.shape[-1] // (NVFP4_GROUP // 2 + 1) * NVFP4_GROUP
    half = _codes_width(row, channels, channels // 2, channels // NVFP4_GROUP, "NVFP4")
    values, scale = e2m1_value(unpack_e2m1(row[..., :half])), _e4m3_values(row[..., half:])
    return cast(values * jnp.repeat(scale, NVFP4_GROUP, axis=-1), dtype)


def pack_mxfp4(x: Float[Array, "*lead K"]) -> UInt8[Array, "*lead row"]:
    """K / 2 bytes of E2M1 pairs, then K / 32 E8M0 scales."""
    codes, scale = quantize_mxfp4(x)
    return jnp.concatenate([pack_e2m1(codes), scale], axis=-1)


def unpack_mxfp4(row: UInt8[Array, "*lead row"], dtype: DTypeLike) -> Float[Array, "*lead K"]:
    """The values of `pack_mxfp4` rows."""
    channels = row.shape[-1] // (GROUP // 2 + 1) * GROUP
    half = _codes_width(row, channels, channels // 2, channels // GROUP, "MXFP4")
    values, scale = e2m1_value(unpack_e2m1(row[..., :half])), e8m0_value(row[..., half:])
    return cast(values * jnp.repeat(scale, GROUP, axis=-1), dtype)


def pack_bf16(x: Float[Array, "*lead K"]) -> UInt8[Array, "*lead row"]:
    """K bfloat16, low byte first."""
    pairs = jax.lax.bitcast_convert_type(cast(x, jnp.bfloat16), jnp.uint8)
    return pairs.reshape(*x.shape[:-1], -1)


def unpack_bf16(row: UInt8[Array, "*lead row"], dtype: DTypeLike) -> Float[Array, "*lead K"]:
    """The values of `pack_bf16` rows."""
    return jax.lax.bitcast_convert_type(row.reshape(*row.shape[:-1], -1, 2), jnp.bfloat16).astype(dtype)
