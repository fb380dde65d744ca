"""One layer's attention against a float64 loop over queries and heads, and what layers hand to each other."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config
from flax import nnx

from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.cache import LayerCache, Span
from dsv41_jax.nn.rope import layer_frequencies
from dsv41_jax.numerics import numerics_by_name

CFG = small_config()  # layers: window, full (ratio 2), reuse, full (ratio 1), reindex
W, H, N, T, S, C = CFG.sliding_window, CFG.head_dim, CFG.num_attention_heads, 24, 24, CFG.index_topk
CAPACITY = 48


@cache
def attention(layer):
    return random_model(CFG).params.layers[layer].attn


@cache
def compiled(layer, name="float32"):
    how = {"plan": CFG.layers[layer], "cfg": CFG, "numerics": numerics_by_name(name)}
    return jax.jit(lambda part, *arrays: part(*arrays, **how))


def span_of(start, count, tokens=T):
    return Span.after(jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32), tokens)


def empty(layer, batch=2, dtype=jnp.float32):
    ratio = CFG.layers[layer].ratio
    window = jnp.zeros((batch, W + CFG.spare, H), dtype)
    if not CFG.layers[layer].owns_kv:
        return LayerCache(window=window)
    main, index_keys = (jnp.zeros((batch, S, width), dtype) for width in (H, CFG.index_head_dim))
    rest = jnp.zeros((batch, ratio - 1 + CFG.spare if ratio > 1 else 0, H))
    return LayerCache(window=window, main=main, index_keys=index_keys, open_kv=rest, open_gate=rest, ratio=ratio)


def inputs(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def random_ids(seed, start=0, ratio=2):
    """Distinct visible entries for each query, ascending, -1 where there are fewer than C."""
    rng, ids = np.random.default_rng(seed), np.full((2, T, C), -1, np.int32)
    for row, t in np.ndindex(2, T):
        chosen = np.sort(rng.permutation(min((start + t + 1) // ratio, S))[:C])
        ids[row, t, : len(chosen)] = chosen
    return ids


def dense64(linear):
    """A quantized weight's values: one scale for every block of 32 by 32."""
    scale = np.asarray(linear.scale[...]).astype(np.float64)
    blocks = np.repeat(np.repeat(scale, 32, axis=0), 32, axis=1)
    weight = np.asarray(linear.weight[...]).astype(np.float64)
    return weight * blocks[: weight.shape[0], : weight.shape[1]]


def norm64(x, norm):
    return (
        x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + CFG.rms_norm_eps) * np.asarray(norm.weight[...], np.float64)
    )


def turned64(x, positions, layer, back=False):
    """x [P, ..., H] with adjacent pairs of the last R channels turned by their positions' angles."""
    angles = np.asarray(positions)[:, None] * layer_frequencies(CFG, CFG.layers[layer].ratio).astype(np.float64)
    turn = np.exp((-1j if back else 1j) * angles).reshape(len(x), *(1,) * (x.ndim - 2), -1)
    rotary, x = CFG.qk_rope_head_dim, x.copy()
    pairs = (x[..., -rotary::2] + 1j * x[..., -rotary + 1 :: 2]) * turn
    x[..., -rotary::2], x[..., -rotary + 1 :: 2] = pairs.real, pairs.imag
    return x


