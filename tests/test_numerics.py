"""The quantizers against the released program's vectors, numpy replicas of its rules, and themselves under jit."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import random_model, small_config
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.typing import DTypeLike

from dsv41_jax import numerics
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.cache import Span, init_cache
from pallas_kernels import BackendError
from pallas_kernels.formats import cast, dequantize_fp8
from pallas_kernels.quantize import quantize_fp8, quantize_mxfp4, quantize_nvfp4

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, lambda f: JITTED[f]], ids=["eager", "jit"])
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
FAKE = {
    numerics.round_fp8: "quant/fp8_block32_dequant",
    numerics.round_mxfp4: "quant/mxfp4_block32_dequant",
    numerics.round_nvfp4: "quant/nvfp4_block16_e4m3_dequant",
}
SHAPE = (40, 64)  # of every call, so that each function compiles once a dtype
JITTED = {f: jax.jit(f) for f in (*FAKE, quantize_fp8, quantize_mxfp4, quantize_nvfp4)}
FUNCTIONS = pytest.mark.parametrize("function", FAKE, ids=lambda f: f.__name__)


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """float32 bit patterns: -0 and +0 differ."""
    return np.asarray(x).astype(np.float32).view(np.uint32)


def jitted(function: Callable, rows: np.ndarray, dtype: DTypeLike = jnp.float32) -> np.ndarray:
    """`function` of one or more rows, in the corner of a SHAPE of zeros, as float32."""
    rows = np.atleast_2d(rows)
    x = np.zeros(SHAPE, np.float32)
    x[: rows.shape[0], : rows.shape[1]] = rows
    out = JITTED[function](jnp.asarray(x).astype(dtype))
    return np.asarray(out, np.float32)[: rows.shape[0], : rows.shape[1]]


def round_fp8_by_rule(x: np.ndarray) -> np.ndarray:
    """The activation quantizer in numpy: scale 2**ceil(log2(fp32(amax * fp32(1 / 448)))), values by ml_dtypes."""
    groups = x.astype(np.float32).reshape(-1, 32)
    raw = np.maximum(np.abs(groups).max(1), np.float32(1e-4)) * np.float32(1 / 448)
    fraction, exponent = np.frexp(raw)
    scale = np.ldexp(1.0, exponent - (fraction == 0.5))[:, None]
    values = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (values * scale).reshape(x.shape)


def normal(seed: int, spread: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(SHAPE) * 10.0 ** rng.uniform(-spread, spread, SHAPE)).astype(np.float32)


@WRAPS
@DTYPES
@FUNCTIONS
def test_fake_quantizers_equal_the_released_program_bit_for_bit(units, function, dtype, wrap):
    x = jnp.asarray(units["quant/x"]).astype(dtype)
    out = wrap(function)(x)
    assert out.dtype == dtype
    wrong = np.argwhere(bits(out) != bits(units[FAKE[function]]))
    assert not wrong.size, f"{len(wrong)} values differ, first at {wrong[0]}"


@WRAPS
@DTYPES
def test_fp8_codes_and_scales_equal_the_released_program(units, dtype, wrap):
    values, scale = wrap(quantize_fp8)(jnp.asarray(units["quant/x"]).astype(dtype))
    assert values.dtype == jnp.float8_e4m3fn
    assert np.array_equal(np.asarray(values).view(np.uint8), units["quant/fp8_codes"])
    assert np.array_equal(np.asarray(values).astype(np.float32), units["quant/fp8_values"])
    assert np.array_equal(scale, units["quant/fp8_scale_exp"])


def test_fp4_midpoints_go_to_the_even_mantissa():  # power-of-two scales make exact midpoints common
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0625, 6])  # the group's maximum 6 makes the scale 1
    expected = np.array([0, 1, 1, 2, 2, 4, 4, 6, 6])
    for function in (numerics.round_mxfp4, numerics.round_nvfp4):
        assert np.array_equal(jitted(function, [x, -x], jnp.bfloat16), [expected, -expected])


def test_small_half_survives_groups_of_16_and_vanishes_in_groups_of_32():  # one FP4 recipe for both caches
    x = np.repeat([1.0, 0.01], 16)
    main, index = (jitted(f, x, jnp.bfloat16)[0] for f in (numerics.round_nvfp4, numerics.round_mxfp4))
    assert np.all(main[16:] == 6 * 2.0**-9)  # scale e4m3(0.01 / 6) = 2**-9, 0.01 / 2**-9 = 5.1 -> 6
    assert np.all(index[16:] == 0)
    assert np.all(index[:16] == 1)


def test_quantizers_see_bf16_values_where_the_activations_are_bf16():  # from float32, 4% land in another bin
    x = np.full(32, 1.31640625)
    x[0] = 448
    assert jitted(numerics.round_fp8, x, jnp.bfloat16)[0, 1] == 1.25
    assert jitted(numerics.round_fp8, x)[0, 1] == 1.375


@pytest.mark.parametrize(
    ("function", "least_scale"),
    [(quantize_fp8, 105), (quantize_mxfp4, 1), (quantize_nvfp4, 2.0**-9)],
    ids=["fp8", "mxfp4", "nvfp4"],
)
def test_zero_groups_give_code_zero_and_the_floors_scale(function, least_scale):  # 0 / 0 without the floor
    x = np.zeros(SHAPE, np.float32)
    x[1, 32:] = 3
    codes, scale = (np.asarray(a) for a in JITTED[function](jnp.asarray(x)))
    zero = scale[..., : scale.shape[-1] // 2]
    assert (zero == least_scale).all()
    codes = codes.view(np.uint8)
    assert codes[1, 32:].all()
    assert not codes[0].any(), f"codes of a zero group: {np.unique(codes[0])}"
    assert not codes[1, :32].any()


@FUNCTIONS
def test_zero_groups_are_zero_next_to_live_ones(function):  # a zero maximum divides by zero
    x = np.array([0.0] * 32 + [6.0] * 32)
    assert np.array_equal(jitted(function, x)[0], x)


def test_main_kv_scale_has_a_floor_below_which_it_would_round_to_zero():  # an E4M3 scale underflows to 0
    out = jitted(numerics.round_nvfp4, np.full(16, 0.005), jnp.bfloat16)
    assert np.array_equal(out[0], np.full(16, 3 * 2.0**-9))  # 0.005 / 2**-9 = 2.56 -> 3


def test_cache_quantizers_leave_the_selection_alone():  # an option that reroutes attention by the way
    cfg = small_config()
    attention = random_model(cfg).params.layers[1].attn
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 14, 32)), jnp.float32)
    span = Span.after(jnp.zeros(1, jnp.int32), jnp.full(1, 14, jnp.int32), 14)
    plain = numerics.numerics_by_name("float32")
    options = [
        plain,
        replace(plain, window=numerics.values(numerics.round_fp8)),
        replace(plain, main=numerics.values(numerics.round_nvfp4)),
    ]
    cache, how = init_cache(cfg, 1, 16, plain).layers[1], {"plan": cfg.layers[1], "cfg": cfg}
    runs = jax.jit(lambda x: [attention(x, Shared(), cache, span, **how, numerics=num)[:2] for num in options])(x)
    (exact, standing), *quantized = [(np.asarray(y), np.asarray(published.selected)) for y, published in runs]
    for y, selected in quantized:
        assert np.array_equal(selected, standing)
        gap = np.linalg.norm(y - exact) / np.linalg.norm(exact)
        assert 0 < gap < 0.25, gap  # half a step of E2M1 at the bottom of a binade is a quarter


@pytest.mark.parametrize(("name", "value"), [("float8_e4m3fn", 240), ("float8_e4m3fnuz", 120), ("float8_e4m3", 240)])
def test_a_sibling_of_e4m3_is_decoded_as_itself_or_refused(name, value):  # skipped by code that knows one FP8 dtype
    weight = np.full((32, 32), 0x77, np.uint8).view(getattr(ml_dtypes, name))
    scale = jnp.full((1, 1), 127, jnp.uint8)
    try:
        decoded = dequantize_fp8(jnp.asarray(weight), scale)
    except TypeError:
        assert name != "float8_e4m3fn"
    else:
        assert np.all(np.asarray(decoded) == value)


@FUNCTIONS
def test_rows_do_not_change_each_others_scales(function):  # scales read transposed: one row cannot tell
    x = normal(3, 0.5)[:3] * np.array([[1], [100], [1e4]], np.float32)
    rows = np.concatenate([jitted(function, row) for row in x])
    assert np.array_equal(bits(jitted(function, x)), bits(rows))


@DTYPES
@FUNCTIONS
def test_fake_quantizers_are_the_same_eager_jitted_and_rematerialized(function, dtype):  # XLA drops cast pairs
    x = jnp.asarray(normal(4)).astype(dtype)
    eager = function(x)
    assert np.array_equal(bits(JITTED[function](x)), bits(eager))
    loss = jax.checkpoint(lambda a, x: jnp.sum(a * function(x).astype(jnp.float32)))
    again = jax.jit(jax.grad(loss))(jnp.ones(SHAPE), x)  # the gradient of a sum of products is the other factor
    assert np.array_equal(again, np.asarray(eager, np.float32))


def test_rounding_to_bf16_is_the_same_eager_jitted_and_rematerialized():  # XLA drops casts there and back
    x = jnp.asarray(np.append(normal(5).ravel(), np.float32(1.00390625 + 2**-12)))
    expected = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    there_and_back = lambda x: cast(x, jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    loss = jax.checkpoint(lambda a, x: jnp.sum(a * there_and_back(x)))
    again = jax.jit(jax.grad(loss))(jnp.ones(x.shape), x)
    for out in (there_and_back(x), jax.jit(there_and_back)(x), again):
        assert np.array_equal(bits(out), bits(expected))
    assert expected[-1] == 1.0078125


@DTYPES
def test_fp8_equals_the_rule_on_random_rows(dtype):
    x = normal(6).astype(dtype).astype(np.float32)
    assert np.array_equal(jitted(numerics.round_fp8, x, dtype), round_fp8_by_rule(x).astype(dtype).astype(np.float32))


@pytest.mark.parametrize("top", [448.0, 464.0, 450.0, 2.0**-4 * 448, 3.0e38])
def test_fp8_is_finite_and_follows_the_rule_at_its_largest_values(top):  # the cast gives NaN above 464
    x = np.array([[top, -top, *np.linspace(-top, top, 30)]], ml_dtypes.bfloat16).astype(np.float32)
    rounded = jitted(numerics.round_fp8, x)
    assert np.isfinite(rounded).all()
    assert np.array_equal(rounded, round_fp8_by_rule(x))


@pytest.mark.parametrize("top", [2688.0, 2700.0, 1e6])
def test_main_kv_saturates_at_the_largest_scale_times_six(top):  # without the clip the cast gives NaN
    assert (jitted(numerics.round_nvfp4, np.full(16, top)) == 448 * 6).all()


@pytest.mark.parametrize(
    ("function", "width"), [(numerics.round_fp8, 48), (numerics.round_mxfp4, 48), (numerics.round_nvfp4, 40)]
)
def test_width_that_does_not_divide_into_groups_raises(function, width):
    with pytest.raises(ValueError, match=f"last axis: {width} is not a multiple of the quantization group"):
        function(jnp.zeros((1, width)))


def test_numerics_by_name_switch_the_quantizers_of_the_released_program():
    none = (numerics.keep,) * 4
    released = (numerics.round_fp8, numerics.round_fp8, numerics.round_nvfp4, numerics.round_mxfp4)
    rules = {
        "float32": (jnp.float32, none),
        "cachequant": (jnp.float32, (numerics.keep, *released[1:])),
        "reference": (jnp.bfloat16, released),
        "fast": (jnp.bfloat16, released),
    }
    x = normal(7)
    for name, (dtype, rule) in rules.items():
        num = numerics.numerics_by_name(name)
        assert (num.name, num.backend, num.dtype) == (name, "xla", dtype)
        given = jnp.asarray(x, dtype)
        for quantizer, expected in zip((num.activation, num.window, num.main, num.index), rule, strict=True):
            assert np.array_equal(bits(quantizer(given)), bits(expected(given)))


def test_kernels_want_a_gpu_and_bfloat16():
    with pytest.raises(BackendError, match="the model needs a GPU"):
        numerics.numerics_by_name("reference", "pallas")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))):
        assert numerics.numerics_by_name("fast", "pallas").backend == "pallas"
        with pytest.raises(BackendError, match="numerics 'cachequant' has float32"):
            numerics.numerics_by_name("cachequant", "pallas")
    with pytest.raises(ValueError, match="backend: 'cuda' is not one of"):
        numerics.numerics_by_name("fast", "cuda")


def test_unknown_numerics_raise_and_list_the_known():
    with pytest.raises(ValueError, match="numerics: 'bf16' is not one of 'float32', 'cachequant', 'reference'"):
        numerics.numerics_by_name("bf16")
