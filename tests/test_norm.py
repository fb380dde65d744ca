"""The norm against float64, and the epsilon that the config names."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax.config import Config
from dsv41_jax.nn import norm as norm_module
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels.mhc import reference as mhc_reference
from pallas_kernels.norm import rmsnorm
from pallas_kernels.pack import reference as pack_reference

ONES = jnp.ones(32)


def exact(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def bf16_ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of bfloat16 arrays of equal signs in steps of the format."""
    return np.abs(np.asarray(a).view(np.int16).astype(int) - np.asarray(b).view(np.int16).astype(int))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e-3])
def test_bf16_rows_of_any_size_are_within_one_step_of_float64(size):  # sums of large squares in bf16 lose bits
    rng = np.random.default_rng(0)
    x = (size * rng.standard_normal((16, 96))).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal(96).astype(ml_dtypes.bfloat16)
    out = rmsnorm(jnp.asarray(x), jnp.asarray(weight), eps=1e-20, dtype=jnp.bfloat16)
    expected = exact(x, weight, 1e-20).astype(ml_dtypes.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert bf16_ulps(out, expected).max() <= 1


def test_float32_rows_equal_float64_to_rounding():
    x = np.random.default_rng(1).standard_normal((16, 96)).astype(np.float32)
    weight = np.linspace(0.5, 2, 96).astype(ml_dtypes.bfloat16)
    out = rmsnorm(jnp.asarray(x), jnp.asarray(weight), eps=1e-20, dtype=jnp.float32)
    # Relative: a mean of 96 squares (at most 97 roundings, halved by the root) and three products.
    np.testing.assert_allclose(out, exact(x, weight, 1e-20), rtol=(97 / 2 + 4) * 2.0**-24)


def test_the_weight_is_applied_before_the_only_rounding():
    x = np.random.default_rng(2).standard_normal((8, 96)).astype(ml_dtypes.bfloat16)
    weight = np.full(96, 1.0078125, ml_dtypes.bfloat16)
    out = np.asarray(rmsnorm(jnp.asarray(x), jnp.asarray(weight), eps=1e-20, dtype=jnp.bfloat16))
    once = exact(x, weight, 1e-20).astype(ml_dtypes.bfloat16)
    twice = (exact(x, np.ones(1), 1e-20).astype(ml_dtypes.bfloat16) * weight).astype(ml_dtypes.bfloat16)
    assert np.array_equal(out, once)
    assert not np.array_equal(out, twice)


@pytest.mark.parametrize(("eps", "expected"), [(1e-20, 1.0), (1e-6, 0.0995037)])
def test_epsilon_is_the_callers(eps, expected):  # a helper's 1e-6 shows on tiny rows only
    out = rmsnorm(jnp.full((1, 32), 1e-4), ONES, eps=eps, dtype=jnp.float32)
    np.testing.assert_allclose(out, np.full((1, 32), expected), rtol=1e-6)


def test_epsilon_has_no_default():
    with pytest.raises(TypeError):
        rmsnorm(jnp.ones((1, 32)), ONES, dtype=jnp.float32)


def test_zero_row_is_zero_with_a_finite_gradient():  # 0 / sqrt(0), and its slope
    norm = lambda x: rmsnorm(x, ONES, eps=1e-20, dtype=jnp.float32)  # noqa: E731
    assert not np.asarray(norm(jnp.zeros((1, 32)))).any()
    gradient = jax.grad(lambda x: norm(x).sum())(jnp.zeros((1, 32)))
    np.testing.assert_allclose(gradient, np.full((1, 32), 1e10), rtol=1e-6)  # eps ** -0.5


def test_row_whose_squares_underflow_is_scaled_by_the_epsilon():  # squares below float32 are zero
    out = rmsnorm(jnp.full((1, 32), 1e-22), ONES, eps=1e-20, dtype=jnp.float32)
    np.testing.assert_allclose(out, np.full((1, 32), 1e-12), rtol=1e-6)


def test_every_norm_of_the_text_model_has_the_configs_epsilon(monkeypatch):  # one norm left at a helper's default
    cfg, seen = small_config(rms_norm_eps=3e-5), []

    def recorded(x, weight, *, eps, dtype):
        seen.append(eps)
        return rmsnorm(x, weight, eps=eps, dtype=dtype)

    for module in (norm_module, pack_reference, mhc_reference):  # of modules, of cached rows, before the experts
        monkeypatch.setattr(module, "rmsnorm", recorded)
    model = random_model(cfg)
    tokens, cache = np.array([[3, 4, 5]], np.int32), model.init_cache(1, 8)
    (chunk,) = model.engine.chunks(tokens, np.full(1, 3, np.int32), cache)
    jax.eval_shape(lambda params: params(chunk.call, cache, cfg=cfg, numerics=model.numerics).logits, model.params)
    # Two a block, two an attention, compressor and index key of two full layers, and the final one.
    assert len(seen) == 5 * 4 + 2 * 2 + 1
    assert set(seen) == {3e-5}
    assert Config.flash().rms_norm_eps == 1e-20


@pytest.mark.parametrize("name", ["float32", "reference"])
def test_module_returns_the_activation_dtype_and_keeps_its_weight_in_bf16(name):
    norm = RMSNorm(32)
    norm.weight[...] = jnp.full(32, 2, jnp.bfloat16)
    out = norm(jnp.full((1, 32), 3.0), 1e-20, numerics_by_name(name))
    assert out.dtype == numerics_by_name(name).dtype
    assert norm.weight[...].dtype == jnp.bfloat16
    # Reciprocal square roots of GPUs are good to a unit in the last place, not correctly rounded.
    np.testing.assert_allclose(np.asarray(out, np.float32), 2, rtol=2**-22)
