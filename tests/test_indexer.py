"""The indexer's scores, its selection and the candidate pool, against float64 sums and Python sorts."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax.config import ConfigError
from dsv41_jax.nn.cache import Span
from dsv41_jax.nn.indexer import Indexer, visible_entries
from dsv41_jax.nn.rope import layer_frequencies
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels.indexer import index_scores
from pallas_kernels.indexer.reference import candidate_blocks, mask_scores, pool_entries, pool_mask
from pallas_kernels.topk import topk

CFG = small_config()  # pool: 3 blocks of 2 entries; 4 selected
NUM = numerics_by_name("float32")
INF = np.inf
T, S = 8, 24


def best(scores, count):
    """Ids of the `count` highest of one row, ascending: NaN and -inf never, the lower id of equals."""
    ranked = sorted((i for i in range(len(scores)) if scores[i] > -INF), key=lambda i: (-scores[i], i))
    chosen = sorted(ranked[:count])
    return chosen + [-1] * (count - len(chosen))


def best_blocks(scores, visible, blocks, size):
    """Ids of the kept blocks of one masked row: the newest visible entry's block first, then by best score."""
    top = [max(scores[i : i + size]) for i in range(0, len(scores), size)]
    if visible:
        top[(visible - 1) // size] = INF
    return best(top, blocks)


def span_of(start, tokens, batch=1):
    return Span.after(jnp.full(batch, start, jnp.int32), jnp.full(batch, tokens, jnp.int32), tokens)


def masked(scores, visible):
    """`mask_scores` of entries 0, 1, ... under per-query visibility."""
    entries = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
    return mask_scores(jnp.asarray(scores), entries, jnp.asarray(visible, jnp.int32))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("start", [0, 5])
def test_an_entry_is_visible_once_its_group_is_complete(ratio, start):
    visible = np.asarray(visible_entries(span_of(start, 9), ratio))[0]
    for t in range(9):
        seen = [j for j in range(40) if (j + 1) * ratio - 1 <= start + t]  # its last token is at or before the query
        assert visible[t] == len(seen)


def test_the_candidate_blocks_of_a_prefill_are_the_released_ones(units):
    scores, expected = units["candidates/scores"], units["candidates/mask_topk3_block4"]
    visible = np.broadcast_to(np.arange(1, 24), (2, 23))
    blocks = candidate_blocks(masked(scores, visible), jnp.asarray(visible, jnp.int32), blocks=3, size=4)
    np.testing.assert_array_equal(pool_mask(blocks, 4, 23), expected)


def test_the_candidate_blocks_of_a_decode_step_are_the_released_ones(units):
    visible = jnp.full((2, 1), 23, jnp.int32)
    blocks = candidate_blocks(jnp.asarray(units["candidates/decode_scores"]), visible, blocks=3, size=4)
    np.testing.assert_array_equal(pool_mask(blocks, 4, 23), units["candidates/decode_mask"])


@pytest.mark.parametrize("levels", [2, 5, 1000])  # few levels: many exact ties
def test_mask_and_gather_forms_select_the_same_entries(levels):
    rng = np.random.default_rng(levels)
    shape, size, count = (2, 30, 30), 4, 5
    scores, later = (rng.integers(-levels, levels + 1, shape).astype(np.float32) / levels for _ in range(2))
    visible = np.broadcast_to(np.arange(30), shape[:2])
    blocks = candidate_blocks(masked(scores, visible), jnp.asarray(visible, jnp.int32), blocks=3, size=size)
    by_mask = topk(jnp.where(pool_mask(blocks, size, 30), masked(later, visible), -jnp.inf), count)
    entries = pool_entries(blocks, size)
    gathered = jnp.take_along_axis(jnp.asarray(later), jnp.clip(entries, 0, 29), axis=-1)
    place = topk(mask_scores(gathered, entries, jnp.asarray(visible, jnp.int32)), count)
    by_gather = jnp.where(place < 0, -1, jnp.take_along_axis(entries, jnp.maximum(place, 0), axis=-1))
    for row, t in np.ndindex(*shape[:2]):
        seen = np.where(np.arange(30) < visible[row, t], scores[row, t], -INF)
        kept = best_blocks(seen, visible[row, t], 3, size)
        assert blocks[row, t].tolist() == kept
        allowed = np.isin(np.arange(30) // size, kept) & (np.arange(30) < visible[row, t])
        expected = best(np.where(allowed, later[row, t], -INF), count)
        assert by_mask[row, t].tolist() == by_gather[row, t].tolist() == expected


@pytest.mark.parametrize(
    ("maxima", "expected"),
    [
        ((5.0, -INF, 3.0, 0.0), [0, 3]),  # the newest block is pinned over a better one
        ((-INF, -INF, -INF, -INF), [3, -1]),
        ((9.0, 8.0, 7.0, -5.0), [0, 3]),
        ((9.0, 8.0, 7.0, np.nan), [0, 3]),
        ((9.0, np.nan, 7.0, 1.0), [0, 3]),
        ((2.0, 2.0, 2.0, 2.0), [0, 3]),  # ties: the lower block
    ],
)
def test_the_newest_block_is_pinned(maxima, expected):  # its +inf must survive range arithmetic
    scores = jnp.repeat(jnp.array(maxima, jnp.float32), 2)[None, None]
    visible = jnp.full((1, 1), 8, jnp.int32)
    seen = masked(np.asarray(scores), visible)
    assert candidate_blocks(seen, visible, blocks=2, size=2)[0, 0].tolist() == expected


def test_a_nan_does_not_take_its_block_along():  # a maximum over a block would return the NaN
    scores = masked(np.array([[[np.nan, 8.0, 5.0, 4.0, 1.0, 1.0]]], np.float32), [[6]])
    assert candidate_blocks(scores, jnp.full((1, 1), 6, jnp.int32), blocks=2, size=2).tolist() == [[[0, 2]]]


def test_a_query_that_sees_nothing_has_no_candidates():
    scores = masked(np.ones((1, 1, 6), np.float32), np.zeros((1, 1)))
    assert candidate_blocks(scores, jnp.zeros((1, 1), jnp.int32), blocks=3, size=2).tolist() == [[[-1, -1, -1]]]


def test_a_partly_visible_newest_block_hides_its_later_entries():
    entries = pool_entries(jnp.array([[[0, 3, -1]]], jnp.int32), 4)
    assert entries[0, 0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, -1, -1, -1, -1]
    scores = mask_scores(jnp.ones((1, 1, 12)), entries, jnp.full((1, 1), 13, jnp.int32))
    assert np.isfinite(scores[0, 0]).tolist() == [True] * 5 + [False] * 7


def test_a_budget_that_holds_every_block_restricts_nothing():  # the last block is partial
    rng = np.random.default_rng(0)
    scores = masked(rng.standard_normal((1, 1, 13)).astype(np.float32), [[13]])
    blocks = candidate_blocks(scores, jnp.full((1, 1), 13, jnp.int32), blocks=4, size=4)
    restricted = topk(jnp.where(pool_mask(blocks, 4, 13), scores, -jnp.inf), 6)
    assert restricted[0, 0].tolist() == best(np.asarray(scores)[0, 0], 6)


def test_a_budget_smaller_than_the_selection_is_a_config_error():  # else masked entries fill the top-k
    with pytest.raises(ConfigError, match=r"candidate_topk_blocks: 1 .*fewer than index_topk 6"):
        small_config(candidate_topk_blocks=1, candidate_block_size=4, index_topk=6)


@pytest.mark.parametrize("ids", [[0, -1, -1, 3], [3, -1, 0, -1], [-1, 3, 0, -1]])
def test_missing_ids_do_not_erase_entry_zero(ids):  # -1 clamped to 0 overwrites it in a scatter
    mask = jax.jit(lambda i: pool_mask(i, 1, 6))(jnp.array([[ids]], jnp.int32))
    assert mask[0, 0].tolist() == [True, False, False, True, False, False]


def test_relu_comes_before_the_sum_over_heads():  # after it, opposite heads cancel
    q = jnp.array([[[[1.0], [1.0]]]]) * jnp.array([[2.0], [-3.0]])
    assert index_scores(q, jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 2))).item() == 2.0
    assert index_scores(q, jnp.ones((1, 1, 1, 1)), jnp.array([[[-1.0, 5.0]]])).item() == -2.0


