"""Bounded Replay, in prefill and behind a restored prefix, against the forward pass of `truncated` (paper 3.2.2)."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from truncated import (
    CAPACITY,
    LENGTHS,
    ROWS,
    TOL,
    WIDTH,
    W,
    append,
    assert_entries_are_the_snapshots,
    assert_history,
    assert_same,
    behind,
    floors,
    oracle,
    worst,
)

from dsv41_jax import Config
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.nn import replay
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.vision import ImageInput
from dsv41_jax.numerics import numerics_by_name

# One model with everything but a vision tower that runs: a row of the batch for every length 1 .. 40.

CUT = 2
START = np.maximum(LENGTHS - W, 0)
pytestmark = pytest.mark.usefixtures("few_short_compilations")


@pytest.fixture(scope="module")
def model():
    """Four layers, Engram below and at the cut, drafts from both layers that are replayed, images."""
    return random_model(
        small_config(
            num_hidden_layers=4,
            compress_ratios=[0, 2, 1, 1],
            kv_source_layer_ids=[1, CUT],
            index_source_layer_ids=[1, CUT, 3],
            candidate_source_layer_id=CUT,
            engram_layer_ids=[1, CUT],
            engram_num_embeddings=[434, 606],
            vision_num_hidden_layers=1,
            num_nextn_predict_layers=1,
            dspark_block_size=3,
            dspark_target_layer_ids=[CUT, 3],
        )
    )


@pytest.fixture(scope="module")
def truncated(model):
    return partial(oracle(model.config, model.numerics, ROWS, WIDTH, CAPACITY), model)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(6, 288, (ROWS, WIDTH)).astype(np.int32)


@pytest.fixture(scope="module")
def image():
    """Spans of five in two of three rows, 0 to 6 tokens before the end of the prefix: across the replay's start too."""
    end = (LENGTHS - np.arange(ROWS) % 7)[:, None]
    place = np.arange(WIDTH)
    mask = (place >= end - 5) & (place < end) & (np.arange(ROWS) % 3 > 0)[:, None]
    rows = np.random.default_rng(1).standard_normal((ROWS, WIDTH, 32)).astype(np.float32)
    return ImageInput(jnp.asarray(mask), jnp.asarray(rows))


@pytest.fixture(scope="module")
def plain(truncated, tokens):
    """Logits of the full forward."""
    return truncated(tokens, np.full(ROWS, WIDTH), floors(4, START))[0]


@pytest.fixture(scope="module")
def plain_with_images(truncated, tokens, image):
    return truncated(tokens, np.full(ROWS, WIDTH), floors(4, START), image)[0]


@pytest.fixture(scope="module")
def with_images(model, tokens, image):
    prompts, padded = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)], image.part(0, ROWS)
    return model.prefill(prompts, model.init_cache(ROWS, CAPACITY), image=padded, mode="replay")[:2]


@pytest.fixture(scope="module")
def prefilled(model, tokens):
    """(logits, cache) of decoder replay on a batch of prompts of every length."""
    prompts = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
    return model.prefill(prompts, model.init_cache(ROWS, CAPACITY), mode="replay")[:2]


def test_prefill_replay_is_the_full_forward_with_truncated_windows_from_the_cut_up(model, truncated, tokens, prefilled):
    logits, cache = prefilled
    assert replay.cut(model.config) == CUT
    expected, full = truncated(tokens, LENGTHS, floors(CUT, START))
    np.testing.assert_allclose(logits, behind(expected, LENGTHS), **TOL)
    assert_same(cache, full, model.config, LENGTHS)
    assert_history(model, cache, tokens, LENGTHS)


def test_decoding_behind_a_replay_goes_on_as_the_truncated_forward(model, truncated, tokens, prefilled):
    cache, at = prefilled[1].copy(), LENGTHS.copy()
    expected, full = truncated(tokens, LENGTHS + 11, floors(CUT, START))
    for count in (1, 1, 1, 2, 1, 5):  # past the window: what was replayed is overwritten at the end
        logits, cache = append(model, cache, tokens, at, np.full(ROWS, count))
        at = at + count
        np.testing.assert_allclose(logits, behind(expected, at), **TOL)
    assert_same(cache, full, model.config, at)
    assert_history(model, cache, tokens, at)


def test_prefill_replay_is_exact_up_to_the_window_and_an_approximation_above(prefilled, plain):
    apart = worst(prefilled[0], behind(plain, LENGTHS))
    assert apart[LENGTHS <= W].max() < 2e-5
    assert apart[LENGTHS > W].min() > 1e-3


