"""Bounded Replay, in prefill and behind a restored prefix, against the forward pass of `truncated` (report 1.10)."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, random_model, small_config
from truncated import TOL, append, assert_history, assert_same, behind, oracle, wide, worst

from dsv41_jax import Config, Model, generate, replay
from dsv41_jax import vision as vi
from dsv41_jax.cache import init_cache
from dsv41_jax.quant import numerics
from dsv41_jax.vision import ImageInput

# One model with everything but a vision tower that runs: a row of the batch for every length 1 .. 40.

W, ROWS, WIDTH, CAPACITY, CUT = 8, 40, 56, 128, 2
LENGTHS = np.arange(1, ROWS + 1)
START = np.maximum(LENGTHS - W, 0)


@pytest.fixture(scope="module", autouse=True)
def few_short_compilations():
    """Calls of 16 tokens only: a prompt of 40 is three chunks, and every test shares the compiled programs."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all that this file does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "BUCKETS", (16,))
        yield
    jax.config.update("jax_disable_most_optimizations", False)


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


def floors(cut, start):
    """Queries of layers `cut` and above see nothing before `start`."""
    return [start if layer >= cut else np.zeros_like(start) for layer in range(4)]


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
    return model.prefill(prompts, model.init_cache(ROWS, CAPACITY), image=padded, mode="replay")


@pytest.fixture(scope="module")
def prefilled(model, tokens):
    """(logits, cache) of decoder replay on a batch of prompts of every length."""
    prompts = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
    return model.prefill(prompts, model.init_cache(ROWS, CAPACITY), mode="replay")


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


def test_prefill_replay_is_exact_up_to_the_window_and_an_approximation_above(prefilled, plain):  # pitfall 130
    apart = worst(prefilled[0], behind(plain, LENGTHS))
    assert apart[LENGTHS <= W].max() < 2e-5
    assert apart[LENGTHS > W].min() > 1e-3


def test_the_windows_of_the_cut_layer_itself_are_truncated(truncated, tokens, prefilled):
    above, _ = truncated(tokens, LENGTHS, floors(CUT + 1, START))
    assert worst(prefilled[0], behind(above, LENGTHS))[LENGTHS > W].min() > 1e-3


def test_replay_leaves_the_entries_of_a_full_prefill(model, truncated, tokens, prefilled):
    _, full = truncated(tokens, LENGTHS, floors(4, START))
    mine, theirs = prefilled[1].copy().snapshot(), full.snapshot()
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
    logits, _ = model.prefill(prompts, model.init_cache(ROWS, CAPACITY))
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
    return model.prefill(list(tokens[:, :45]), cache, image=image.part(0, 45), mode="replay")[1].snapshot()


@pytest.fixture(scope="module")
def restored(model, tokens, snapshot, image):
    return model.restore(snapshot, tokens, LENGTHS, capacity=CAPACITY, image=image)


@pytest.fixture(scope="module")
def replayed(truncated, tokens, snapshot, image):
    """count -> the oracle of a replay behind each row's prefix."""
    start, held = floors(0, START), {"held": LENGTHS, "given": snapshot.entries}
    return lambda count: truncated(tokens, count, start, image, **held)


