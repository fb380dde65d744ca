"""Codecs of the stored formats, against explicit tables, exact float64 comparisons and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import formats

E4M3_SIZES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # codes of values >= 0
E4M3_MIDDLES = (E4M3_SIZES[:-1] + E4M3_SIZES[1:]) / 2
E2M1_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1_MIDDLES = (E2M1_SIZES[:-1] + E2M1_SIZES[1:]) / 2


def nearest_code(x: np.ndarray, middles: np.ndarray, unit: float = 1.0) -> np.ndarray:
    """Code of |x| / unit, ties to the even code: |x| is compared with exact float64 multiples, nothing is divided."""
    size, above = np.abs(x.astype(np.float64))[..., None], middles * unit
    odd = np.arange(len(middles)) % 2 == 1
    return ((size > above) | (odd & (size == above))).sum(axis=-1)


def every_bf16(least: int = 0, end: int = 0x7F80) -> np.ndarray:
    """The finite bfloat16 values >= 0 of bit patterns least .. end - 1, as float32."""
    return (np.arange(least, end, dtype=np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_e8m0_bytes_are_powers_of_two_at_the_edges_too(dtype, wrap):  # byte 0 is subnormal in float32
    value = np.asarray(wrap(formats.e8m0_value)(jnp.asarray(np.array([0, 1, 127, 254], np.uint8).view(dtype))))
    expected = np.array([2.0**-127, 2.0**-126, 1, 2.0**127], np.float32)
    assert value.view(np.uint32).tolist() == expected.view(np.uint32).tolist()


def test_e8m0_ceil_is_exact_on_powers_of_two_and_next_above_them():
    power = np.ldexp(np.float32(1), np.arange(-126, 127)).astype(np.float32)
    byte = np.arange(1, 254)
    above, below = (np.nextafter(power, np.float32(to)).astype(np.float32) for to in (np.inf, 0))
    assert np.array_equal(formats.e8m0_ceil(jnp.asarray(power)), byte)
    assert np.array_equal(formats.e8m0_ceil(jnp.asarray(above)), byte + 1)
    assert np.array_equal(formats.e8m0_ceil(jnp.asarray(below[1:])), byte[1:])


def test_e4m3_rounding_equals_ml_dtypes_on_every_bf16_value_and_saturates():  # a bare cast gives NaN above 464
    size = every_bf16()
    x = np.concatenate([size, -size])
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(formats.round_e4m3(jnp.asarray(x)), expected)


def test_e4m3_ties_go_to_the_even_code_and_neighbours_of_a_tie_do_not():
    middle = E4M3_MIDDLES.astype(np.float32)  # exact: five significant bits
    low, high = (np.nextafter(middle, np.float32(to)) for to in (0, 1e9))
    even = np.where(np.arange(126) % 2, E4M3_SIZES[1:], E4M3_SIZES[:-1])
    for x, expected in ((middle, even), (low, E4M3_SIZES[:-1]), (high, E4M3_SIZES[1:])):
        assert np.array_equal(formats.round_e4m3(jnp.asarray(x)), expected)
        assert np.array_equal(formats.round_e4m3(jnp.asarray(-x)), -expected)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_e4m3_ratio_is_the_exact_quotient_rounded_for_every_bf16_amax(wrap):
    amax = every_bf16(least=0x80)  # normal values; smaller ones lie below every floor
    expected = E4M3_SIZES[nearest_code(amax, E4M3_MIDDLES, 6.0)]
    ratio = np.asarray(wrap(lambda x: formats.round_e4m3_ratio(x, 6.0))(jnp.asarray(amax)))
    wrong = np.flatnonzero(ratio != expected)
    assert not wrong.size, f"{wrong.size} wrong, first amax {amax[wrong[0]]}: {ratio[wrong[0]]}"


# Scales that are powers of two make midpoints common.
def test_e2m1_midpoints_go_to_the_even_mantissa_and_large_values_saturate():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 7, 100, 0.2500001, 0.7499999], np.float32)
    expected = np.array([0, 1, 1, 2, 2, 4, 4, 6, 6, 6, 0.5, 0.5], np.float32)
    for unit in (1.0, 0.5, 2.0**-20, 2.0**100):
        scale = jnp.float32(unit)
        for sign in (1, -1):
            codes = formats.e2m1_codes(jnp.asarray(np.float32(sign * unit) * x), scale)
            assert np.array_equal(formats.e2m1_value(codes), sign * expected), unit
    assert formats.e2m1_value(formats.e2m1_codes(jnp.float32(-0.625), jnp.float32(0.5))) == -1


@pytest.mark.parametrize("unit", [1.0, 0.4375, 13.0, 2.0**-9])
def test_e2m1_codes_are_nearest_for_every_bf16_value_and_scales_that_are_not_powers_of_two(unit):
    x = every_bf16(least=0x3000, end=0x4400)  # 4.7e-10 .. 512
    expected = nearest_code(x, E2M1_MIDDLES, unit)
    assert np.array_equal(formats.e2m1_codes(jnp.asarray(x), jnp.float32(unit)), expected)
    assert np.array_equal(formats.e2m1_codes(jnp.asarray(-x), jnp.float32(unit)), expected + 8)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("byte", [1, 2, 103])
def test_e2m1_code_of_zero_is_zero_at_the_smallest_scales(wrap, byte):  # a group of zeros must not give 0 / 0
    codes = wrap(formats.e2m1_codes)(jnp.zeros(4), formats.e8m0_value(jnp.uint8(byte)))
    assert np.asarray(codes).tolist() == [0, 0, 0, 0]


def test_e2m1_values_are_the_sixteen_of_the_format():
    value = np.asarray(formats.e2m1_value(jnp.arange(16, dtype=jnp.uint8)))
    expected = np.concatenate([E2M1_SIZES, -E2M1_SIZES])
    assert np.array_equal(value, expected)
    assert np.array_equal(np.signbit(value), np.signbit(expected))
    assert np.array_equal(value, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_low_nibble_is_the_even_column_for_every_byte_stored_as_i8():  # as the checkpoint declares it
    stored = np.arange(-128, 128).astype(np.int8)
    codes = formats.unpack_e2m1(jnp.asarray(stored.view(np.uint8)[:, None]))
    assert np.array_equal(codes, [[int(b) % 16, int(b) % 256 // 16] for b in stored])
    values = np.asarray(formats.e2m1_value(formats.unpack_e2m1(jnp.asarray([[0x71, 0xF8]], jnp.uint8))))
    assert values.tolist() == [[0.5, 6, 0, -6]]
    assert np.signbit(values).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
# Read as FP8, half of the weights would be missing.
def test_fp4_rows_decode_two_values_a_byte_with_one_scale_per_32_columns(dtype):
    packed = np.tile(np.array([0x71], np.uint8), (2, 32))
    scale = np.array([[127, 128], [120, 254 - 6]], np.uint8)
    value = formats.dequantize_fp4(jnp.asarray(packed), jnp.asarray(scale), dtype)
    expected = np.tile([0.5, 6.0], (2, 32)) * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=1)
    assert value.dtype == dtype
    assert np.array_equal(np.asarray(value, np.float64), expected)


@pytest.mark.parametrize("scales", [(2, 2), (2, 0), (1, 1)])
def test_fp4_scale_of_another_shape_raises(scales):
    with pytest.raises((TypeError, ValueError)):
        formats.dequantize_fp4(jnp.zeros((2, 16), jnp.uint8), jnp.full(scales, 127, jnp.uint8))


def test_fp8_blocks_are_32_by_32():  # not the 128 of other checkpoints
    scale = jnp.asarray(np.array([[127, 128], [129, 130]], np.uint8).view(ml_dtypes.float8_e8m0fnu))
    value = np.asarray(formats.dequantize_fp8(jnp.ones((64, 64), jnp.float8_e4m3fn), scale))
    assert np.array_equal(value, np.kron([[1, 2], [4, 8]], np.ones((32, 32))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp8_ragged_edges_keep_their_blocks_scale(dtype):  # the last block is a part of one
    codes = (np.arange(33 * 40) % 127).astype(np.uint8).reshape(33, 40)
    weight = codes.view(ml_dtypes.float8_e4m3fn)
    scale = np.array([[127, 120], [1, 240]], np.uint8)
    value = formats.dequantize_fp8(jnp.asarray(weight), jnp.asarray(scale), dtype)
    full = np.array([[2.0 ** (int(scale[i // 32, j // 32]) - 127) for j in range(40)] for i in range(33)])
    expected = weight.astype(np.float64) * full
    flushed = np.abs(expected) < 2.0**-126  # XLA may flush subnormal products to zero
    assert np.array_equal(np.asarray(value, np.float64)[~flushed], expected[~flushed])


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 3), (33, 40)])
def test_fp8_scale_of_another_shape_raises_and_names_both(shape):  # rescaled weights would raise nowhere
    with pytest.raises(ValueError, match=r"scale: shape \(.*\) does not match weight \(33, 40\)"):
        formats.dequantize_fp8(jnp.zeros((33, 40), jnp.float8_e4m3fn), jnp.full(shape, 127, jnp.uint8))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cast_to_bf16_and_back_is_carried_out(wrap):  # XLA may drop a bare round trip
    x = np.array([1.00390625 + 2**-12, 1.00390625, 1.01171875, 3.3895e38, -0.0], np.float32)
    back = wrap(lambda x: formats.cast(x, jnp.bfloat16).astype(jnp.float32))(jnp.asarray(x))
    assert np.array_equal(back, x.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert back[0] == 1.0078125