def attend64(layer, part, x, main=None, selected=None, first=0):
    """Outputs [P, D] of one row whose tokens x [P, D] stand at first, first + 1, ...; nothing stands before them."""
    positions = first + np.arange(len(x))
    x = x.astype(np.float64)
    q = (norm64(x @ dense64(part.wq_a).T, part.q_norm) @ dense64(part.wq_b).T).reshape(len(x), N, H)
    q = turned64(q, positions, layer)
    kv = turned64(norm64(x @ dense64(part.wkv).T, part.kv_norm), positions, layer)
    sinks, o = np.asarray(part.attn_sink[...], np.float64), np.zeros((len(x), N, H))
    for t in range(len(x)):
        rows = kv[max(0, t - W + 1) : t + 1]
        if selected is not None:
            rows = np.concatenate([rows, main[selected[t][selected[t] >= 0]].astype(np.float64)])
        for n in range(N):
            e = np.exp(rows @ q[t, n] * H**-0.5)
            o[t, n] = e @ rows / (e.sum() + np.exp(sinks[n]))
    o = turned64(o, positions, layer, back=True).reshape(len(x), CFG.o_groups, -1)
    blocks = dense64(part.wo_a).reshape(CFG.o_groups, CFG.o_lora_rank, -1)
    low = np.einsum("pgi,gri->pgr", o, blocks).reshape(len(x), -1)
    return low @ dense64(part.wo_b).T


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_a_reuse_layer_attends_to_its_window_and_the_selected_entries():  # V3's YaRN scale; V4's norm of heads
    x, main = inputs(0, (2, T, 32), (2, S, H))
    ids = random_ids(0)
    published = Shared(main=jnp.asarray(main), selected=jnp.asarray(ids))
    y, *_ = compiled(2)(attention(2), jnp.asarray(x), published, empty(2), span_of([0, 0], [T, T]))
    for row in range(2):
        close(y[row], attend64(2, attention(2), x[row], main[row], ids[row]))


@pytest.mark.parametrize("cut", [1, 5, 8, 13])
def test_a_second_chunk_reads_the_ring_of_the_first(cut):  # a ring of W rows loses keys when a call writes first
    x, main = inputs(cut, (2, T, 32), (2, S, H))
    ids = random_ids(cut)
    state, pieces = empty(2), []
    for start, end in ((0, cut), (cut, T)):
        part, chosen = np.zeros_like(x), np.full_like(ids, -1)
        part[:, : end - start], chosen[:, : end - start] = x[:, start:end], ids[:, start:end]
        published = Shared(main=jnp.asarray(main), selected=jnp.asarray(chosen))
        span = span_of([start] * 2, [end - start] * 2)
        y, _, state, _ = compiled(2)(attention(2), jnp.asarray(part), published, state, span)
        pieces.append(np.asarray(y)[:, : end - start])
    for row in range(2):
        close(np.concatenate(pieces, axis=1)[row], attend64(2, attention(2), x[row], main[row], ids[row]))


@pytest.mark.parametrize("layer", [1, 3])
def test_a_full_layer_attends_to_the_entries_it_compresses_itself(layer):
    (x,) = inputs(layer, (2, T, 32))
    given = jnp.asarray(x), Shared(), empty(layer), span_of([0, 0], [T, T])
    y, published, state, taps = compiled(layer)(attention(layer), *given)
    np.testing.assert_array_equal(published.main, state.main)
    np.testing.assert_array_equal(published.index_keys, state.index_keys)
    np.testing.assert_array_equal(published.selected, taps["index_topk"])
    for row in range(2):
        close(
            y[row],
            attend64(layer, attention(layer), x[row], np.asarray(state.main[row]), np.asarray(published.selected[row])),
        )


def test_a_window_layer_ignores_what_stands_published():
    (x,) = inputs(1, (2, T, 32))
    poison = Shared(jnp.full((2, S, H), jnp.nan), jnp.full((2, S, 32), jnp.nan), jnp.zeros((2, T, C), jnp.int32))
    for published in (Shared(), poison):
        y, after, *_ = compiled(0)(attention(0), jnp.asarray(x), published, empty(0), span_of([0, 0], [T, T]))
        assert after.selected is None or (after.selected == published.selected).all()
        for row in range(2):
            close(y[row], attend64(0, attention(0), x[row]))


def test_a_reuse_layer_follows_the_selection_of_the_layer_below():  # ids read from a buffer nobody filled
    x, other = inputs(2, (2, T, 32), (2, T, 32))
    source, perturbed = attention(1), nnx.clone(attention(1))
    weight = perturbed.indexer.wq_b.weight[...]
    perturbed.indexer.wq_b.weight[...] = (-weight.astype(jnp.float32)).astype(weight.dtype)
    seen = []
    for part in (source, perturbed, source):
        _, published, *_ = compiled(1)(part, jnp.asarray(x), Shared(), empty(1), span_of([0, 0], [T, T]))
        y, after, *_ = compiled(2)(attention(2), jnp.asarray(other), published, empty(2), span_of([0, 0], [T, T]))
        np.testing.assert_array_equal(after.selected, published.selected)
        for row in range(2):
            ids = np.asarray(published.selected[row])
            close(y[row], attend64(2, attention(2), other[row], np.asarray(published.main[row]), ids))
        seen.append((np.asarray(published.selected), np.asarray(y)))
    assert (seen[0][0] != seen[1][0]).any()
    assert np.abs(seen[0][1] - seen[1][1]).max() > 1e-3
    np.testing.assert_array_equal(seen[0][1], seen[2][1])


