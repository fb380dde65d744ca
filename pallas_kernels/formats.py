"""Number formats of weights and caches: bits to values, and values to the nearest bits.

    E8M0   byte b is 2**(b - 127); 255 is NaN               scales
    E4M3   the `fn` variant: bias 7, largest 448, no inf    dense weights, activations, window KV
    E2M1   0 .5 1 1.5 2 3 4 6 and their negatives           experts, main KV, index keys; two a byte, low nibble first

Rounding here is integer or comparison arithmetic on float32, never a cast that XLA may fold away or a division that it
may turn into a multiplication, so a result is the same eager, under jit and on every backend.
Scales are annotated `Shaped`, since jaxtyping's `Float` does not know float8_e8m0fnu.
Source: OCP microscaling formats 1.0; the released program's exact rules.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

GROUP = 32  # values that share an E8M0 scale: of a row, or rows and columns of a block
NVFP4_GROUP = 16  # values that share an E4M3 scale
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def cast(x: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Round to `dtype` where the released program rounds. XLA may drop a bare cast to bfloat16 and back, and keep
    more precision than was asked for; `reduce_precision` is an operation that it must carry out."""
    if dtype == jnp.bfloat16 and x.dtype != jnp.bfloat16:
        x = jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def e8m0_value(scale: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """2**(b - 127) of E8M0 scales (float8_e8m0fnu, or their bytes). Byte 0 is subnormal: some devices flush it."""
    byte = scale if scale.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scale, jnp.uint8)
    byte = byte.astype(jnp.uint32)
    bits = jnp.where(byte == 0, jnp.uint32(1 << 22), byte << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e8m0_ceil(x: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The byte of the smallest power of two >= x, for normal positive x: read from the bits, no logarithm."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)


def _binade(x: Float32[Array, "*shape"], minimum: int) -> Int32[Array, "*shape"]:
    """max(floor(log2 |x|), minimum)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(((bits >> 23) & 0xFF) - 127, minimum)


def _power_of_two(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def round_e4m3(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The nearest E4M3 value, ties to even, saturating at 448."""
    x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    exponent = _binade(x, -6) - 3
    return jnp.round(x * _power_of_two(-exponent)) * _power_of_two(exponent)


def round_e4m3_ratio(x: Float32[Array, "*shape"], divisor: float) -> Float32[Array, "*shape"]:
    """E4M3 of x / divisor for x >= 0, correct at ties although nothing is divided.

    The product x * (1 / divisor) may miss a tie by one bit; the remainder x - n * divisor is exact and decides.
    """
    quotient = jnp.minimum(x * np.float32(1 / divisor), E4M3_MAX)
    exponent = _binade(quotient, -6) - 3
    whole = jnp.round(quotient * _power_of_two(-exponent))
    rest = x * _power_of_two(-exponent) - whole * divisor
    odd = whole % 2 == 1
    whole += jnp.where((rest > divisor / 2) | ((rest == divisor / 2) & odd), 1.0, 0.0)
    whole -= jnp.where((rest < -divisor / 2) | ((rest == -divisor / 2) & odd), 1.0, 0.0)
    return jnp.minimum(whole * _power_of_two(exponent), E4M3_MAX)


def e2m1_codes(x: Float32[Array, "*shape"], scale: Float32[Array, "*#shape"]) -> UInt8[Array, "*shape"]:
    """Codes 0..15 of x / scale: nearest, ties to the even mantissa, saturating at 6. Compares; does not divide."""
    size = jnp.abs(x)  # thresholds of the smallest scales are subnormal and may be flushed: zero is tested for itself
    code = sum(
        (size > t * scale if to_even else (size >= t * scale) & (size > 0)).astype(jnp.uint8)
        for t, to_even in ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1))
    )
    return code + jnp.where(jnp.signbit(x), jnp.uint8(8), jnp.uint8(0))


def e2m1_value(code: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Values of codes 0..15."""
    return jnp.asarray(E2M1_VALUES)[code]


def unpack_e2m1(packed: UInt8[Array, "*lead half"]) -> UInt8[Array, "*lead all"]:
    """Codes of packed bytes: the low nibble is the even column."""
    pair = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], -1)


def dequantize_fp4(
    packed: UInt8[Array, "*lead half"], scale: Shaped[Array, "*lead groups"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "*lead all"]:
    """MXFP4 rows: E2M1 codes times one E8M0 scale per 32 columns, exact in bfloat16 and float32."""
    groups = -(-packed.shape[-1] // (GROUP // 2))
    if scale.shape != (*packed.shape[:-1], groups):
        raise ValueError(f"scale: shape {scale.shape} does not match packed {packed.shape}, one scale per 16 bytes")
    values = e2m1_value(unpack_e2m1(packed))
    return (values * jnp.repeat(e8m0_value(scale), GROUP, axis=-1)[..., : values.shape[-1]]).astype(dtype)


def dequantize_fp8(
    weight: Float[Array, "N K"], scale: Shaped[Array, "n k"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "N K"]:
    """Dense FP8: value[i, j] = weight[i, j] * scale[i // 32, j // 32]; ragged edges keep their block's scale."""
    rows, columns = weight.shape
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    if scale.shape != blocks:
        raise ValueError(f"scale: shape {scale.shape} does not match weight {weight.shape} in 32x32 blocks {blocks}")
    full = jnp.repeat(jnp.repeat(e8m0_value(scale), GROUP, axis=0)[:rows], GROUP, axis=1)[:, :columns]
    return (weight.astype(jnp.float32) * full).astype(dtype)
