"""The drafter: golden blocks, rings found by position, what a block sees, and that drafting leaves no trace."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, altered, small_config

from dsv41_jax import Model
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.dspark import block_ids
from dsv41_jax.nn.transformer import abstract_parameters

GIVEN = dict(np.load(GOLDEN["tiny-full"] / "inputs.npz"))
RELEASED = dict(np.load(GOLDEN["tiny-full"] / "outputs_float32.npz"))
WINDOW, BLOCK, NOISE, CAPACITY = 16, 5, 5, 128
PREFILL = {"b": [16, 32, 37], "c": [1]}
START = {case: cuts[-1] for case, cuts in PREFILL.items()}


def run(model, ids, cuts):
    """The cache after calls that end at `cuts`."""
    cache = model.init_cache(len(ids), CAPACITY)
    for first, end in zip([0, *cuts], cuts, strict=False):
        _, cache, _ = model.step(ids[:, first:end], cache)
    return cache


@pytest.fixture(scope="module")
def caches(tiny):
    """{case: the caches right after prefill and after each decode step that the released program drafted behind}."""
    out = {}
    for case, cuts in PREFILL.items():
        ids, cache = GIVEN[f"{case}_ids"], run(tiny, GIVEN[f"{case}_ids"], cuts)
        out[case] = [cache.copy()]
        for at in range(START[case], START[case] + RELEASED[f"{case}/spec_ids"].shape[1]):
            _, cache, _ = tiny.step(ids[:, at : at + 1], cache)
            out[case].append(cache.copy())
    return out


@pytest.mark.parametrize(("case", "step"), [("b", 0), ("b", 1), ("b", 2), ("b", 3), ("c", 0), ("c", 1)])
def test_golden_drafts(tiny, caches, case, step):
    expected = RELEASED[f"{case}/spec_ids"][:, step]
    token = GIVEN[f"{case}_ids"][:, START[case] + step + 1]
    np.testing.assert_array_equal(token, expected[:, 0])
    drafts = tiny.draft(token, caches[case][step + 1])
    np.testing.assert_allclose(drafts.logits, RELEASED[f"{case}/spec_logits"][:, step], atol=1e-4)
    np.testing.assert_allclose(drafts.confidence, RELEASED[f"{case}/spec_confidence"][:, step], atol=1e-4)
    np.testing.assert_array_equal(drafts.ids, expected[:, 1:])


@pytest.mark.parametrize(("name", "step"), [("cache_after_spec0", 0), ("cache_end", 4)])
@pytest.mark.parametrize("stage", [0, 1])
def test_golden_rings_at_every_position_of_the_window(caches, name, step, stage):
    ring = np.asarray(caches["b"][step].drafts[stage])
    positions = np.arange(START["b"] + step - WINDOW, START["b"] + step)
    released = RELEASED[f"b/{name}.mtp.{stage}.window_kv"]
    np.testing.assert_allclose(ring[:, positions % ring.shape[1]], released[:, positions % WINDOW], atol=1e-4)


def test_drafting_changes_nothing_and_repeats_itself(tiny, caches):
    cache, token = caches["b"][0].copy(), GIVEN["b_ids"][:, 37]
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    first, second = tiny.draft(token, cache), tiny.draft(token, cache)
    for one, two in zip(before, jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("lengths", [(WINDOW - 1, WINDOW + 1), (WINDOW, WINDOW + 1), (1, 2)])
def test_drafting_right_after_prefill_equals_drafting_after_single_steps(tiny, lengths):  # seeded from a wrong tail
    ids, lengths = np.random.default_rng(0).integers(6, 288, (2, WINDOW + 2)), np.array(lengths)
    _, whole, _ = tiny.step(ids[:, : WINDOW + 1], tiny.init_cache(2, CAPACITY), lengths=lengths)
    single = tiny.init_cache(2, CAPACITY)
    for at in range(max(lengths)):
        _, single, _ = tiny.step(ids[:, at : at + 1], single, lengths=(at < lengths).astype(int))
    np.testing.assert_array_equal(whole.length, lengths)
    for one, two in zip(whole.drafts, single.drafts, strict=True):
        for row, length in enumerate(lengths):
            live = np.arange(max(0, length - WINDOW), length) % one.shape[1]
            np.testing.assert_allclose(one[row][live], two[row][live], atol=1e-5)
    token = ids[np.arange(2), lengths]
    first, second = tiny.draft(token, whole), tiny.draft(token, single)
    np.testing.assert_allclose(first.logits, second.logits, atol=1e-5)
    np.testing.assert_allclose(first.confidence, second.confidence, atol=1e-5)
    np.testing.assert_array_equal(first.ids, second.ids)


def test_rows_of_different_lengths_draft_as_if_alone(tiny, caches):
    mixed = jax.tree.map(lambda one, two: jnp.stack([one[0], two[1]]), caches["b"][1], caches["c"][2])
    tokens = np.array([GIVEN["b_ids"][0, 38], GIVEN["c_ids"][1, 3]])
    drafts = tiny.draft(tokens, mixed)
    expected = np.stack([RELEASED["b/spec_logits"][0, 0], RELEASED["c/spec_logits"][1, 1]])
    np.testing.assert_allclose(drafts.logits, expected, atol=1e-4)


@pytest.mark.parametrize("start", [0, 1, 5, 15, 16, 20, 21, 22, 100])
def test_a_block_sees_the_window_before_it_and_all_of_itself(start):
    ids = np.asarray(block_ids(jnp.arange(start, start + BLOCK, dtype=jnp.int32)[None], WINDOW, 21))
    before = {p % 21 for p in range(max(0, start - WINDOW), start)}
    for row in ids[0]:
        live = row[row >= 0].tolist()
        assert len(live) == len(set(live))
        assert set(live) == before | set(range(21, 21 + BLOCK))


def drafted(model, cache, token, swap=None):
    """Draft logits and confidences with the parameters that `swap(path, leaf)` returns."""
    params = model.params
    if swap is not None:
        named, structure = jax.tree_util.tree_flatten_with_path(params)
        params = structure.unflatten([swap(jax.tree_util.keystr(path), leaf) for path, leaf in named])
    drafts = altered(model, params=params).draft(token, cache)
    return np.asarray(drafts.logits), np.asarray(drafts.confidence)


def reach(one, two):
    """Largest change at each place of the block."""
    return np.abs(one[0] - two[0]).max(axis=(0, 2))


@pytest.fixture(scope="module")
def plain(tiny, caches):
    """(cache, token, its draft logits and confidences)."""
    cache, token = caches["b"][1], GIVEN["b_ids"][:, 38]
    return cache, token, drafted(tiny, cache, token)


def test_drafts_are_routed_by_the_text_bias(tiny, plain):
    cache, token, base = plain

    def with_other(name):
        def swap(path, leaf):
            return leaf[::-1] * 3 + 1 if ".mtp" in path and path.endswith(f"gate.{name}.value") else leaf

        return drafted(tiny, cache, token, swap)

    for one, two in zip(with_other("bias_vl"), base, strict=True):
        np.testing.assert_array_equal(one, two)
    assert reach(with_other("bias"), base).min() > 1e-3


@pytest.mark.parametrize(("row", "matters"), [(NOISE, True), (7, False), ("token", True)])
def test_a_block_is_the_token_and_then_noise(tiny, plain, row, matters):
    cache, token, base = plain
    rows = token if row == "token" else np.array([row])
    assert 7 not in token and NOISE not in token

    def swap(path, leaf):
        return leaf.at[rows].set(leaf[rows + 1]) if path == ".embed.weight.value" else leaf

    moved = reach(drafted(tiny, cache, token, swap), base)
    assert moved.min() > 1e-3 if matters else moved.max() == 0


def poisoned(cache, ages):
    """The cache with other values in the draft rings at the positions `ages` before the next one."""
    at = (np.asarray(cache.length)[:, None] - np.array(ages)) % cache.drafts[0].shape[1]
    rings = tuple(ring.at[np.arange(2)[:, None], at].multiply(-3.0) for ring in cache.drafts)
    return replace(cache, drafts=rings)


def test_a_draft_reads_the_last_window_of_the_ring_and_no_older_row(tiny, plain):
    cache, token, base = plain
    older = drafted(tiny, poisoned(cache, range(WINDOW + 1, WINDOW + BLOCK + 1)), token)
    np.testing.assert_array_equal(older[0], base[0])
    for age in (1, WINDOW):
        assert reach(drafted(tiny, poisoned(cache, [age]), token), base).min() > 1e-4


def test_the_positions_of_a_block_matter(tiny, plain):
    cache, token, base = plain
    ring = cache.drafts[0].shape[1]
    later = drafted(tiny, cache.rewind(cache.length + ring), token)  # the same rows of the ring, one turn later
    assert reach(later, base).min() > 1e-3


def test_greedy_guesses_are_the_argmax_and_each_feeds_the_next(tiny, plain):
    cache, token, base = plain
    drafts = tiny.draft(token, cache)
    np.testing.assert_array_equal(drafts.ids, np.asarray(drafts.logits).argmax(axis=-1))
    markov = tiny.params.mtp[1].markov_head
    embed, head = (np.asarray(part.weight[...], np.float64) for part in (markov.embed, markov.head))
    read = np.concatenate([token[:, None], np.asarray(drafts.ids)[:, :-1]], axis=1)
    bias = embed[read] @ head.T
    unbiased = base[0] - bias

    def swap(path, leaf):  # without the chain only the backbone's own logits are left
        return leaf * 0 if path.endswith("markov_head.head.weight.value") else leaf

    np.testing.assert_allclose(drafted(tiny, cache, token, swap)[0], unbiased, atol=1e-4)
    assert np.abs(bias).max() > 1e-2


def test_features_are_the_stream_mean_behind_engram(tiny):
    ids = np.tile(GIVEN["a_ids"][:, :12], (2, 1))
    cfg = tiny.config.replace(dspark_target_layer_ids=[4, 6, 7])  # layer 4 has an Engram site
    params = jax.tree.unflatten(jax.tree.structure(abstract_parameters(cfg)), jax.tree.leaves(tiny.params))
    model = Model(cfg, params, numerics="float32", engram=tiny.engram)
    names = ["layers.3.out", "layers.4.engram_out", "layers.4.draft_feature", "layers.5.out", "layers.6.out"]
    _, _, seen = model(ids, taps=[*names, "main_hidden"])
    streams = [np.asarray(seen[n], np.float64) for n in ("layers.4.engram_out", "layers.5.out", "layers.6.out")]
    expected = np.concatenate([x.mean(axis=2) for x in streams], axis=-1)
    np.testing.assert_allclose(seen["main_hidden"], expected, atol=1e-5)
    np.testing.assert_array_equal(seen["layers.4.draft_feature"], seen["main_hidden"][..., :96])
    before = np.asarray(seen["layers.3.out"]).mean(axis=2)
    assert np.abs(np.asarray(seen["layers.4.draft_feature"]) - before).max(axis=-1).min() > 1e-3


def test_a_model_without_stages_says_so(small):
    cache = init_cache(small_config(), 1, 16, small.numerics)
    with pytest.raises(ValueError, match=r"^draft: [^\n]*num_nextn_predict_layers 0[^\n]*$"):
        small.draft([3], cache)