def test_the_windows_of_the_cut_layer_itself_are_truncated(truncated, tokens, prefilled):
    above, _ = truncated(tokens, LENGTHS, floors(CUT + 1, START))
    assert worst(prefilled[0], behind(above, LENGTHS))[LENGTHS > W].min() > 1e-3


def test_replay_leaves_the_entries_of_a_full_prefill(model, truncated, tokens, prefilled):
    _, full = truncated(tokens, LENGTHS, floors(4, START))
    mine, theirs = Snapshot.of(prefilled[1]), Snapshot.of(full)
    np.testing.assert_array_equal(mine.length, theirs.length)
    for one, two in zip(sum(mine.entries, ()), sum(theirs.entries, ()), strict=True):
        np.testing.assert_allclose(one, two, **TOL)


def test_prefill_replay_of_prompts_with_images(model, truncated, tokens, image, with_images):
    logits, cache = with_images[0], with_images[1].copy()
    expected, full = truncated(tokens, LENGTHS, floors(CUT, START), image)
    np.testing.assert_allclose(logits, behind(expected, LENGTHS), **TOL)
    assert_same(cache, full, model.config, LENGTHS)
    assert_history(model, cache, tokens, LENGTHS, np.asarray(image.mask))
    logits, cache = append(model, cache, tokens, LENGTHS, np.full(ROWS, 6))
    expected, full = truncated(tokens, LENGTHS + 6, floors(CUT, START), image)
    np.testing.assert_allclose(logits, behind(expected, LENGTHS + 6), **TOL)
    assert_same(cache, full, model.config, LENGTHS + 6)


def test_generate_replays_its_prompts_when_asked(model, truncated, tokens):
    prompts = [row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)]
    new = model.generate(prompts, 6, prefill="replay")
    whole = tokens.copy()
    for row, (n, ids) in enumerate(zip(LENGTHS, new, strict=True)):
        whole[row, n : n + len(ids)] = ids
    expected, _ = truncated(whole, np.full(ROWS, WIDTH), floors(CUT, START))
    for row, (n, ids) in enumerate(zip(LENGTHS, new, strict=True)):
        assert len(ids) == 6 or ids[-1] == model.config.eos_token_id
        assert ids == expected[row, n - 1 : n - 1 + len(ids)].argmax(axis=-1).tolist()


def test_replay_is_off_unless_named(model, tokens, plain):
    assert inspect.signature(type(model).prefill).parameters["mode"].default == "full"
    assert inspect.signature(type(model).generate).parameters["prefill"].default == "full"
    prompts = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
    logits, _, _ = model.prefill(prompts, model.init_cache(ROWS, CAPACITY))
    np.testing.assert_allclose(logits, behind(plain, LENGTHS), **TOL)


