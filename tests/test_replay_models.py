"""Bounded Replay as in `test_replay`, of other models: the bundled one, other stacks, long prompts, packed caches."""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import GOLDEN, random_model, small_config
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

from dsv41_jax import Model
from dsv41_jax.engine import chunks, images
from dsv41_jax.engine.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("few_short_compilations")


@pytest.mark.slow
def test_the_bundled_model_with_images_and_drafts():
    tiny, given = Model.from_pretrained("tiny", numerics="float32"), np.load(GOLDEN["tiny-full"] / "inputs.npz")
    cfg, window, n = tiny.config, tiny.config.sliding_window, np.array([39, 39, 1, 15, 16, 17, 37])
    rows = np.random.default_rng(0).integers(6, 288, (7, WIDTH)).astype(np.int32)
    rows[:2, :39] = given["d_ids"][:, :39]
    pictures = [images.preprocess(given[f"d_img{k}_rgb"], cfg) for k in range(3)]
    image = tiny.embed_images(rows, [pictures[:1], pictures[1:], *[[]] * 5])
    truncated = partial(oracle(cfg, tiny.numerics, 7, WIDTH, CAPACITY), tiny)
    start, eight = np.maximum(n - window, 0), range(cfg.num_hidden_layers)
    floor = floors(4, start, len(eight))

    def agree(cache, at, *, floor, **entries):
        """The cache, and what is drafted behind it, are those of the oracle."""
        expected, full = truncated(rows, at, floor, image, **entries)
        assert_same(cache, full, cfg, at)
        assert_history(tiny, cache, rows, at, np.asarray(image.mask))
        token = rows[np.arange(7), at]
        for one, two in zip(*(jax.tree.leaves(tiny.draft(token, c)) for c in (cache, full)), strict=True):
            np.testing.assert_allclose(one, two, **TOL)
        return behind(expected, at)

    prompts = [row[:length] for row, length in zip(rows, n, strict=True)]
    empty = tiny.init_cache(7, CAPACITY)
    logits, cache, _ = tiny.prefill(prompts, empty, image=image.part(0, 39), mode="replay")
    np.testing.assert_allclose(logits, agree(cache, n, floor=floor), **TOL)
    snapshot = Snapshot.of(cache)
    for at in range(1, 8):
        logits, cache = append(tiny, cache, rows, n + at - 1, np.ones(7, int))
        np.testing.assert_allclose(logits, agree(cache, n + at, floor=floor), **TOL)

    whole = tiny.prefill(prompts, tiny.init_cache(7, CAPACITY), image=image.part(0, 39))[0]
    assert worst(logits, whole)[n > window].min() > 1e-3

    held = np.array([30, 39, 1, 14, 16, 9, 37])
    floor = [np.maximum(held - window, 0)] * len(eight)
    for prefix in (held, np.minimum(held, [7, 21, 1, 1, 15, 17, 20])):
        floor, entries = [np.maximum(prefix - window, 0)] * len(eight), {"held": prefix, "given": snapshot.entries}
        cache = tiny.restore(snapshot, rows, prefix, capacity=CAPACITY, image=image)
        agree(cache, prefix, floor=floor, **entries)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [False, True])
def test_the_bundled_model_generates_behind_a_replay(draft):
    tiny = Model.from_pretrained("tiny", numerics="float32")
    cfg, n, new = tiny.config, np.array([1, 16, 17, 37]), 12
    rows = np.random.default_rng(2).integers(6, 288, (4, WIDTH)).astype(np.int32)
    made = tiny.generate([row[:k].tolist() for row, k in zip(rows, n, strict=True)], new, prefill="replay", draft=draft)
    for row, (k, ids) in enumerate(zip(n, made, strict=True)):
        rows[row, k : k + len(ids)] = ids
    start = np.maximum(n - cfg.sliding_window, 0)
    floor = floors(4, start, cfg.num_hidden_layers)
    expected, _ = oracle(cfg, tiny.numerics, 4, WIDTH, CAPACITY)(tiny, rows, np.full(4, WIDTH), floor)
    for row, (k, ids) in enumerate(zip(n, made, strict=True)):
        assert ids == expected[row, k - 1 : k - 1 + len(ids)].argmax(axis=-1).tolist()