def assert_entries_are_the_snapshots(cache, snapshot, n):
    """Bit for bit; what stands behind a row's own prefix is dead."""
    kept = [layer for layer in cache.layers if layer.main is not None]
    for layer, stored in zip(kept, snapshot.entries, strict=True):
        for one, two in zip((layer.main, layer.index_keys), stored, strict=True):
            live = (np.arange(one.shape[1]) < np.asarray(n)[:, None] // layer.ratio)[..., None]
            np.testing.assert_array_equal(np.where(live, one, 0), np.where(live, wide(two, one.shape), 0))


def test_restore_rebuilds_windows_truncated_where_the_replay_begins(model, tokens, image, snapshot, restored, replayed):
    assert_entries_are_the_snapshots(restored, snapshot, LENGTHS)
    assert_same(restored, replayed(LENGTHS)[1], model.config, LENGTHS)
    assert_history(model, restored, tokens, LENGTHS, np.asarray(image.mask))


@pytest.mark.parametrize("cuts", [(12,), (1, 1, 1, 1, 8), (5, 3, 4), "uneven"])
def test_a_suffix_in_any_chunks_equals_the_truncated_forward(
    model, tokens, image, restored, replayed, cuts
):  # pitfalls 31, 33
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
    again = model.restore(with_images[1].copy().snapshot(), tokens, LENGTHS, capacity=CAPACITY, image=image)
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
    packed = init_cache(model.config, ROWS, CAPACITY, numerics("fast"))
    refused(given=replace(packed, length=jnp.full(ROWS, 45, jnp.int32)).snapshot())


# Longer: the bundled model, the library's own chunks, other stacks, packed caches.


@pytest.mark.slow
def test_the_bundled_model_with_images_and_drafts():
    tiny, given = Model.from_pretrained("tiny", numerics="float32"), np.load(GOLDEN["tiny-full"] / "inputs.npz")
    cfg, window, n = tiny.config, tiny.config.sliding_window, np.array([39, 39, 1, 15, 16, 17, 37])
    rows = np.random.default_rng(0).integers(6, 288, (7, WIDTH)).astype(np.int32)
    rows[:2, :39] = given["d_ids"][:, :39]
    pictures = [vi.preprocess(given[f"d_img{k}_rgb"], cfg) for k in range(3)]
    image = tiny.embed_images(rows, [pictures[:1], pictures[1:], *[[]] * 5])
    truncated = partial(oracle(cfg, tiny.numerics, 7, WIDTH, CAPACITY), tiny)
    start, eight = np.maximum(n - window, 0), range(cfg.num_hidden_layers)
    floor = [start if layer >= 4 else 0 * start for layer in eight]

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
    logits, cache = tiny.prefill(prompts, empty, image=image.part(0, 39), mode="replay")
    np.testing.assert_allclose(logits, agree(cache, n, floor=floor), **TOL)
    snapshot = cache.snapshot()
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
    floor = [start if layer >= 4 else 0 * start for layer in range(cfg.num_hidden_layers)]
    expected, _ = oracle(cfg, tiny.numerics, 4, WIDTH, CAPACITY)(tiny, rows, np.full(4, WIDTH), floor)
    for row, (k, ids) in enumerate(zip(n, made, strict=True)):
        assert ids == expected[row, k - 1 : k - 1 + len(ids)].argmax(axis=-1).tolist()


@pytest.mark.slow
def test_prompts_of_several_of_the_librarys_own_chunks(monkeypatch):
    monkeypatch.setattr(generate, "BUCKETS", (1, 16, 128, 512))
    small = random_model(small_config())
    rows, n = np.random.default_rng(0).integers(6, 288, (2, 700)).astype(np.int32), np.array([661, 514])
    truncated = partial(oracle(small.config, small.numerics, 2, 700, 1024), small)
    prompts, start = [row[:k] for row, k in zip(rows, n, strict=True)], n - W
    logits, cache = small.prefill(prompts, small.init_cache(2, 1024), mode="replay")
    snapshot = cache.snapshot()
    floor = [start if layer >= 3 else 0 * start for layer in range(5)]
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
    monkeypatch.setattr(generate, "BUCKETS", (32,) if "sliding_window" in change else (16,))
    model = random_model(small_config(**change))
    cfg, tokens = model.config, np.random.default_rng(0).integers(6, 288, (ROWS, WIDTH)).astype(np.int32)
    cut, window = max(cfg.kv_source_layer_ids), cfg.sliding_window
    truncated = partial(oracle(cfg, model.numerics, ROWS, WIDTH, CAPACITY), model)
    start = np.maximum(LENGTHS - window, 0)
    prompts = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
    logits, cache = model.prefill(prompts, model.init_cache(ROWS, CAPACITY), mode="replay")
    snapshot, floor = cache.snapshot(), [start if layer >= cut else 0 * start for layer in range(5)]
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
def test_packed_entries_are_taken_over_as_they_stand(tokens):
    model = random_model(small_config(), "fast")
    _, cache = append(model, model.init_cache(ROWS, CAPACITY), tokens, np.zeros(ROWS, int), np.full(ROWS, 45))
    whole, snapshot = cache.copy(), cache.snapshot()
    cache = model.restore(snapshot, tokens, LENGTHS, capacity=CAPACITY)
    assert_entries_are_the_snapshots(cache, snapshot, LENGTHS)
    again = model.restore(snapshot, tokens, np.full(ROWS, 45), capacity=CAPACITY)
    for one, two in zip(again.layers, whole.layers, strict=True):
        if one.main is not None:
            np.testing.assert_array_equal(one.main, two.main)
            np.testing.assert_array_equal(one.index_keys, two.index_keys)
    logits, _ = append(model, cache, tokens, LENGTHS, np.full(ROWS, 2))
    assert np.isfinite(np.asarray(logits)).all()
