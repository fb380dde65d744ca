"""The compressor against a float64 loop over groups, for any chunking and any mix of row lengths."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax.nn.cache import LayerCache, Span
from dsv41_jax.nn.compressor import group_positions, pool
from dsv41_jax.nn.rope import layer_frequencies
from dsv41_jax.numerics import numerics_by_name

NUM = numerics_by_name("float32")
CFG = small_config()
D, H, J = CFG.hidden_size, CFG.head_dim, CFG.index_head_dim


@cache
def attention(layer):
    """A Full layer's attention; layer 1 has ratio 2, layer 3 ratio 1."""
    return random_model(CFG).params.layers[layer].attn


def ratio_of(layer):
    return CFG.layers[layer].ratio


@cache
def compiled(layer):
    part, how = attention(layer).compressor, {"ratio": ratio_of(layer), "eps": CFG.rms_norm_eps, "numerics": NUM}
    return jax.jit(lambda x, state, span: part(x, state, span, **how))


@cache
def compiled_entries(layer):
    part, how = attention(layer), {"plan": CFG.layers[layer], "cfg": CFG, "numerics": NUM}
    return jax.jit(lambda x, state, span: part.compress(x, state, span, **how))


def empty(batch, ratio, entries=24):
    rest = jnp.zeros((batch, ratio - 1 + CFG.spare if ratio > 1 else 0, H))
    main, index_keys = jnp.zeros((batch, entries, H)), jnp.zeros((batch, entries, J))
    window = jnp.zeros((batch, CFG.sliding_window + CFG.spare, H))
    return LayerCache(window=window, main=main, index_keys=index_keys, open_kv=rest, open_gate=rest, ratio=ratio)


def span_of(start, count, tokens):
    return Span.after(jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32), tokens)