def test_scoring_leaves_its_inputs_as_they_were():  # an in-place sum into the mask or the scores
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((9, 4, 4, 32), (9, 1, 6, 32), (9, 4, 4))]
    given = [jnp.asarray(a) for a in arrays]
    scores = index_scores(*given)
    mask_scores(scores, jnp.zeros((9, 4, 6), jnp.int32), jnp.ones((9, 4), jnp.int32))
    for before, after in zip(arrays, given, strict=True):
        np.testing.assert_array_equal(before, after)


def test_all_winners_are_selected_among_thousands_of_zeros():  # a threshold among ties drops winners
    rng = np.random.default_rng(2)
    scores = np.zeros(8320, np.float32)
    winners = rng.choice(8320, 100, replace=False)
    scores[winners] = rng.uniform(1, 2, 100)
    ids = np.asarray(topk(jnp.asarray(scores), 2048))
    assert set(winners) <= set(ids)
    assert len(set(ids)) == 2048
    assert ids.min() >= 0
    assert ids.tolist() == best(scores, 2048)


@pytest.mark.parametrize("limit", [256, 512, 1024, 4096])
def test_rows_around_every_size_limit_are_sorted_whole(limit):  # right below a tile's size, wrong above
    rng = np.random.default_rng(limit)
    for width in (limit - 1, limit, limit + 1):
        scores = rng.integers(0, width // 2, width).astype(np.float32)
        assert topk(jnp.asarray(scores), 64).tolist() == best(scores, 64)


@pytest.mark.parametrize("ratio", [1, 2, 8, 32])
def test_a_needle_is_selected_whatever_share_is_discarded(ratio):  # what fails is the share, not the length
    rng = np.random.default_rng(ratio)
    q = rng.standard_normal((1, 1, 4, 32)).astype(np.float32)
    keys = rng.standard_normal((1, 1, 16 * ratio, 32)).astype(np.float32)
    needle = int(rng.integers(16 * ratio))
    keys[0, 0, needle] = 3 * q[0, 0].sum(axis=0)
    ids = topk(index_scores(*map(jnp.asarray, (q, keys)), jnp.ones((1, 1, 4))), 16)
    assert needle in ids[0, 0].tolist()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([-0.0, 0.0, -0.0, 0.0], [0, 1]),
        ([0.0, -0.0, -1.0, -0.0], [0, 1]),
        ([-1.0, -0.0, 0.0, 1.0], [1, 3]),
        ([np.nan, 1.0, -np.nan, -5.0], [1, 3]),
        ([np.nan, 1.0, np.nan, -INF], [1, -1]),
        ([INF, INF, INF, 1.0], [0, 1]),
    ],
)
def test_zeros_of_either_sign_tie_and_nan_loses(scores, expected):  # lax.top_k: NaN first, +0 before -0
    assert topk(jnp.array(scores, jnp.float32), 2).tolist() == expected