@pytest.mark.slow
def test_prompts_of_several_of_the_librarys_own_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "BUCKETS", (1, 16, 128, 512))
    small = random_model(small_config())
    rows, n = np.random.default_rng(0).integers(6, 288, (2, 700)).astype(np.int32), np.array([661, 514])
    truncated = partial(oracle(small.config, small.numerics, 2, 700, 1024), small)
    prompts, start = [row[:k] for row, k in zip(rows, n, strict=True)], n - W
    logits, cache, _ = small.prefill(prompts, small.init_cache(2, 1024), mode="replay")
    snapshot = Snapshot.of(cache)
    floor = floors(3, start, 5)
    expected, full = truncated(rows, n, floor)
    np.testing.assert_allclose(logits, behind(expected, n), **TOL)
    assert_same(cache, full, small.config, n)
    for prefix in (n, np.array([600, 513]), np.array([9, 128])):
        entries, floor = {"held": prefix, "given": snapshot.entries}, [prefix - W] * 5
        cache = small.restore(snapshot, rows, prefix, capacity=1024)
        assert_same(cache, truncated(rows, prefix, floor, **entries)[1], small.config, prefix)
        more = np.array([30, 17])
        logits, cache = append(small, cache, rows, prefix, more)
        expected, full = truncated(rows, prefix + more, floor, **entries)
        np.testing.assert_allclose(logits, behind(expected, prefix + more), **TOL)
        assert_same(cache, full, small.config, prefix + more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {"kv_source_layer_ids": [1, 4], "candidate_source_layer_id": None, "compress_ratios": [0, 2, 2, 2, 1]},
        {"kv_source_layer_ids": [0], "index_source_layer_ids": [0, 3], "candidate_source_layer_id": 0,
         "compress_ratios": [2] * 5, "engram_layer_ids": [0]},
        {"compress_ratios": [0, 1, 1, 2, 2], "candidate_source_layer_id": 3},
        {"sliding_window": 1},
        {"sliding_window": 20},
    ],
    ids=["small", "no-engram", "cut-on-top", "cut-at-the-bottom", "cut-of-pairs", "window-1", "window-20"],
)  # fmt: skip
def test_other_stacks(change, monkeypatch):
    monkeypatch.setattr(chunks, "BUCKETS", (32,) if "sliding_window" in change else (16,))
    model = random_model(small_config(**change))
    cfg, tokens = model.config, np.random.default_rng(0).integers(6, 288, (ROWS, WIDTH)).astype(np.int32)
    cut, window = max(cfg.kv_source_layer_ids), cfg.sliding_window
    truncated = partial(oracle(cfg, model.numerics, ROWS, WIDTH, CAPACITY), model)
    start = np.maximum(LENGTHS - window, 0)
    prompts = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
    logits, cache, _ = model.prefill(prompts, model.init_cache(ROWS, CAPACITY), mode="replay")
    snapshot, floor = Snapshot.of(cache), floors(cut, start, 5)
    for at in range(4):
        expected, full = truncated(tokens, LENGTHS + at, floor)
        np.testing.assert_allclose(logits, behind(expected, LENGTHS + at), **TOL)
        assert_same(cache, full, cfg, LENGTHS + at)
        logits, cache = append(model, cache, tokens, LENGTHS + at, np.ones(ROWS, int))
    cache, entries = model.restore(snapshot, tokens, LENGTHS, capacity=CAPACITY), snapshot.entries
    for at in (0, 9):
        expected, full = truncated(tokens, LENGTHS + at, [start] * 5, held=LENGTHS, given=entries)
        assert_same(cache, full, cfg, LENGTHS + at)
        if not at:
            logits, cache = append(model, cache, tokens, LENGTHS, np.full(ROWS, 9))
    np.testing.assert_allclose(logits, behind(expected, LENGTHS + 9), **TOL)


@pytest.mark.slow
def test_packed_entries_are_taken_over_as_they_stand():
    model = random_model(small_config(), "fast")
    tokens = np.random.default_rng(0).integers(6, 288, (ROWS, WIDTH)).astype(np.int32)
    _, cache = append(model, model.init_cache(ROWS, CAPACITY), tokens, np.zeros(ROWS, int), np.full(ROWS, 45))
    whole, snapshot = cache.copy(), Snapshot.of(cache)
    cache = model.restore(snapshot, tokens, LENGTHS, capacity=CAPACITY)
    assert_entries_are_the_snapshots(cache, snapshot, LENGTHS)
    again = model.restore(snapshot, tokens, np.full(ROWS, 45), capacity=CAPACITY)
    for one, two in zip(again.layers, whole.layers, strict=True):
        if one.main is not None:
            np.testing.assert_array_equal(one.main, two.main)
            np.testing.assert_array_equal(one.index_keys, two.index_keys)
    logits, _ = append(model, cache, tokens, LENGTHS, np.full(ROWS, 2))
    assert np.isfinite(np.asarray(logits)).all()