def latents64(layer, x):
    """Finished latents of one row, by a loop over groups in float64."""
    parts, ratio = attention(layer).compressor, ratio_of(layer)
    weight = lambda w: np.asarray(w.weight[...]).astype(np.float64)  # noqa: E731
    found = []
    for j in range(len(x) // ratio):
        group = np.asarray(x[j * ratio : (j + 1) * ratio], np.float64)
        kv = group @ weight(parts.wkv).T
        share = np.exp(group @ weight(parts.wgate).T) if ratio > 1 else np.ones_like(kv)
        mixed = (share / share.sum(axis=0) * kv).sum(axis=0)
        found.append(mixed / np.sqrt(np.mean(mixed**2) + CFG.rms_norm_eps) * weight(parts.norm))
    return np.array(found).reshape(-1, H)


def feed(layer, x, cuts, width=24):
    """Latents of every row after the calls that end at cuts[row][call], each call padded with 1e4 to `width`."""
    batch, ratio = len(x), ratio_of(layer)
    state, start = empty(batch, ratio), np.zeros(batch, int)
    found = [[] for _ in x]
    for end in np.array(cuts).T:
        padded = np.full((batch, width, D), 1e4, np.float32)  # loud padding, should it be pooled
        for row in range(batch):
            padded[row, : end[row] - start[row]] = x[row, start[row] : end[row]]
        latent, finished, state = compiled(layer)(jnp.asarray(padded), state, span_of(start, end - start, width))
        for row in range(batch):
            assert finished[row] == end[row] // ratio - start[row] // ratio
            found[row] += list(np.asarray(latent[row, : finished[row]]))
        start = end
    return [np.array(rows).reshape(-1, H) for rows in found], state


@pytest.mark.parametrize(
    "cuts",
    [
        [[24], [24]],
        [[13, 24], [12, 24]],  # an odd and an even boundary in one batch
        [[1, 2, 3, 4, 5, 24], [3, 3, 6, 7, 7, 23]],  # calls that are padding only for one row
        [[5, 10, 11, 24], [0, 1, 1, 2]],
    ],
)
@pytest.mark.parametrize("layer", [1, 3])
def test_any_chunking_equals_the_group_loop(layer, cuts):  # a group cut by a chunk's end
    x = np.random.default_rng(0).standard_normal((2, 24, D), np.float32)
    for row, found in enumerate(feed(layer, x, cuts)[0]):
        np.testing.assert_allclose(found, latents64(layer, x[row, : cuts[row][-1]]), atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_random_chunkings_of_unequal_rows_equal_the_group_loop(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 24, D), np.float32)
    cuts = np.sort(rng.integers(0, 25, (2, 6)), axis=1)
    for row, found in enumerate(feed(1, x, cuts)[0]):
        np.testing.assert_allclose(found, latents64(1, x[row, : cuts[row, -1]]), atol=2e-6)


@pytest.mark.parametrize("shards", [[13, 26], [7, 13, 20, 26]])
def test_odd_shards_of_a_sequence_equal_the_whole(shards):  # a shard's end in the middle of a group
    x = np.random.default_rng(1).standard_normal((2, 26, D), np.float32)
    for row, found in enumerate(feed(1, x, [shards, shards])[0]):
        np.testing.assert_allclose(found, latents64(1, x[row]), atol=2e-6)


@pytest.mark.parametrize("length", range(6))
def test_lengths_around_the_ratio_give_floor_groups_and_no_nan(length):  # a first group that comes out NaN or zero
    x = np.random.default_rng(2).standard_normal((2, 6, D), np.float32)
    found, state = feed(1, x, [[length], [length]])
    assert found[0].shape == (length // 2, H)
    assert all(np.isfinite(rows).all() for rows in found)
    assert np.isfinite(np.asarray(state.open_kv)).all()
    assert np.isfinite(np.asarray(state.open_gate)).all()


@pytest.mark.parametrize(("start", "count"), [([0, 0], [5, 4]), ([5, 5], [2, 4]), ([5, 4], [0, 1]), ([4, 5], [1, 0])])
def test_the_open_token_waits_in_float32(start, count):
    x = np.random.default_rng(3).standard_normal((2, 9, D), np.float32)
    parts = attention(1).compressor
    _, state = feed(1, x, [[s, s + c] for s, c in zip(start, count, strict=True)])
    for row in range(2):
        end = start[row] + count[row]
        for kept, weight in ((state.open_kv, parts.wkv), (state.open_gate, parts.wgate)):
            assert kept.dtype == jnp.float32
            expected = np.asarray(weight.weight[...]).astype(np.float64) @ x[row, end - 1].astype(np.float64)
            if end % 2:
                np.testing.assert_allclose(kept[row, (end - 1) % kept.shape[1]], expected, atol=2e-6)


def test_a_padded_row_equals_the_same_row_alone():  # left pads shift which tokens share a group
    x = np.random.default_rng(4).standard_normal((2, 24, D), np.float32)
    together, _ = feed(1, x, [[3], [17]])
    alone, _ = feed(1, x[1:], [[17]])
    np.testing.assert_array_equal(together[1], alone[0])
    np.testing.assert_allclose(together[0], latents64(1, x[0, :3]), atol=2e-6)


def test_padding_of_nan_reaches_no_finished_latent_and_no_waiting_row():  # masked gates still carry a NaN
    x = np.random.default_rng(5).standard_normal((2, 24, D), np.float32)
    x[0, 5:] = x[1, 4:] = np.nan
    latent, finished, state = compiled(1)(jnp.asarray(x), empty(2, 2), span_of([0, 0], [5, 4], 24))
    assert finished.tolist() == [2, 2]
    for row, live in ((0, 5), (1, 4)):
        np.testing.assert_allclose(latent[row, :2], latents64(1, x[row, :live]), atol=2e-6)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))


def test_a_group_of_ratio_one_is_its_token():  # it has no gate in the checkpoint
    assert attention(3).compressor.wgate is None
    x = np.random.default_rng(6).standard_normal((1, 24, D), np.float32)
    (found,), state = feed(3, x, [[7, 9, 24]])
    np.testing.assert_allclose(found, latents64(3, x[0]), atol=2e-6)
    assert state.open_kv.shape == (1, 0, H)