@pytest.mark.parametrize("visible", [1, 2, 3, 4, 5])
def test_more_wanted_than_there_are_entries(visible):  # top_k raises when k exceeds the axis
    ids = topk(masked(np.ones((1, 1, 5), np.float32), [[visible]]), 512)
    assert ids.shape == (1, 1, 512)
    assert ids[0, 0].tolist() == list(range(visible)) + [-1] * (512 - visible)


# The module: layer 1 (ratio 2) and 3 (ratio 1) own keys, 3 publishes candidates, 4 obeys them.


@cache
def indexer(layer):
    return random_model(CFG).params.layers[layer].attn.indexer


@cache
def compiled(layer):
    part, how = indexer(layer), {"plan": CFG.layers[layer], "cfg": CFG, "numerics": NUM}
    return jax.jit(lambda *arrays: part(*arrays, **how))


def scores64(layer, x, q_r, keys, start):
    """Visible scores [T, S] of one row in float64; -inf elsewhere."""
    part, ratio = indexer(layer), CFG.layers[layer].ratio
    scale = np.repeat(np.repeat(np.asarray(part.wq_b.scale[...]).astype(np.float64), 32, axis=0), 32, axis=1)
    query = q_r.astype(np.float64) @ (np.asarray(part.wq_b.weight[...]).astype(np.float64) * scale).T
    query = query.reshape(len(x), CFG.index_n_heads, CFG.index_head_dim)
    positions = start + np.arange(len(x))
    turn = np.exp(1j * positions[:, None] * layer_frequencies(CFG, ratio).astype(np.float64))[:, None]
    rotary = CFG.qk_rope_head_dim
    pairs = (query[..., -rotary::2] + 1j * query[..., -rotary + 1 :: 2]) * turn
    query[..., -rotary::2], query[..., -rotary + 1 :: 2] = pairs.real, pairs.imag
    weights = x.astype(np.float64) @ np.asarray(part.weights_proj.weight[...]).astype(np.float64).T
    weights = weights * (CFG.index_head_dim * CFG.index_n_heads) ** -0.5
    scores = np.einsum("tis,ti->ts", np.maximum(np.einsum("tij,sj->tis", query, keys.astype(np.float64)), 0), weights)
    return np.where(np.arange(len(keys)) < (positions[:, None] + 1) // ratio, scores, -INF)


def inputs(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in ((2, T, 32), (2, T, CFG.q_lora_rank), (2, S, 32))]


@pytest.mark.parametrize(("layer", "magnitude"), [(1, 1.0), (3, 100.0)])
@pytest.mark.parametrize("start", [0, 5, 16])
def test_each_source_selects_by_its_own_scores(layer, magnitude, start):  # keys or scales of another layer
    x, q_r, keys = inputs(start)
    keys = keys * np.float32(magnitude)
    ids, blocks = compiled(layer)(*map(jnp.asarray, (x, q_r, keys)), None, span_of(start, T, 2))
    for row in range(2):
        scores = scores64(layer, x[row], q_r[row], keys[row], start)
        for t in range(T):
            assert ids[row, t].tolist() == best(scores[t], CFG.index_topk)
            if layer == 3:
                assert blocks[row, t].tolist() == best_blocks(scores[t], start + t + 1, 3, 2)
    assert layer == 3 or blocks is None


def test_a_later_chunk_can_select_the_first_group():  # a continuation blind to earlier entries
    x, q_r, keys = inputs(7)
    keys[:, 0] = 0
    sums = [scores64(1, x[0], q_r[0], np.eye(32)[None, d] * 10, 12)[:, 0] for d in range(32)]
    keys[0, 0, int(np.argmax(np.min(sums, axis=1)))] = 1e3
    strong = scores64(1, x[0], q_r[0], keys[0], 12)[:, 0] > 100
    ids, _ = compiled(1)(*map(jnp.asarray, (x, q_r, keys)), None, span_of(12, T, 2))
    assert strong.any()
    assert [0 in row for row in np.asarray(ids[0])[strong].tolist()] == [True] * strong.sum()


@pytest.mark.parametrize("start", [0, 16])
def test_the_pool_restricts_the_layer_above_in_both_forms(start):
    x, q_r, keys = inputs(start + 1)
    rng = np.random.default_rng(start)
    blocks = np.full((2, T, 3), -1, np.int32)
    for row, t in np.ndindex(2, T):
        newest = (start + t) // 2
        others = rng.permutation(newest)[:2]
        chosen = sorted([newest, *others.tolist()])
        blocks[row, t, : len(chosen)] = chosen
    given = [jnp.asarray(a) for a in (x, q_r, keys)]
    gathered, passed_on = compiled(4)(*given, jnp.asarray(blocks), span_of(start, T, 2))

    wide = CFG.replace(candidate_topk_blocks=12)  # a pool that holds all 24 entries: the mask form
    part = Indexer(wide, wide.layers[4])
    for name in ("wq_b", "weights_proj"):
        setattr(part, name, getattr(indexer(4), name))
    how = {"plan": wide.layers[4], "cfg": wide, "numerics": NUM}
    padded = jnp.asarray(np.pad(blocks, ((0, 0), (0, 0), (0, 9)), constant_values=-1))
    by_mask, _ = jax.jit(lambda *a: part(*a, **how))(*given, padded, span_of(start, T, 2))

    np.testing.assert_array_equal(passed_on, blocks)
    for row in range(2):
        scores = scores64(4, x[row], q_r[row], keys[row], start)
        for t in range(T):
            allowed = np.isin(np.arange(S) // 2, blocks[row, t])
            expected = best(np.where(allowed, scores[t], -INF), CFG.index_topk)
            assert gathered[row, t].tolist() == by_mask[row, t].tolist() == expected


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_keys_that_no_query_sees_change_nothing(layer):
    x, q_r, keys = inputs(3)
    poisoned = keys.copy()
    poisoned[:, (4 + T) // CFG.layers[layer].ratio :] = np.nan
    blocks = jnp.asarray(np.broadcast_to(np.int32([0, 1, 2]), (2, T, 3))) if layer == 4 else None
    given = jnp.asarray(x), jnp.asarray(q_r)
    results = [compiled(layer)(*given, jnp.asarray(k), blocks, span_of(4, T, 2)) for k in (keys, poisoned)]
    for plain, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(plain, other)


def test_heads_that_all_rectify_to_zero_select_the_lowest_positions():  # -0.0 sorts below 0.0 in lax.top_k
    x, q_r, _ = inputs(4)
    keys = np.zeros((2, S, 32), np.float32)  # every hit is 0 and carries the sign of its weight
    ids, _ = compiled(3)(*map(jnp.asarray, (x, q_r, keys)), None, span_of(16, T, 2))
    assert (np.asarray(ids) == np.arange(4)).all()


@pytest.mark.parametrize("name", ["float32", "cachequant", "reference"])
def test_every_numerics_selects_as_many(name):  # a cache format that changes what is scored
    num, part = numerics_by_name(name), indexer(3)
    x, q_r, keys = (jnp.asarray(a, num.dtype) for a in inputs(5))
    how = {"plan": CFG.layers[3], "cfg": CFG, "numerics": num}
    ids, _ = jax.jit(lambda *a: part(*a, **how))(x, q_r, num.index(keys), None, span_of(0, T, 2))
    assert (np.asarray(ids) >= 0).sum(axis=-1).tolist() == [[min(t + 1, 4) for t in range(T)]] * 2