def test_the_query_heads_are_not_normalised():  # V4 had a norm for each head, V4.1 has none
    x, main = inputs(3, (2, T, 32), (2, S, H))
    ids, scaled = random_ids(3), nnx.clone(attention(2))
    scale = scaled.wq_b.scale[...].astype(jnp.float32).at[: H // 32].multiply(4.0)
    scaled.wq_b.scale[...] = scale.astype(jnp.float8_e8m0fnu)
    published = Shared(main=jnp.asarray(main), selected=jnp.asarray(ids))
    y = [
        compiled(2)(p, jnp.asarray(x), published, empty(2), span_of([0, 0], [T, T]))[0] for p in (attention(2), scaled)
    ]
    close(y[1][0], attend64(2, scaled, x[0], main[0], ids[0]))
    assert np.abs(np.asarray(y[0] - y[1])).max() > 1e-2


def test_positions_shift_without_changing_the_output():  # an output left at the query's angle
    (x,) = inputs(4, (2, T, 32))
    starts, given = ([0, 0], [1000, 1003]), (jnp.asarray(x), Shared(), empty(0))
    y = [compiled(0)(attention(0), *given, span_of(start, [T, T]))[0] for start in starts]
    full = np.asarray(y[0])[:, W - 1 :]  # the queries whose whole window lies in this call
    np.testing.assert_allclose(np.asarray(y[1])[:, W - 1 :], full, atol=1e-3 * np.abs(full).max())


def test_a_lone_key_gives_its_unrotated_value():  # key and value are one row, so values are rotated
    (x,) = inputs(5, (2, T, 32))
    part = nnx.clone(attention(0))
    part.attn_sink[...] = jnp.full(N, -jnp.inf)
    y, *_ = compiled(0)(part, jnp.asarray(x), Shared(), empty(0), span_of([0, 0], [1, 1]))
    value = norm64(x[:, 0].astype(np.float64) @ dense64(part.wkv).T, part.kv_norm)
    grouped = np.tile(value, (1, N)).reshape(2, CFG.o_groups, -1)
    low = np.einsum("bgi,gri->bgr", grouped, dense64(part.wo_a).reshape(CFG.o_groups, CFG.o_lora_rank, -1))
    close(y[:, 0], low.reshape(2, -1) @ dense64(part.wo_b).T)


def test_the_sink_takes_probability_and_adds_no_value():
    (x,) = inputs(6, (1, T, 32))
    x = np.repeat(x, 2, axis=0)
    part = nnx.clone(attention(0))
    tokens = x[0].astype(np.float64)
    q = norm64(tokens @ dense64(part.wq_a).T, part.q_norm) @ dense64(part.wq_b).T
    kv = norm64(tokens @ dense64(part.wkv).T, part.kv_norm)
    equal = q[0].reshape(N, H) @ kv[0] * H**-0.5  # the first token's only score; its rotation is the identity
    outputs = []
    for sink in (np.full(N, -np.inf), equal, equal + np.log(3), np.full(N, 80.0)):
        part.attn_sink[...] = jnp.asarray(sink, jnp.float32)
        y, *_ = compiled(0)(part, jnp.asarray(x), Shared(), empty(0), span_of([0, 0], [T, T]))
        assert np.isfinite(np.asarray(y)).all()
        outputs.append(np.asarray(y)[0, 0])
    np.testing.assert_allclose(outputs[1], outputs[0] / 2, atol=1e-5 * np.abs(outputs[0]).max())
    np.testing.assert_allclose(outputs[2], outputs[0] / 4, atol=1e-5 * np.abs(outputs[0]).max())
    assert np.abs(outputs[3]).max() < 1e-20


def test_compressed_entries_alone_carry_the_output():  # a mask of inverted sense hides the whole branch
    x, main = inputs(7, (2, T, 32), (2, S, H))
    ids, part = random_ids(7), nnx.clone(attention(2))
    part.wkv.weight[...] = jnp.zeros_like(
        part.wkv.weight[...]
    )  # window rows are 0: keys that score 0, values that add 0
    published = Shared(main=jnp.asarray(main), selected=jnp.asarray(ids))
    y, *_ = compiled(2)(part, jnp.asarray(x), published, empty(2), span_of([0, 0], [T, T]))
    assert (np.abs(np.asarray(y)[:, 9:]).max(axis=-1) > 1e-2).all()
    assert not np.asarray(y)[:, 0].any()
    close(y[1], attend64(2, part, x[1], main[1], ids[1]))


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_padding_of_nan_reaches_no_live_token(layer):  # 0 * NaN: unread rows need more than zero weight
    x, main = inputs(8, (2, T, 32), (2, S, H))
    ids = random_ids(8)
    published = Shared(main=jnp.asarray(main), selected=jnp.asarray(ids))
    poisoned = x.copy()
    poisoned[0, 17:] = poisoned[1, 3:] = np.nan
    plain, _, kept, _ = compiled(layer)(
        attention(layer), jnp.asarray(x), published, empty(layer), span_of([0, 0], [17, 3])
    )
    y, _, state, _ = compiled(layer)(
        attention(layer), jnp.asarray(poisoned), published, empty(layer), span_of([0, 0], [17, 3])
    )
    np.testing.assert_array_equal(y[0, :17], plain[0, :17])
    np.testing.assert_array_equal(y[1, :3], plain[1, :3])
    for leaf, clean in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(leaf, clean)


def test_every_numerics_attends_to_as_many_entries():  # a cache format that also turns off the selection
    layer = 1
    (x,) = inputs(9, (2, T, 32))
    ratio, outputs = CFG.layers[layer].ratio, {}
    for name in ("float32", "cachequant", "reference"):
        dtype = numerics_by_name(name).dtype
        state = empty(layer, dtype=dtype)
        y, _, _, taps = compiled(layer, name)(
            attention(layer), jnp.asarray(x, dtype), Shared(), state, span_of([0, 0], [T, T])
        )
        attended = (np.asarray(taps["index_topk"]) >= 0).sum(axis=-1)
        assert attended.tolist() == [[min((t + 1) // ratio, C) for t in range(T)]] * 2
        outputs[name] = np.asarray(y.astype(jnp.float32))
    early = slice(0, C * ratio)  # every entry is selected: only rounding differs, by E2M1's 1 / 4 of a value at most
    for name in ("cachequant", "reference"):
        error = np.linalg.norm(outputs[name][:, early] - outputs["float32"][:, early], axis=-1)
        assert (error < 0.25 * np.linalg.norm(outputs["float32"][:, early], axis=-1)).all()


def test_teacher_forced_decode_equals_prefill_on_forty_tokens(small):  # breaks where the window's ring wraps
    tokens = np.random.default_rng(10).integers(0, 288, (2, 40))
    whole, _, _ = small.step(tokens, small.init_cache(2, CAPACITY))
    state, pieces = small.init_cache(2, CAPACITY), []
    for t in range(40):
        logits, state, _ = small.step(tokens[:, t : t + 1], state)
        pieces.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-5)


@pytest.mark.parametrize("length", [20, 13])
def test_both_continuations_of_a_fork_equal_fresh_runs(small, length):  # the windows belong to each fork alone
    rng = np.random.default_rng(length)
    prefix = rng.integers(0, 288, (2, length))
    _, state, _ = small.step(prefix, small.init_cache(2, CAPACITY))
    forks = [state.copy(), state]
    for fork in forks:
        tail = rng.integers(0, 288, (2, 16))
        got, _, _ = small.step(tail, fork)
        fresh, _, _ = small.step(np.concatenate([prefix, tail], axis=1), small.init_cache(2, CAPACITY))
        np.testing.assert_allclose(got, np.asarray(fresh)[:, length:], atol=1e-5)
