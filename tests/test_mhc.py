"""Hyper-connections against the released vectors, a float64 loop, and the schedule of the coefficients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from flax import nnx

from dsv41_jax.config import Config
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.transformer import Call, abstract_parameters
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels import mhc
from pallas_kernels.mhc import reference
from pallas_kernels.mhc.reference import sinkhorn, split_coefficients

SIZES = {"iterations": 20, "eps": 1e-20, "hc_eps": 1e-6}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def sinkhorn_loop(logits: np.ndarray, iterations: int, eps: float = 1e-6) -> np.ndarray:
    """The released order in float64, one 4x4 and one element at a time."""
    c = [[float(np.exp(v - max(row))) for v in row] for row in logits.astype(np.float64)]
    c = [[v / sum(row) + eps for v in row] for row in c]

    def columns(c):
        sums = [sum(c[i][j] for i in range(4)) + eps for j in range(4)]
        return [[c[i][j] / sums[j] for j in range(4)] for i in range(4)]

    c = columns(c)
    for _ in range(iterations - 1):
        c = columns([[v / (sum(row) + eps) for v in row] for row in c])
    return np.array(c)


def exact_coefficients(x, fn, scale, base, iterations=20, eps=1e-20, hc_eps=1e-6):
    """(pre, post, comb) of [K, 4, D] streams in float64."""
    z = x.reshape(len(x), -1).astype(np.float64)
    m = z @ fn.T.astype(np.float64) / np.sqrt((z * z).mean(1, keepdims=True) + eps)
    pre = sigmoid(m[:, :4] * scale[0] + base[:4]) + hc_eps
    post = 2 * sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    logits = (m[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4)
    return pre, post, np.stack([sinkhorn_loop(row, iterations, hc_eps) for row in logits])


def site(seed: int, width: int = 32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (6, 4, width), (24, 4 * width), (3,), (24,)
    x, fn, scale, base = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, fn / np.float32((4 * width) ** 0.5), scale, base


def test_coefficients_of_given_mixes_equal_the_released_program(units):  # gates' ranges and eps are easily swapped
    mixes, scale, base = (jnp.asarray(units[f"sinkhorn/{name}"]) for name in ("mixes", "scale", "base"))
    ours = split_coefficients(mixes, scale, base, streams=4, iterations=20, hc_eps=1e-6)
    # Both are float32: an iteration normalizes, so it passes errors on but does not amplify them, and adds the three
    # roundings of a sum and the two of a quotient: 40 half-iterations of 5 * 2**-24 are 1.2e-5 at the very worst.
    for value, name, bound in zip(ours, ("pre", "post", "comb"), (5e-7, 5e-7, 1.2e-5), strict=True):
        np.testing.assert_allclose(value, units[f"sinkhorn/{name}"], rtol=bound, atol=0, err_msg=name)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_equals_a_float64_loop_that_starts_with_columns(iterations):  # rows first converges elsewhere
    logits = np.random.default_rng(iterations).standard_normal((5, 4, 4)).astype(np.float32) * 3
    logits[0, 2] = [8, -8, -8, -8]
    ours = np.asarray(sinkhorn(jnp.asarray(logits), iterations=iterations, eps=1e-6))
    expected = np.stack([sinkhorn_loop(row, iterations) for row in logits])
    # exp of logits up to 16 below the largest is off by 16 * 2**-24 relative; then 5 * 2**-24 a half-iteration.
    np.testing.assert_allclose(ours, expected, rtol=(16 + 10 * iterations) * 2.0**-24)


def test_sinkhorn_epsilon_is_wired_through():  # a hard-coded 1e-5 shows on small rows only
    logits = np.where(np.eye(4), 30, -30).astype(np.float32)
    ours = {eps: np.asarray(sinkhorn(jnp.asarray(logits), iterations=20, eps=eps)) for eps in (1e-6, 1e-5)}
    for eps, value in ours.items():
        np.testing.assert_allclose(value, sinkhorn_loop(logits, 20, eps), atol=1e-6)
    assert np.abs(ours[1e-6] - ours[1e-5]).max() > 1e-6


def test_gates_have_the_released_ranges():  # pre has an epsilon, post is doubled and has none
    base = jnp.array([0, 20, -20, 1] * 2 + [0] * 16, jnp.float32)
    pre, post, _ = split_coefficients(jnp.zeros(24), jnp.ones(3), base, streams=4, iterations=1, hc_eps=1e-3)
    np.testing.assert_allclose(pre, sigmoid(np.array([0, 20, -20, 1])) + 1e-3, rtol=5e-7)
    assert post[0] == 1
    assert post[1] > 1.999
    np.testing.assert_allclose(post, 2 * sigmoid(np.array([0.0, 20, -20, 1])), rtol=5e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_coefficients_of_streams_equal_float64(dtype):  # low precision adds up over 80 sites
    x, fn, scale, base = site(0)
    x = np.asarray(jnp.asarray(x).astype(dtype))
    ours = mhc.coefficients(*(jnp.asarray(a) for a in (x, fn, scale, base)), **SIZES)
    for value, expected in zip(ours, exact_coefficients(x, fn, scale, base), strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected, rtol=2e-5)  # 128 products and 40 half-iterations, as above


def test_norm_epsilon_and_stream_epsilon_are_separate_arguments():  # 1e-20 and 1e-6: one for both drifts
    x, fn, scale, base = site(1)
    x *= np.float32(1e-4)
    sizes = {"iterations": 2, "eps": 1e-6, "hc_eps": 1e-3}
    ours = mhc.coefficients(*(jnp.asarray(a) for a in (x, fn, scale, base)), **sizes)
    for value, expected in zip(ours, exact_coefficients(x, fn, scale, base, **sizes), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_combs_first_index_is_the_source_stream():  # transposed it is doubly stochastic too, so no error
    comb = jnp.array([[[0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]]])
    x = jnp.arange(1.0, 5)[None, :, None]
    out = mhc.update(x, jnp.zeros((1, 1)), jnp.ones((1, 4)), comb)
    np.testing.assert_allclose(out[0, :, 0], [2.8, 1.6, 2.2, 3.4], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_update_adds_the_sublayer_to_every_stream_in_float32(dtype):  # transposed comb looks just as plausible
    rng = np.random.default_rng(2)
    x, y, post, comb = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 8), (3, 8), (3, 4), (3, 4, 4)))
    x, y = (np.asarray(jnp.asarray(a).astype(dtype)) for a in (x, y))
    out = mhc.update(*(jnp.asarray(a) for a in (x, y, post, comb)))
    assert out.dtype == jnp.float32
    x, y = x.astype(np.float64), y.astype(np.float64)
    expected = [
        [post[k, j] * y[k] + sum(comb[k, i, j] * x[k, i] for i in range(4)) for j in range(4)] for k in range(3)
    ]
    np.testing.assert_allclose(out, expected, atol=5e-6)  # six roundings of values up to 10


def test_collapse_sums_over_streams_and_not_over_channels():  # the other axis broadcasts without an error
    x = jnp.tile(jnp.array([1, 10, 100, 1000], jnp.bfloat16)[:, None], (1, 32))[None]
    assert np.array_equal(mhc.collapse(x, jnp.array([[1.0, 0, 0, 0]])), np.ones((1, 32)))
    out = mhc.collapse(x, jnp.array([[1, 0.5, 0.25, 0.125]]))
    assert out.dtype == jnp.float32
    assert np.array_equal(out, np.full((1, 32), 156.0))


def test_each_sublayer_reads_the_mix_of_the_site_before_and_the_head_the_last(monkeypatch):
    cfg = small_config(
        num_hidden_layers=2, compress_ratios=[0, 0], kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[],
    )  # fmt: skip
    params, num = random_model(cfg).params, numerics_by_name("float32")
    expected = [np.array([1.0, 0, 0, 0])]
    for layer in params.layers:
        for name in ("attn", "ffn"):
            base = np.random.default_rng(len(expected)).standard_normal(24).astype(np.float32)
            getattr(layer, f"hc_{name}_scale")[...] = jnp.zeros(3)
            getattr(layer, f"hc_{name}_base")[...] = jnp.asarray(base)
            expected.append(sigmoid(base[:4].astype(np.float64)) + 1e-6)

    def run(tokens):
        seen, collapse = [], reference.collapse

        def record(x, pre):
            seen.append(pre)
            return collapse(x, pre)

        monkeypatch.setattr(reference, "collapse", record)
        params(Call(tokens, np.full(1, 3, np.int32)), init_cache(cfg, 1, 8, num), cfg=cfg, numerics=num)
        return seen

    seen = jax.jit(run)(jnp.array([[3, 4, 5]], jnp.int32))
    assert len(seen) == 5  # two sites a layer, and the final collapse
    for index, (ours, pre) in enumerate(zip(seen, expected, strict=True)):
        np.testing.assert_allclose(ours, np.broadcast_to(pre, (1, 3, 4)), rtol=5e-7, err_msg=f"collapse {index}")


def test_the_model_has_no_parameters_of_a_head_collapse():  # V4's hc_head weights must not be invented
    state = nnx.state(abstract_parameters(Config.tiny()))
    names = {str(part) for path, _ in nnx.to_flat_state(state) for part in path}
    assert {name for name in names if name.startswith("hc_")} == {
        f"hc_{where}_{part}" for where in ("attn", "ffn") for part in ("fn", "base", "scale")
    }


def test_blocks_take_iterations_and_epsilons_from_the_config(monkeypatch):  # a helper's defaults, not the config's
    cfg = small_config(hc_sinkhorn_iters=2, hc_eps=1e-3, rms_norm_eps=1e-6)
    block = random_model(cfg).params.layers[0]
    x, fn, scale, base = site(5, cfg.hidden_size)
    x *= np.float32(1e-3)
    for name in ("attn", "ffn"):
        for part, value in (("fn", fn), ("scale", scale), ("base", base)):
            getattr(block, f"hc_{name}_{part}")[...] = jnp.asarray(value)
    seen, run = [], mhc.site

    def record(*args, **sizes):
        seen.append(run(*args, **sizes))
        return seen[-1]

    monkeypatch.setattr(mhc, "site", record)
    streams, how = jnp.asarray(x)[None], {"cfg": cfg, "numerics": numerics_by_name("float32")}
    ours = block.attention_site(streams, **how)
    kept = ours._replace(post=jnp.zeros((1, 6, 4)), comb=jnp.broadcast_to(jnp.eye(4), (1, 6, 4, 4)))  # X as it is
    block.finish(streams, jnp.zeros((1, 6, cfg.hidden_size)), kept, None, plan=cfg.layers[0], **how)
    expected = exact_coefficients(x, fn, scale, base, iterations=2, eps=1e-6, hc_eps=1e-3)
    for found in (ours, seen[0][2:]):
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(value[0], wanted, rtol=1e-5)