def test_the_gate_weighs_each_channel_on_its_own():
    kv = jnp.array([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    gate = jnp.log(jnp.array([[1.0, 3.0, 1e-30], [1.0, 1.0, 1.0]]))
    np.testing.assert_allclose(pool(kv, gate), [2.0, 1.5, 3.0], rtol=1e-6)


def test_groups_of_a_call_start_at_the_open_one():
    position, finished = group_positions(span_of([5, 4, 0], [2, 1, 0], 2), 2, 2)
    assert position[:, :2].tolist() == [[[4, 5], [6, 7]], [[4, 5], [6, 7]], [[0, 1], [2, 3]]]
    assert finished[:, :2].tolist() == [[True, False], [False, False], [False, False]]


def turned64(vector, position, layer):
    """vector with its last R channels rotated as adjacent pairs, by complex multiplication."""
    angles = position * layer_frequencies(CFG, ratio_of(layer)).astype(np.float64)
    rotary = 2 * len(angles)
    pairs = vector[-rotary::2] + 1j * vector[-rotary + 1 :: 2]
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([vector[:-rotary], np.stack([pairs.real, pairs.imag], axis=-1).ravel()])


@pytest.mark.parametrize("cuts", [[24], [5, 24], [1, 12, 24]])
@pytest.mark.parametrize("layer", [1, 3])
def test_entries_turn_by_the_position_of_their_groups_first_token(layer, cuts):  # chunks that count from zero
    token = np.random.default_rng(7).standard_normal((1, 1, D), np.float32)
    x = np.repeat(token, 24, axis=1)  # equal tokens: every latent is the same, so entries differ by rotation only
    ratio = ratio_of(layer)
    state, start = empty(1, ratio), 0
    for end in cuts:
        part = np.zeros((1, 24, D), np.float32)
        part[:, : end - start] = x[:, start:end]
        state, _ = compiled_entries(layer)(jnp.asarray(part), state, span_of([start], [end - start], 24))
        start = end
    latent = latents64(layer, x[0])[0]
    indexer = attention(layer).indexer
    key = np.asarray(indexer.wk.weight[...]).astype(np.float64) @ latent
    key = key / np.sqrt(np.mean(key**2)) * np.asarray(indexer.k_norm.weight[...]).astype(np.float64)
    for j in range(24 // ratio):
        np.testing.assert_allclose(state.main[0, j], turned64(latent, j * ratio, layer), atol=5e-6)
        np.testing.assert_allclose(state.index_keys[0, j], turned64(key, j * ratio, layer), atol=5e-6)
    assert np.abs(np.asarray(state.main[0, 1] - state.main[0, 0])).max() > 0.1


def test_groups_that_do_not_exist_are_not_stored():  # a launch over the bucket instead of the length
    x = np.random.default_rng(8).standard_normal((2, 128, D), np.float32)
    state = replace(empty(2, 2, entries=64), main=jnp.full((2, 64, H), 7.0), index_keys=jnp.full((2, 64, J), 7.0))
    state, _ = compiled_entries(1)(jnp.asarray(x), state, span_of([0, 0], [17, 1], 128))
    for row, stored in ((0, 8), (1, 0)):
        assert (np.asarray(state.main[row, stored:]) == 7.0).all()
        assert (np.asarray(state.index_keys[row, stored:]) == 7.0).all()
        assert (np.asarray(state.main[row, :stored]) != 7.0).all()


def test_a_later_chunk_keeps_the_entries_of_the_earlier_one():  # a continuation that starts a new store
    x = np.random.default_rng(9).standard_normal((2, 24, D), np.float32)
    half, _ = compiled_entries(1)(jnp.asarray(x), empty(2, 2), span_of([0, 0], [12, 11], 24))
    rest = np.concatenate([x[:, 12:], x[:, :12]], axis=1)
    whole, _ = compiled_entries(1)(jnp.asarray(rest), half, span_of([12, 11], [12, 0], 24))
    np.testing.assert_array_equal(whole.main[0, :6], half.main[0, :6])
    np.testing.assert_array_equal(whole.main[1], half.main[1])
    np.testing.assert_array_equal(whole.open_kv[1], half.open_kv[1])
    assert (np.asarray(whole.main[0, 6:12]) != 0).any(axis=-1).all()