def test_what_cannot_be_replayed_is_refused(model, tokens, prefilled):
    one_line, cache = r"^[^\n]+$", prefilled[1].copy()
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    with pytest.raises(ValueError, match=one_line):
        model.prefill([[7, 8]] * ROWS, cache, mode="replay")  # not empty
    for one, two in zip(before, jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(one, two)
    partly = replace(model.init_cache(2, CAPACITY), length=jnp.array([0, 1], jnp.int32))
    with pytest.raises(ValueError, match=one_line):
        model.prefill([[7, 8]] * 2, partly, mode="replay")
    for wrong in ("Replay", "", "exact"):
        with pytest.raises(ValueError, match=r"^[^\n]*full[^\n]*replay[^\n]*$"):
            model.prefill([[7]], model.init_cache(1, CAPACITY), mode=wrong)
        with pytest.raises(ValueError, match=r"^[^\n]*full[^\n]*replay[^\n]*$"):
            model.generate([[7]], 1, prefill=wrong)
    with pytest.raises(ValueError, match=one_line):
        model.prefill([[7, 288]], model.init_cache(1, CAPACITY), mode="replay")
    with pytest.raises(ValueError, match=one_line):
        model.prefill([[7] * 40], model.init_cache(1, 32), mode="replay")


DRAFTS = {"num_nextn_predict_layers": 1, "dspark_block_size": 3}


@pytest.mark.parametrize(
    "change",
    [
        {"engram_layer_ids": [4]},
        {"engram_layer_ids": [1, 4], "engram_num_embeddings": [434, 606]},
        DRAFTS | {"dspark_target_layer_ids": [2]},
        DRAFTS | {"dspark_target_layer_ids": [0, 3, 4]},
    ],
)
def test_configs_with_engram_above_the_cut_or_draft_features_below_it_are_refused(change):
    refused = random_model(small_config(**change))
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        replay.cut(refused.config)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        refused.prefill([[7, 8]], refused.init_cache(1, CAPACITY), mode="replay")
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        refused.generate([[7, 8]], 1, prefill="replay")


def test_the_cut_is_the_last_full_layer():
    assert replay.cut(small_config()) == 3
    assert replay.cut(Config.tiny()) == 4
    assert replay.cut(Config.flash()) == 20
    assert replay.cut(small_config(**DRAFTS, dspark_target_layer_ids=[3], engram_layer_ids=[3])) == 3


# Encoder replay: a cache rebuilt behind each of 40 prefixes, most with an image, from entries of 45 tokens.


@pytest.fixture(scope="module")
def snapshot(model, tokens, image):
    """Entries of 45 exact tokens of every row."""
    cache = model.init_cache(ROWS, CAPACITY)
    return Snapshot.of(model.prefill(list(tokens[:, :45]), cache, image=image.part(0, 45), mode="replay")[1])


@pytest.fixture(scope="module")
def restored(model, tokens, snapshot, image):
    return model.restore(snapshot, tokens, LENGTHS, capacity=CAPACITY, image=image)


@pytest.fixture(scope="module")
def replayed(truncated, tokens, snapshot, image):
    """count -> the oracle of a replay behind each row's prefix."""
    start, held = floors(0, START), {"held": LENGTHS, "given": snapshot.entries}
    return lambda count: truncated(tokens, count, start, image, **held)


def test_restore_rebuilds_windows_truncated_where_the_replay_begins(model, tokens, image, snapshot, restored, replayed):
    assert_entries_are_the_snapshots(restored, snapshot, LENGTHS)
    assert_same(restored, replayed(LENGTHS)[1], model.config, LENGTHS)
    assert_history(model, restored, tokens, LENGTHS, np.asarray(image.mask))


@pytest.mark.parametrize("cuts", [(12,), (1, 1, 1, 1, 8), (5, 3, 4), "uneven"])
def test_a_suffix_in_any_chunks_equals_the_truncated_forward(
    model, tokens, image, restored, replayed, cuts
):  # the ring is empty behind a prefix whose entries are shared, and history must come along
    rng, cache, at = np.random.default_rng(3), restored.copy(), LENGTHS.copy()
    expected, full = replayed(LENGTHS + 12)
    while (at < LENGTHS + 12).any():
        left = LENGTHS + 12 - at
        if cuts == "uneven":
            count = np.minimum(rng.integers(1, 8, ROWS), left)
            if not count.all():  # every row of a prefill has a token: the rows that are done end the loop
                break
        else:
            count, cuts = np.full(ROWS, cuts[0]), cuts[1:]
        logits, cache = append(model, cache, tokens, at, count)
        at = at + count
        np.testing.assert_allclose(logits, behind(expected, at), **TOL)
    full = replayed(at)[1] if (at != LENGTHS + 12).any() else full
    assert_same(cache, full, model.config, at)
    assert_history(model, cache, tokens, at, np.asarray(image.mask))


def test_restore_is_exact_up_to_the_window_and_an_approximation_above(model, tokens, restored, plain_with_images):
    logits, _ = append(model, restored.copy(), tokens, LENGTHS, np.full(ROWS, 3))
    apart = worst(logits, behind(plain_with_images, LENGTHS + 3))
    assert apart[LENGTHS <= W].max() < 2e-5
    assert apart[LENGTHS > W].min() > 1e-4


def test_restore_believes_the_entries_of_the_snapshot(model, truncated, tokens, image, snapshot, replayed):
    rng = np.random.default_rng(4)
    noise = lambda part: part + rng.standard_normal(part.shape).astype(np.float32)  # noqa: E731
    poisoned = replace(snapshot, entries=tuple(tuple(map(noise, pair)) for pair in snapshot.entries))
    cache = model.restore(poisoned, tokens, LENGTHS, capacity=CAPACITY, image=image)
    assert_entries_are_the_snapshots(cache, poisoned, LENGTHS)
    start, held = floors(0, START), {"held": LENGTHS, "given": poisoned.entries}
    assert_same(cache, truncated(tokens, LENGTHS, start, image, **held)[1], model.config, LENGTHS)
    logits, cache = append(model, cache, tokens, LENGTHS, np.full(ROWS, 7))
    expected, full = truncated(tokens, LENGTHS + 7, start, image, **held)
    np.testing.assert_allclose(logits, behind(expected, LENGTHS + 7), **TOL)
    assert_same(cache, full, model.config, LENGTHS + 7)
    apart = worst(logits, behind(replayed(LENGTHS + 7)[0], LENGTHS + 7))
    assert apart[LENGTHS > 1].min() > 1e-3


def test_entries_behind_the_prefix_are_never_read(model, tokens, image, snapshot, restored):
    def spoil(ratio, part):
        dead = (np.arange(part.shape[1]) >= LENGTHS[:, None] // ratio)[..., None]
        return np.where(dead, np.float32(np.nan), part)

    ratios = [layer.ratio for layer in restored.layers if layer.main is not None]
    pairs = zip(ratios, snapshot.entries, strict=True)
    spoiled = replace(snapshot, entries=tuple(tuple(spoil(ratio, part) for part in pair) for ratio, pair in pairs))
    caches = model.restore(spoiled, tokens, LENGTHS, capacity=CAPACITY, image=image), restored.copy()
    assert_same(*caches, model.config, LENGTHS, {"atol": 0})
    ends = [append(model, cache, tokens, LENGTHS, np.full(ROWS, 7)) for cache in caches]
    np.testing.assert_array_equal(ends[0][0], ends[1][0])
    assert_same(ends[0][1], ends[1][1], model.config, LENGTHS + 7, {"atol": 0})


def test_a_row_is_restored_alike_whatever_stands_beside_it(model, tokens, image, snapshot, restored):
    back = np.random.default_rng(5).permutation(ROWS)
    entries = tuple(tuple(part[back] for part in pair) for pair in snapshot.entries)
    shuffled = replace(snapshot, length=snapshot.length[back], entries=entries)
    spans = jax.tree.map(lambda part: part[back], image)
    cache = model.restore(shuffled, tokens[back], LENGTHS[back], capacity=CAPACITY, image=spans)
    assert_same(cache, restored.take(back), model.config, LENGTHS[back], {"atol": 1e-6})


def test_a_snapshot_of_exactly_the_prefix_restores_the_same(model, tokens, image, restored, with_images):
    again = model.restore(Snapshot.of(with_images[1]), tokens, LENGTHS, capacity=CAPACITY, image=image)
    assert_same(again, restored, model.config, LENGTHS)


def test_engram_looks_back_past_the_start_of_the_replay(model, tokens, image, snapshot, restored):
    place, past = np.arange(WIDTH), model.config.engram_max_ngram_size - 1
    other = (tokens - 6 + 1) % 282 + 6
    far, near = (np.where(place < START[:, None] - back, other, tokens) for back in (past, 0))
    cache = model.restore(snapshot, far, LENGTHS, capacity=CAPACITY, image=image)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(one, two)
    cache = model.restore(snapshot, near, LENGTHS, capacity=CAPACITY, image=image)
    window = lambda c: np.asarray(c.layers[-1].window)  # noqa: E731
    spans = np.asarray(image.mask)  # blocked by an image that ends where the replay starts
    blocked = np.array([spans[row, max(0, at - 1) : at + 1].any() for row, at in enumerate(START)])
    assert worst(window(cache), window(restored))[(LENGTHS > W) & ~blocked].min() > 1e-4


def test_a_restore_that_does_not_fit_is_refused(model, tokens, image, snapshot):
    def refused(message=r"^[^\n]+$", given=snapshot, ids=tokens, lengths=LENGTHS, capacity=CAPACITY):
        with pytest.raises(ValueError, match=message):
            model.restore(
                given, ids, lengths, capacity=capacity, image=image.part(0, ids.shape[1]) if len(ids) == ROWS else None
            )

    refused(lengths=np.full(ROWS, 46))  # the snapshot holds 45 tokens
    refused(lengths=np.where(LENGTHS == 7, 46, LENGTHS))
    refused(lengths=np.full(ROWS, WIDTH + 1))
    refused(lengths=LENGTHS - 2)
    refused(lengths=LENGTHS[:-1])
    refused(lengths=None)  # all 56 tokens
    refused(capacity=32)
    refused(ids=np.where(LENGTHS[:, None] == 9, 288, tokens))
    refused(ids=tokens[:-1], lengths=LENGTHS[:-1])
    zeros = np.zeros((ROWS, 22, 32), np.float32)
    refused(given=replace(snapshot, entries=snapshot.entries[:1]))
    refused(given=replace(snapshot, entries=((zeros, zeros), *snapshot.entries)))
    packed = init_cache(model.config, ROWS, CAPACITY, numerics_by_name("fast"))
    refused(given=Snapshot.of(replace(packed, length=jnp.full(ROWS, 45, jnp.int32))))
