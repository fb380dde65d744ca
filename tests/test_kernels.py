"""One contract for all operations of `pallas_kernels`, and what each of them computes."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41_jax import Model
from dsv41_jax.numerics import keep
from pallas_kernels import BackendError, mhc
from pallas_kernels.block_linear import block_diagonal, block_linear
from pallas_kernels.grouped_matmul import experts
from pallas_kernels.indexer import index_scores
from pallas_kernels.pack import insert, pack
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.topk import topk

BF16, EMPTY, RNG = ml_dtypes.bfloat16, -1, np.random.default_rng


attention = jax.jit(sparse_attention, static_argnames="scale")
scored = jax.jit(index_scores)
top = jax.jit(topk, static_argnums=1)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(RNG(seed).standard_normal(shape), jnp.float32)


def int32(values: object) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


def calls() -> dict:
    """Every operation: the name that its errors carry, the function, arrays, options."""
    ids = int32([[[0, 2, -1], [1, -1, 4]]])
    weight = jnp.full((2, 32, 16), 0x22, jnp.uint8), jnp.full((2, 32, 1), 127, jnp.uint8)
    sizes = {"iterations": 2, "eps": 1e-20, "hc_eps": 1e-6}
    matrix = normal(64, 32).astype(jnp.float8_e4m3fn), jnp.full((2, 1), 127, jnp.uint8)
    row = {"eps": 1e-20, "layout": "fp8"}
    positions, freqs, store = int32([[3, 0]]), normal(4), jnp.zeros((1, 5, 33), jnp.uint8)
    return {
        "block_linear": (block_linear, (normal(3, 32), *matrix), {}),
        "block_linear.block_diagonal": (block_diagonal, (normal(3, 2, 32), *matrix), {}),
        "pack": (pack, (normal(1, 2, 32), positions, freqs, normal(32)), row),
        "pack.insert": (insert, (store, normal(1, 2, 32), positions, int32([[4, 1]]), freqs, normal(32)), row),
        "sparse_attention": (
            sparse_attention,
            (normal(1, 2, 4, 32), normal(1, 5, 32), ids, normal(1, 5, 32), ids, normal(4)),
            {"scale": 0.2},
        ),
        "mhc.coefficients": (mhc.coefficients, (normal(3, 4, 8), normal(24, 32), normal(3), normal(24)), sizes),
        "mhc.site": (
            mhc.site,
            (
                normal(3, 4, 8),
                normal(3, 8),
                normal(3, 4),
                normal(3, 4, 4),
                normal(3, 4),
                normal(8),
                normal(24, 32),
                normal(3),
                normal(24),
            ),
            sizes,
        ),
        "mhc.collapse": (mhc.collapse, (normal(3, 4, 8), normal(3, 4)), {}),
        "mhc.update": (mhc.update, (normal(3, 4, 8), normal(3, 8), normal(3, 4), normal(3, 4, 4)), {}),
        "grouped_matmul.experts": (
            experts,
            (normal(3, 32), int32([[0], [1], [0]]), normal(3, 1), weight, weight, weight),
            {"limit": 10.0, "round_input": keep},
        ),
        "topk": (topk, (normal(2, 9),), {"count": 3}),
        "index_scores": (index_scores, (normal(1, 2, 4, 32), normal(1, 1, 5, 32), normal(1, 2, 4)), {}),
    }


EVERY = pytest.mark.parametrize("op", list(calls()))
# The others are a fusion of XLA and nothing else.
WITH_BACKEND = pytest.mark.parametrize("op", [op for op in calls() if op not in ("mhc.collapse", "mhc.update")])


@WITH_BACKEND
def test_backend_without_a_kernel_raises_and_names_the_operation(op):
    function, args, options = calls()[op]
    with pytest.raises(BackendError, match=op):
        function(*args, **options, backend="pallas")


@WITH_BACKEND
def test_unknown_backend_raises_and_names_it(op):
    function, args, options = calls()[op]
    with pytest.raises(ValueError, match="backend: 'cuda' is not one of") as caught:
        function(*args, **options, backend="cuda")
    assert not isinstance(caught.value, BackendError)


@EVERY
# No aliased argument is written, no output left unset.
def test_inputs_are_unchanged_and_a_second_call_returns_the_same_bits(op):
    function, args, options = calls()[op]
    before = jax.tree.map(lambda x: np.array(x, copy=True), args)
    run = jax.jit(partial(function, **options))
    first = jax.tree.map(np.array, run(*args))
    second = run(*args)
    jax.tree.map(np.testing.assert_array_equal, args, before)
    jax.tree.map(np.testing.assert_array_equal, second, first)


def attend(q, rows, ids, sink, split: int = 0, scale: float = 1.0):
    """Attention whose last slots, from `split` on, name the same rows through the second set."""
    ids = int32(ids)
    split = split or ids.shape[-1]
    return attention(q, rows, ids[..., :split], rows, ids[..., split:], jnp.asarray(sink), scale=scale)


@pytest.mark.parametrize("split", [70, 20])
def test_attention_in_bf16_equals_the_released_kernel_bit_for_bit(units, split):
    q, rows = (jnp.asarray(units[f"attn/{name}"]).astype(jnp.bfloat16) for name in ("q", "kv"))
    o, _ = attend(q, rows, units["attn/idx"], units["attn/sink"], split, 32**-0.5)
    released = units["attn/out_quantized_bf16"]
    wrong = np.argwhere(np.asarray(o).astype(BF16).astype(np.float32) != released)
    assert not wrong.size, f"{len(wrong)} of {released.size} differ, first at {wrong[0]}"


@pytest.mark.parametrize("split", [70, 20])
def test_attention_in_float32_equals_the_exact_softmax(units, split):
    q, rows, ids, sink = (units[f"attn/{name}"] for name in ("q", "kv", "idx", "sink"))
    o, lse = attend(jnp.asarray(q), jnp.asarray(rows), ids, sink, split, 32**-0.5)
    np.testing.assert_allclose(o, units["attn/out_float32"], atol=1e-6)
    scores = np.einsum("btnh,bsh->btns", q.astype(np.float64), rows) * 32**-0.5
    for b, t in np.ndindex(ids.shape[:2]):
        seen = ids[b, t][ids[b, t] >= 0]
        if seen.size:
            denominator = np.exp(scores[b, t][:, seen]).sum(1) + np.exp(sink.astype(np.float64))
            np.testing.assert_allclose(lse[b, t], np.log(denominator), rtol=1e-6, atol=1e-6)


SOME_WITHOUT = [[[-1, -1], [0, 3]]]


def test_query_without_ids_gives_exactly_zero():  # 0 / 0 would be NaN
    o, _ = attend(normal(1, 2, 3, 32), normal(1, 4, 32), SOME_WITHOUT, np.array([0.5, -2, 30], np.float32))
    assert not np.asarray(o)[0, 0].any()
    assert np.asarray(o)[0, 1].any()


def test_lse_of_a_query_without_ids_is_the_sink():
    sink = np.array([0.5, -2, 30], np.float32)
    _, lse = attend(normal(1, 2, 3, 32), normal(1, 4, 32), SOME_WITHOUT, sink)
    np.testing.assert_allclose(lse[0, 0], sink, rtol=1e-6)  # log of a denominator that is exp(sink)


def test_query_without_ids_poisons_no_gradient():  # a softmax of nothing but -inf has NaN gradients
    args = normal(1, 2, 3, 32), normal(1, 4, 32, seed=1), normal(3, seed=2)

    def loss(q, rows, sink, first):
        return attend(q[:, first:], rows, np.asarray(SOME_WITHOUT)[:, first:], sink)[0][:, -1].sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    for name, ours, expected in zip(("q", "rows", "sink"), gradient(*args, 0), gradient(*args, 1), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6, err_msg=name)


def test_rows_that_no_id_names_may_hold_anything():  # rows of a cache that are not live are never written
    q, rows, sink = normal(1, 2, 3, 32), np.array(normal(1, 6, 32)), np.zeros(3, np.float32)
    ids = [[[1, 4, -1], [4, -1, -1]]]
    clean = attend(q, jnp.asarray(rows), ids, sink, 2)
    rows[:, [0, 2, 3, 5]] = np.nan
    jax.tree.map(np.testing.assert_array_equal, attend(q, jnp.asarray(rows), ids, sink, 2), clean)


def test_order_of_ids_and_the_place_of_empty_ones_do_not_matter():  # a -1 clamped to 0 would erase a valid 0
    q, rows, sink = normal(1, 1, 3, 32), normal(1, 6, 32), np.zeros(3, np.float32)
    first, *others = (attend(q, rows, [[ids]], sink)[0] for ids in ([0, -1, -1, 3], [3, -1, 0, -1], [-1, -1, 3, 0]))
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-6)


def test_attention_scale_is_a_required_number_that_goes_by_name():  # a default would come from the latent width
    _, args, _ = calls()["sparse_attention"]
    for wrong in (lambda: sparse_attention(*args), lambda: sparse_attention(*args, 0.2)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(Exception, match=r"scale|None"):
        sparse_attention(*args, scale=None)


def test_scores_one_and_zero_weigh_e_to_one():  # no YaRN factor in the scale
    q, rows = jnp.zeros((1, 1, 1, 32)).at[..., 0].set(32**0.5), jnp.eye(32)[None, :2]
    o, _ = attend(q, rows, [[[0, 1]]], np.array([-np.inf], np.float32), scale=32**-0.5)
    np.testing.assert_allclose(o[0, 0, 0, :2], [np.e / (np.e + 1), 1 / (np.e + 1)], rtol=1e-6)


def best(row: np.ndarray, count: int) -> list[int]:
    """The documented rule by a Python sort: highest first, then the lower id; NaN and -inf never; ascending."""
    live = [i for i, v in enumerate(row.tolist()) if v == v and v != -np.inf]
    chosen = sorted(sorted(live, key=lambda i: (-row[i], i))[:count])
    return chosen + [EMPTY] * (count - len(chosen))


def select(row: list[float], count: int) -> list[int]:
    return top(jnp.asarray(np.array([row], np.float32)), count)[0].tolist()


@pytest.mark.parametrize(
    ("row", "count", "expected"),
    [
        ([1, 3, 3, 3, 1], 2, [1, 2]),
        ([-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),  # zeros of both signs are equal
        ([0.0, -0.0, -1, 0.0], 2, [0, 1]),
        ([np.nan, 1, -np.nan, 2, -np.inf], 3, [1, 3, -1]),  # NaN of either sign is never chosen
        ([5, -np.inf, 3, np.inf], 2, [0, 3]),  # a pinned block has +inf
        ([-np.inf, -np.inf, -np.inf, np.inf], 2, [3, -1]),  # also among nothing but -inf
        ([np.inf, 7, np.inf, np.inf], 2, [0, 2]),
        ([-3e38, -np.inf], 2, [0, -1]),
        ([2, 1], 5, [0, 1, -1, -1, -1]),
        ([np.nan, -np.inf], 3, [-1, -1, -1]),
    ],
)
def test_topk_decides_every_tie_and_special_value(row, count, expected):  # lax.top_k puts NaN first and +0 before -0
    assert select(row, count) == expected
    assert best(np.array(row, np.float32), count) == expected


@pytest.mark.parametrize("width", [1, 255, 256, 257, 511, 513, 1023, 1025, 4095, 4097])
def test_topk_equals_a_sort_at_widths_around_powers_of_two(width):  # a limit of one step must not show
    rng = RNG(width)
    scores = rng.integers(-8, 9, (3, width)).astype(np.float32) / 4  # many ties, zeros of both signs
    scores[rng.random(scores.shape) < 0.1] *= -1
    for value in (np.nan, np.inf, -np.inf):
        scores[rng.random(scores.shape) < 0.02] = value
    count = min(width, 200) + 1
    assert top(jnp.asarray(scores), count).tolist() == [best(row, count) for row in scores]


def test_topk_keeps_all_winners_among_thousands_of_zeros():  # as rectified scores have them
    rng = RNG(0)
    row = np.zeros(8320, np.float32)
    winners = rng.choice(8320, 100, replace=False)
    row[winners] = rng.uniform(1, 2, 100)
    ids = select(row, 2048)
    assert set(winners.tolist()) <= set(ids)
    assert len(set(ids)) == 2048
    assert ids == best(row, 2048)


def test_relu_comes_before_the_sum_over_heads():  # after it, this would be 0
    q, key = jnp.array([[[[2.0, 0], [-3, 0]]]]), jnp.array([[[[1.0, 0]]]])
    assert scored(q, key, jnp.ones((1, 1, 2))).tolist() == [[[2]]]
    assert scored(q, key, jnp.array([[[-0.5, 4]]])).tolist() == [[[-1]]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keys_gathered_per_query_score_as_shared_keys_do(dtype):
    q, keys, weights = (x.astype(dtype) for x in (normal(2, 3, 4, 32), normal(2, 1, 7, 32), normal(2, 3, 4)))
    shared = scored(q, keys, weights)
    assert shared.dtype == jnp.float32
    assert np.array_equal(scored(q, jnp.tile(keys, (1, 3, 1, 1)), weights), shared)
    places = np.array([[[4, 0], [1, 6], [3, 3]], [[0, 5], [2, 1], [6, 4]]])
    pool = np.take_along_axis(np.asarray(keys)[:, 0, None], places[..., None], axis=2)
    expected = np.take_along_axis(np.asarray(shared), places, axis=2)
    atol = 0 if dtype == jnp.bfloat16 else 32 * 4 * 2.0**-24 * np.abs(expected).max()
    np.testing.assert_allclose(scored(q, jnp.asarray(pool), weights), expected, atol=atol)


def test_bf16_scores_round_the_dot_each_hit_and_the_sum():
    rng = RNG(1)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # FP4 values: a dot is exact in float32, in any order
    q, keys = (rng.choice(grid, s) * rng.choice([-1, 1], s) for s in ((1, 3, 2, 32), (1, 1, 9, 32)))
    weights = rng.standard_normal((1, 3, 2)).astype(BF16)
    dot = np.einsum("btij,bosj->btis", q, keys).astype(BF16).astype(np.float32)
    hit = (np.maximum(dot, 0) * weights.astype(np.float32)[..., None]).astype(BF16).astype(np.float32)
    expected = (hit[:, :, 0] + hit[:, :, 1]).astype(BF16).astype(np.float32)  # two terms have one order
    ours = scored(*(jnp.asarray(x.astype(BF16)) for x in (q, keys)), jnp.asarray(weights))
    assert np.array_equal(ours, expected)


def test_heads_that_all_rectify_to_zero_select_the_smallest_positions():  # a negative weight makes them -0
    q, keys = -jnp.ones((1, 1, 4, 32)), jnp.ones((1, 1, 9, 32))
    scores = scored(q, keys, jnp.array([[[1.0, -1, 2, -2]]]))
    assert not np.asarray(scores).any()
    assert top(scores, 3).tolist() == [[[0, 1, 2]]]
    assert top(scored(q, keys, -jnp.ones((1, 1, 4))), 3).tolist() == [[[0, 1, 2]]]


@pytest.mark.parametrize(("backend", "error"), [("pallas", BackendError), ("cuda", ValueError)])
def test_a_model_refuses_a_backend_before_it_loads_anything(backend, error, monkeypatch):
    monkeypatch.setattr("dsv41_jax.model.open_checkpoint", None)
    with pytest.raises(error, match=f"^backend[^\n]*'{backend}'[^\n]*$"):
        Model.from_pretrained("tiny", backend=backend)
