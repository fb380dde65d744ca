"""Matrix products: the released GEMM vectors, float32 sums whatever the global flag says, and parameter dtypes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import random_model, small_config
from flax import nnx

from dsv41_jax.nn import attention as attention_module
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.cache import Span, init_cache
from dsv41_jax.nn.linear import Linear, QuantizedLinear, parameter, product, product_f32
from dsv41_jax.numerics import numerics_by_name, round_fp8
from pallas_kernels import mhc
from pallas_kernels.formats import cast, dequantize_fp4, dequantize_fp8
from pallas_kernels.indexer import index_scores
from pallas_kernels.sparse_attention import sparse_attention

F32, AXES = jnp.float32, ("out", "inner")


def rows(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), F32)


def assert_within_one_bf16_step(ours: jax.Array, released: np.ndarray) -> None:
    assert ours.dtype == jnp.bfloat16
    a, b = (np.asarray(x).astype(ml_dtypes.bfloat16).view(np.int16).astype(int) for x in (ours, released))
    assert (np.sign(np.asarray(ours, np.float32)) == np.sign(released)).all()
    steps = np.abs(a - b)
    # A float32 sum of 96 products in another order is off by some 2**-20, 2**-12 bf16 steps: it crosses the middle of
    # two bf16 values about once in 2**12 results. None of these 320 may be two steps off, and hardly any one.
    assert steps.max() <= 1, f"worst {steps.max()} steps at {np.unravel_index(steps.argmax(), steps.shape)}"
    assert (steps > 0).sum() <= 3, f"{(steps > 0).sum()} of {steps.size} differ"


def test_fp8_product_equals_the_released_gemm(units):
    layer = QuantizedLinear(64, 96, AXES)
    layer.weight[...] = jnp.asarray(units["gemm/w_fp8_bytes"].view(ml_dtypes.float8_e4m3fn))
    layer.scale[...] = jnp.asarray(units["gemm/w_fp8_scale_bytes"].view(ml_dtypes.float8_e8m0fnu))
    for dtype in (F32, jnp.bfloat16):
        assert np.array_equal(
            np.asarray(dequantize_fp8(layer.weight[...], layer.scale[...], dtype), np.float32),
            units["gemm/w_fp8_dequant"],
        )
    x = jnp.asarray(units["gemm/x"]).astype(jnp.bfloat16)
    assert_within_one_bf16_step(jax.jit(lambda x: layer(x, numerics_by_name("reference")))(x), units["gemm/fp8_out"])


def test_fp4_product_equals_the_released_gemm(units):
    packed, scale = (jnp.asarray(units[f"gemm/w_fp4_{part}"]) for part in ("bytes", "scale_bytes"))
    for dtype in (F32, jnp.bfloat16):
        assert np.array_equal(np.asarray(dequantize_fp4(packed, scale, dtype), np.float32), units["gemm/w_fp4_dequant"])
    x = jnp.asarray(units["gemm/x"]).astype(jnp.bfloat16)
    run = jax.jit(lambda x: cast(product(round_fp8(x), dequantize_fp4(packed, scale, jnp.bfloat16)), jnp.bfloat16))
    assert_within_one_bf16_step(run(x), units["gemm/fp4_out"])


def test_float32_numerics_do_not_round_the_activations():
    layer = QuantizedLinear(32, 32, AXES)
    layer.weight[...] = jnp.eye(32).astype(jnp.float8_e4m3fn)
    layer.scale[...] = jnp.full((1, 1), 128, jnp.uint8).view(jnp.float8_e8m0fnu)
    x = rows(3, 32)
    assert np.array_equal(layer(x, numerics_by_name("float32")), 2 * x)


def test_bias_is_added_before_the_only_rounding():
    layer = Linear(1, 2, AXES, bias=True)
    layer.weight[...] = jnp.array([[1, 2.0**-9]], jnp.bfloat16)
    layer.bias[...] = jnp.array([2.0**-8], jnp.bfloat16)
    y = layer(jnp.ones((1, 2), jnp.bfloat16), numerics_by_name("reference"))
    assert y.dtype == jnp.bfloat16
    assert y.tolist() == [[1.0078125]]  # 1 + 3 * 2**-9; 1 + 2**-9 rounded first would lose both


def test_router_logits_stay_apart_where_bf16_would_merge_them():  # in bf16 all three would tie
    weight = jnp.array([[4, 0.001], [4, 0.002], [4, 0.003]], jnp.bfloat16)
    logits = product_f32(jnp.ones((1, 2), jnp.bfloat16), weight)
    assert logits.dtype == F32
    np.testing.assert_allclose(logits, [[4.001, 4.002, 4.003]], atol=3 * 2.0**-17)  # bf16 of 0.003 is off by 2**-17
    assert len(set(np.asarray(logits).astype(ml_dtypes.bfloat16).ravel().tolist())) == 1


def flagged_products() -> dict[str, tuple[Callable, tuple]]:
    """Every product that must run in float32, with arguments."""
    ids = jnp.zeros((1, 2, 3), jnp.int32)
    sizes = {"iterations": 2, "eps": 1e-20, "hc_eps": 1e-6}
    attend = lambda q, k, sink: sparse_attention(q, k, ids, k, ids, sink, scale=1.0)  # noqa: E731
    return {
        "product": (product, (rows(3, 96), rows(8, 96))),
        "router": (product_f32, (rows(3, 96).astype(jnp.bfloat16), rows(8, 96).astype(jnp.bfloat16))),
        "mhc": (lambda *a: mhc.coefficients(*a, **sizes), (rows(3, 4, 32), rows(24, 128), rows(3), rows(24))),
        "indexer": (index_scores, (rows(1, 2, 4, 32), rows(1, 1, 5, 32), rows(1, 2, 4))),
        "attention": (attend, (rows(1, 2, 4, 32), rows(1, 5, 32), rows(4))),
    }


@pytest.mark.parametrize("name", ["product", "router", "mhc", "indexer", "attention"])
def test_products_ignore_the_global_matmul_precision(name):  # TF32 is a GPU's default for float32
    function, args = flagged_products()[name]
    plain = jax.jit(function)(*args)
    with jax.default_matmul_precision("bfloat16"):
        text = jax.jit(function).lower(*args).as_text()
        flagged = jax.jit(function)(*args)
    jax.tree.map(np.testing.assert_array_equal, flagged, plain)
    # The CPU computes in float32 anyway; what an accelerator would be told stands in the program.
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dots
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots), dots


def test_mhc_mix_and_router_keep_small_differences_from_one():  # TF32 drops the last bits of such sums
    rng = np.random.default_rng(3)
    x = (1 + 2.0**-12 * rng.integers(0, 8, (2, 20480))).astype(np.float32)
    weight = ((1 + 2.0**-12 * rng.integers(0, 8, (24, 20480))) / 20480).astype(np.float32)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(product_f32(jnp.asarray(x), jnp.asarray(weight)), expected, rtol=1e-6)
    mixes = expected / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True))
    scale, sizes = jnp.ones(3), {"iterations": 1, "eps": 1e-20, "hc_eps": 1e-6}
    streams = jnp.asarray(x.reshape(2, 4, 5120))
    _, post, _ = mhc.coefficients(streams, jnp.asarray(weight), scale, jnp.zeros(24), **sizes)
    np.testing.assert_allclose(post, 2 / (1 + np.exp(-mixes[:, 4:8])), rtol=1e-6)


def test_sensitive_parameters_are_float32_in_the_bf16_model(tiny_reference):  # a blanket cast to the compute dtype
    assert tiny_reference.numerics.dtype == jnp.bfloat16
    seen = set()
    for path, leaf in nnx.to_flat_state(nnx.state(tiny_reference.params)):
        name = str(path[-1])
        if name.startswith("hc_") or name in ("attn_sink", "bias_vl") or path[-2:] == ("gate", "bias"):
            seen.add(name)
            assert leaf.dtype == F32, path
    sites = {f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")}
    assert seen == sites | {"attn_sink", "bias", "bias_vl"}


def test_query_heads_are_not_normalized_after_the_up_projection(monkeypatch):  # V4 had a norm for each head
    cfg, num = small_config(), numerics_by_name("float32")
    layers = [random_model(cfg).params.layers[0].attn for _ in range(2)]
    scale = layers[1].wq_b.scale[...]
    layers[1].wq_b.scale[...] = scale.view(jnp.uint8).at[0].add(2).view(scale.dtype)  # rows 0..31 are head 0: times 4
    span, cache = Span.after(jnp.zeros(1, jnp.int32), jnp.full(1, 5, jnp.int32), 5), init_cache(cfg, 1, 8, num)
    how = {"plan": cfg.layers[0], "cfg": cfg, "numerics": num}

    @jax.jit
    def queries(x):
        seen = []

        def capture(q, *args, **kwargs):
            seen.append(q)
            return jnp.zeros_like(q), jnp.zeros(q.shape[:3])

        monkeypatch.setattr(attention_module, "sparse_attention", capture)
        for layer in layers:
            layer(x, Shared(), cache.layers[0], span, **how)
        return seen

    before, after = map(np.asarray, queries(rows(1, 5, 32)))
    assert np.array_equal(after[:, :, 0], 4 * before[:, :, 0])
    assert np.array_equal(after[:, :, 1:], before[:, :, 1:])
    assert np.abs(before).min() > 0


def test_axes_that_do_not_name_every_dimension_raise():
    with pytest.raises(ValueError, match=r"axes: \('out',\) do not name the dimensions of shape \(2, 3\)"):
        parameter((2, 3), F32, ("out",))
