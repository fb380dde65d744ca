"""Rounding: the quantizers of the released program, and the numerics that say which of them are on.

    activation   E4M3, groups of 32, scale 2**ceil(log2(max(amax, 1e-4) / 448))      into every FP8 and FP4 linear
    window KV    the same, all H channels, after rope
    main KV      E2M1, groups of 16, scale E4M3(max(amax, 6 * 2**-9) / 6)            after rope
    index key,   E2M1, groups of 32, scale 2**ceil(log2(max(amax, 6 * 2**-126) / 6)) after rope
      index query

A fake quantizer gives back the values that the codes stand for. Source: numerics of the released inference program.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from pallas_kernels.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_codes,
    e2m1_value,
    e8m0_ceil,
    e8m0_value,
    round_e4m3,
    round_e4m3_ratio,
)


def _grouped(x: Float[Array, "*shape"], size: int) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    if x.shape[-1] % size:
        raise ValueError(f"last axis: {x.shape[-1]} is not a multiple of the quantization group {size}")
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    return groups, jnp.max(jnp.abs(groups), axis=-1)


def quantize_fp8(
    x: Float[Array, "*lead K"],
) -> tuple[Float[Array, "*lead K"], UInt8[Array, "*lead K//32"]]:
    """E4M3 values (dtype float8_e4m3fn) and E8M0 scale bytes of groups of 32."""
    groups, amax = _grouped(x, 32)
    scale = e8m0_ceil(jnp.maximum(amax, np.float32(1e-4)) * np.float32(1 / E4M3_MAX))
    values = round_e4m3(groups * e8m0_value(254 - scale)[..., None])
    return values.reshape(x.shape).astype(jnp.float8_e4m3fn), scale


def round_fp8(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """Fake-quantize as activations and window KV are: E4M3 in groups of 32."""
    values, scale = quantize_fp8(x)
    return (values.astype(jnp.float32) * jnp.repeat(e8m0_value(scale), 32, axis=-1)).astype(x.dtype)


def quantize_mxfp4(x: Float[Array, "*lead K"]) -> tuple[UInt8[Array, "*lead K"], UInt8[Array, "*lead K//32"]]:
    """E2M1 codes (one a byte) and E8M0 scale bytes of groups of 32."""
    groups, amax = _grouped(x, 32)
    scale = e8m0_ceil(jnp.maximum(amax, np.float32(E2M1_MAX * 2.0**-126)) * np.float32(1 / E2M1_MAX))
    return e2m1_codes(groups, e8m0_value(scale)[..., None]).reshape(x.shape), scale


def round_mxfp4(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """Fake-quantize as index keys and queries are: E2M1 in groups of 32 with power-of-two scales."""
    codes, scale = quantize_mxfp4(x)
    return (e2m1_value(codes) * jnp.repeat(e8m0_value(scale), 32, axis=-1)).astype(x.dtype)


def quantize_nvfp4(x: Float[Array, "*lead K"]) -> tuple[UInt8[Array, "*lead K"], Float32[Array, "*lead K//16"]]:
    """E2M1 codes (one a byte) and E4M3-valued scales of groups of 16; there is no second-level scale."""
    groups, amax = _grouped(x, 16)
    scale = round_e4m3_ratio(jnp.maximum(amax, np.float32(E2M1_MAX * 2.0**-9)), E2M1_MAX)
    return e2m1_codes(groups, scale[..., None]).reshape(x.shape), scale


def round_nvfp4(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """Fake-quantize as main KV entries are: E2M1 in groups of 16 with E4M3 scales."""
    codes, scale = quantize_nvfp4(x)
    return (e2m1_value(codes) * jnp.repeat(scale, 16, axis=-1)).astype(x.dtype)


def keep(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The quantizer that is off."""
    return x


Quantizer = Callable[[Array], Array]


@dataclass(frozen=True)
class Numerics:
    """How the arithmetic is carried out: the activations' dtype, the quantizers in their places, and the backend of
    the operations in `pallas_kernels`. One code path serves them all."""

    name: str
    dtype: jnp.dtype
    activation: Quantizer = keep
    window: Quantizer = keep
    main: Quantizer = keep
    index: Quantizer = keep
    backend: str = "xla"


NUMERICS = {
    n.name: n
    for n in (
        Numerics("float32", jnp.dtype(jnp.float32)),
        Numerics("cachequant", jnp.dtype(jnp.float32), keep, round_fp8, round_nvfp4, round_mxfp4),
        Numerics("reference", jnp.dtype(jnp.bfloat16), round_fp8, round_fp8, round_nvfp4, round_mxfp4),
    )
}


def numerics(name: str, backend: str = "xla") -> Numerics:
    """By name: `float32` (no quantizer), `cachequant` (float32 with quantized caches), `reference` (as released)."""
    if name not in NUMERICS:
        raise ValueError(f"numerics: {name!r} is not one of {', '.join(map(repr, NUMERICS))}")
    return replace(NUMERICS[name], backend=backend)
