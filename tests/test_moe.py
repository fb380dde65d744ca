"""Routing against the released vectors and explicit cases; the routed experts against a float64 loop over tokens."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax.config import Config
from dsv41_jax.nn.linear import product_f32
from dsv41_jax.nn.moe import MoE, SharedExpert, route
from dsv41_jax.numerics import keep, numerics_by_name, round_fp8
from pallas_kernels.grouped_matmul import experts, swiglu

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BF16 = ml_dtypes.bfloat16
grouped = jax.jit(experts, static_argnames=("limit", "round_input"))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def logits_of(scores: list[float]) -> jax.Array:
    """Router logits whose sqrt(softplus) are `scores`."""
    return jnp.asarray(np.log(np.expm1(np.square([scores]))), jnp.float32)


def pack(codes: np.ndarray) -> jax.Array:
    """Packed E2M1 of codes [..., K]: the even column is the low nibble."""
    return jnp.asarray(codes[..., 0::2] + 16 * codes[..., 1::2], jnp.uint8)


def random_weights(rng: np.random.Generator, count: int, out: int, inner: int):
    """((packed, scales), dense float64) of `count` experts, with outputs of unit scale."""
    codes, scale = rng.integers(0, 16, (count, out, inner)), rng.integers(121, 125, (count, out, inner // 32))
    dense = CODES[codes] * np.repeat(2.0 ** (scale - 127.0), 32, axis=-1)
    return (pack(codes), jnp.asarray(scale, jnp.uint8)), dense


def diagonal(size: int, sign: int = 1, count: int = 1):
    """Experts that are plus or minus the identity."""
    codes = np.tile(np.eye(size, dtype=int) * (2 if sign > 0 else 10), (count, 1, 1))
    return pack(codes), jnp.full((count, size, size // 32), 127, jnp.uint8)


def loop(x, ids, weights, w1, w2, w3, limit):
    """One token and one expert at a time, in float64."""
    out = np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        for e, p in zip(ids[t], weights[t], strict=True):
            hidden = silu(np.minimum(w1[e] @ token, limit)) * np.clip(w3[e] @ token, -limit, limit)
            out[t] += w2[e] @ (p * hidden)
    return out


def random_case(seed: int, tokens: int, per_token: int, count: int, width: int, hidden: int):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    ids = np.sort(np.argsort(rng.random((tokens, count)), axis=1)[:, :per_token], axis=1).astype(np.int32)
    weights = rng.random((tokens, per_token)).astype(np.float32)
    shapes = (hidden, width), (width, hidden), (hidden, width)
    packed, dense = zip(*(random_weights(rng, count, *shape) for shape in shapes), strict=True)
    return (x, ids, weights), packed, dense


def check_against_loop(arrays, packed, dense, limit: float = 10.0) -> None:
    out = grouped(*(jnp.asarray(a) for a in arrays), *packed, limit=limit, round_input=keep)
    expected = loop(*arrays, *dense, limit)
    assert out.dtype == jnp.float32
    # Two chained float32 sums of up to 160 products each, relative to a row's largest value; silu adds a few steps.
    worst = np.abs(np.asarray(out) - expected).max(1) / np.abs(expected).max(1)
    assert worst.max() <= 2 * 160 * 2.0**-24, f"row {worst.argmax()}: {worst.max()}"


def test_routing_equals_the_released_program(units):  # bf16 scores would tie and reorder experts
    x, weight = (jnp.asarray(units[f"gate/{name}"]) for name in ("x", "weight"))
    bias = np.where(units["gate/image_mask"][:, None], units["gate/bias_vl"], units["gate/bias"])
    ids, weights = route(product_f32(x, weight), jnp.asarray(bias), per_token=2, scale=1.5)
    order = np.argsort(units["gate/out_experts"], axis=1)
    assert np.array_equal(ids, np.take_along_axis(units["gate/out_experts"], order, 1))
    # 32 products a logit, and a relative error of a score no larger than its logit's absolute one.
    np.testing.assert_allclose(weights, np.take_along_axis(units["gate/out_weights"], order, 1), rtol=5e-6)


def test_close_logits_choose_the_best_expert():  # rounded to bf16 these three logits score alike
    ids, _ = route(jnp.array([[4.001, 4.002, 4.003]]), jnp.zeros((1, 3)), per_token=1, scale=1.0)
    assert ids.tolist() == [[2]]


def test_bias_selects_and_does_not_weigh():  # a bias left in the weights still sums to one
    ids, weights = route(logits_of([0.9, 0.8, 0.1]), jnp.array([[0.0, 0, 5]]), per_token=2, scale=1.5)
    assert ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(weights, [[1.35, 0.15]], rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "bias"),
    [([-1.0, 2, 2, 2, -1], [0.0, 0, 0, 0, 0]), ([1.0, 1, 1, 1, 1], [0.0, 0.5, 0.5, 0.5, -1])],
    ids=["equal scores", "equal biased scores"],
)
def test_equal_experts_are_taken_from_the_lowest_id(logits, bias):
    ids, weights = route(jnp.array([logits]), jnp.array([bias]), per_token=2, scale=1.0)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_router_reaches_every_one_of_384_experts():  # kernels limited to 256 experts or to powers of two
    winners = [0, 256, 257, 383]
    logits = np.random.default_rng(0).uniform(-1, 1, (3, 384)).astype(np.float32)
    logits[:, winners] = [5, 3, 2, 4]
    ids, weights = route(jnp.asarray(logits), jnp.zeros((1, 384)), per_token=4, scale=1.5)
    assert ids.tolist() == [winners] * 3
    scores = np.sqrt(np.log1p(np.exp(np.array([5.0, 3, 2, 4]))))
    np.testing.assert_allclose(weights, np.tile(1.5 * scores / scores.sum(), (3, 1)), rtol=1e-6)


def test_gate_is_clamped_above_and_up_on_both_sides():  # a gate clamped below too goes unseen at small inputs
    gate, up = jnp.array([50.0, -50, 50, 3]), jnp.array([50.0, 50, -50, 2])
    expected = [silu(10.0) * 10, silu(-50.0) * 10, silu(10.0) * -10, silu(3.0) * 2]
    np.testing.assert_allclose(swiglu(gate, up, 10.0), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_routed_and_shared_experts_clamp_alike(dtype, sign):  # the clamp is easily lost in one of the two paths
    x = jnp.asarray(np.resize([50.0, -50, 3, -3, 0.5], (1, 32)), dtype)
    value = np.asarray(x, np.float64)
    expected = silu(np.minimum(value, 10)) * np.clip(sign * value, -10, 10)
    w1, w3 = diagonal(32), diagonal(32, sign)
    args = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), w1, w1, w3
    routed = grouped(x, *args, limit=10.0, round_input=keep)
    num = numerics_by_name("float32") if dtype == jnp.float32 else numerics_by_name("reference")
    shared = SharedExpert(Config.tiny().replace(hidden_size=32, moe_intermediate_size=32, swiglu_limit=10.0))
    for name, factor in (("w1", 1), ("w2", 1), ("w3", sign)):
        layer = getattr(shared, name)
        layer.weight[...] = (factor * jnp.eye(32)).astype(jnp.float8_e4m3fn)
        layer.scale[...] = jnp.full((1, 1), 127, jnp.uint8).view(jnp.float8_e8m0fnu)
    rtol = 1e-6 if dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(np.asarray(routed), expected, rtol=rtol)
    # The shared expert quantizes its activations in the bf16 model: half a step of E4M3 is 2**-4.
    coarse = 1e-6 if dtype == jnp.float32 else 2.0**-4 + 2.0**-7
    big = np.abs(expected) > 1
    np.testing.assert_allclose(
        np.asarray(jax.jit(lambda x: shared(x, limit=10.0, numerics=num))(x), np.float64)[big],
        expected[big],
        rtol=coarse,
    )


@pytest.mark.parametrize(
    ("tokens", "per_token", "count", "width", "hidden"),
    [(7, 3, 5, 96, 160), (5, 2, 4, 160, 96), (1, 1, 3, 32, 32), (40, 4, 4, 64, 32)],
)
def test_experts_equal_a_float64_loop_for_widths_that_no_tile_divides(tokens, per_token, count, width, hidden):
    # packed FP4 read as FP8 loses half of an expert; a tile overruns a width it does not divide
    check_against_loop(*random_case(tokens, tokens, per_token, count, width, hidden))


@pytest.mark.parametrize("sizes", [(257, 255), (8, 0, 8, 0), (0, 0, 0, 16), (1, 127, 129, 0)])
def test_uneven_and_empty_groups_equal_the_loop(sizes):  # tiles that straddle two experts' rows
    (x, _, weights), packed, dense = random_case(1, sum(sizes), 1, len(sizes), 96, 32)
    ids = np.random.default_rng(2).permutation(np.repeat(np.arange(len(sizes)), sizes))[:, None].astype(np.int32)
    check_against_loop((x, ids, weights), packed, dense)


def test_no_rows_give_no_rows():  # an empty call that launches on nothing
    packed = random_case(0, 1, 1, 2, 32, 64)[1]
    none = jnp.zeros((0, 32)), jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2))
    assert grouped(*none, *packed, limit=10.0, round_input=keep).shape == (0, 32)


def test_unused_experts_reach_neither_values_nor_gradients():  # junk gradients of experts without rows
    (x, _, weights), packed, dense = random_case(3, 4, 1, 4, 32, 32)
    ids = np.array([[0], [2], [0], [2]], np.int32)
    poisoned = [(w, s.at[jnp.array([1, 3])].set(255)) for w, s in packed]  # scales of NaN

    def run(p, weights_of_experts):
        return grouped(jnp.asarray(x), jnp.asarray(ids), p, *weights_of_experts, limit=10.0, round_input=keep)

    p = jnp.asarray(weights)
    assert np.array_equal(run(p, poisoned), run(p, packed))
    gradient = np.asarray(jax.grad(lambda p: run(p, packed).sum())(p))
    expected = loop(x, ids, np.ones_like(weights), *dense, 10.0).sum(axis=1, keepdims=True)  # linear in the weight
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())


def test_routing_weight_multiplies_before_the_rounding_and_the_sum_is_float32():  # after it, low bits differ
    rng = np.random.default_rng(4)
    x = rng.standard_normal((16, 32)).astype(BF16)
    weights = rng.uniform(0.1, 1, (16, 6)).astype(np.float32)
    ids, eye = np.tile(np.arange(6, dtype=np.int32), (16, 1)), diagonal(32, count=6)
    arrays = (jnp.asarray(a) for a in (x, ids, weights))
    out = np.asarray(grouped(*arrays, eye, eye, eye, limit=10.0, round_input=round_fp8))
    q = np.asarray(round_fp8(jnp.asarray(x)), np.float32)  # identity weights: every matmul is exact
    hidden = silu(q.astype(np.float64)) * q

    def quantized(value):
        return np.asarray(round_fp8(jnp.asarray(value.astype(BF16))), np.float32)

    before = np.zeros((16, 32), np.float32)
    for a in range(6):
        before += quantized(hidden * weights[:, a : a + 1])
    after = np.sum([quantized(hidden) * weights[:, a : a + 1] for a in range(6)], axis=0)
    assert np.array_equal(out, before)
    assert not np.array_equal(before, after)


@pytest.mark.parametrize(("dtype", "rounding"), [(jnp.float32, keep), (jnp.bfloat16, round_fp8)])
def test_rows_of_a_batch_equal_single_rows_bit_for_bit(dtype, rounding):  # scales read transposed: one row hides it
    (x, ids, weights), packed, _ = random_case(5, 3, 2, 4, 96, 64)
    x = jnp.asarray(x * np.array([[1], [100], [1e4]], np.float32)).astype(dtype)
    ids, weights = jnp.asarray(ids), jnp.asarray(weights)
    run = partial(grouped, limit=10.0, round_input=rounding)
    single = np.concatenate([run(*(a[t : t + 1] for a in (x, ids, weights)), *packed) for t in range(3)])
    assert np.array_equal(run(x, ids, weights, *packed), single)


def test_rows_keep_their_own_image_bias_when_the_batch_is_permuted():  # a mask out of step with its rows
    donor = random_model(small_config()).params.layers[0].ffn
    cfg = Config.tiny().replace(hidden_size=32)
    vision = MoE(cfg, 4)
    vision.experts, vision.shared_experts = donor.experts, donor.shared_experts
    vision.gate.weight[...] = donor.gate.weight[...]
    vision.gate.bias[...], vision.gate.bias_vl[...] = jnp.array([9.0, 9, 0, 0]), jnp.array([0.0, 0, 9, 9])
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((4, 3, 32)), jnp.float32)
    image = rng.random((4, 3)) < 0.5
    how = {"plan": replace(cfg.layers[0], experts_per_token=2), "cfg": cfg, "numerics": numerics_by_name("float32")}
    run = jax.jit(lambda x, image: vision(x, image, **how))
    y, taps = run(x, jnp.asarray(image))
    assert np.array_equal(taps["moe_experts"], np.where(image[..., None], [2, 3], [0, 1]))
    order = np.array([2, 0, 3, 1])
    permuted, _ = run(x[order], jnp.asarray(image[order]))
    assert np.array_equal(permuted, np.asarray(y)[order])
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    sharded, _ = run(jax.device_put(x, split), jax.device_put(jnp.asarray(image), split))
    np.testing.assert_allclose(sharded, y, atol=1e-5 * np.abs(np.asarray(y)).max())
