"""The cache against plain loops over positions: ring, entries, capacity, and what a snapshot holds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config

from dsv41_jax.nn.cache import Span, init_cache, push_ring, window_ids, write_entries
from dsv41_jax.numerics import numerics_by_name

CAPACITY = 48  # with batch 2, what every file uses: the compiled steps of `small` are shared
W = 8
RINGS = [W, W + 5]  # rows of a ring: no spare ones, and five


def span_of(start, count, tokens):
    return Span.after(jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32), tokens)


def ring_of(start, rows=W):
    """A ring after `start` tokens a row whose latent is the position + 1; slots never written hold 0."""
    ring = np.zeros((len(start), rows, 1), np.float32)
    for row, length in enumerate(start):
        for position in range(length):
            ring[row, position % rows] = position + 1
    return ring


def new_of(start, tokens):
    return np.stack([np.arange(s + 1, s + 1 + tokens, dtype=np.float32) for s in start])[..., None]


SPANS = [
    ([0, 0], [1, 1], 1),  # the first token
    ([0, 3], [5, 2], 5),
    ([10, 7], [5, 5], 5),  # five in flight behind a full ring
    ([7, 8], [1, 1], 1),  # the wrap itself
    ([4, 15], [0, 3], 4),  # a row without tokens
    ([5, 0], [8, 8], 8),
    ([3, 20], [11, 9], 12),  # T > W
    ([6, 1], [40, 37], 48),  # T >> W
    ([100, 0, 13], [1, 16, 0], 16),
]


def test_span_positions_continue_each_rows_own_length():
    span = span_of([0, 5, 12], [3, 1, 0], 4)
    assert span.positions.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [12, 13, 14, 15]]
    assert span.end.tolist() == [3, 6, 12]


@pytest.mark.parametrize(("start", "count", "tokens"), SPANS)
@pytest.mark.parametrize("rows", RINGS)
def test_window_ids_equal_a_loop_over_positions(start, count, tokens, rows):
    ids = np.asarray(window_ids(span_of(start, count, tokens), W, rows))
    for row, first in enumerate(start):
        for t in range(count[row]):
            expected = []
            for position in range(first + t - W + 1, first + t + 1):
                inside = rows + position - first if position >= first else position % rows
                expected.append(inside if position >= 0 else -1)
            assert ids[row, t].tolist() == expected


@pytest.mark.parametrize(("start", "count", "tokens"), SPANS)
@pytest.mark.parametrize("rows", RINGS)
def test_every_query_sees_exactly_its_last_w_positions(start, count, tokens, rows):  # writes that overtake reads
    held = np.concatenate([ring_of(start, rows), new_of(start, tokens)], axis=1)[..., 0]
    ids = np.asarray(window_ids(span_of(start, count, tokens), W, rows))
    for row, first in enumerate(start):
        for t in range(count[row]):
            live = ids[row, t][ids[row, t] >= 0]
            seen = (held[row, live] - 1).astype(int).tolist()
            assert seen == list(range(max(0, first + t - W + 1), first + t + 1))


@pytest.mark.parametrize(("start", "count", "tokens"), SPANS)
@pytest.mark.parametrize("rows", RINGS)
def test_push_ring_leaves_the_newest_position_in_each_slot(start, count, tokens, rows):
    before, new = jnp.asarray(ring_of(start, rows)), jnp.asarray(new_of(start, tokens))
    ring = push_ring(before, new, span_of(start, count, tokens))
    np.testing.assert_array_equal(ring, ring_of(np.add(start, count), rows))


@pytest.mark.parametrize("seed", range(4))
def test_pushing_in_chunks_equals_pushing_at_once(seed):
    rng = np.random.default_rng(seed)
    ring, at = jnp.zeros((3, W, 1)), np.zeros(3, np.int32)
    for _ in range(6):
        count = rng.integers(0, 20, 3)
        ring = push_ring(ring, jnp.asarray(new_of(at, 20)), span_of(at, count, 20))
        at = at + count
        np.testing.assert_array_equal(ring, ring_of(at))


def test_push_ring_never_stores_padding():  # pads would stand in the window until it wraps
    new = new_of([9, 2], 16)
    new[0, 3:] = new[1, 1:] = np.nan
    ring = push_ring(jnp.asarray(ring_of([9, 2])), jnp.asarray(new), span_of([9, 2], [3, 1], 16))
    np.testing.assert_array_equal(ring, ring_of([12, 3]))


@pytest.mark.parametrize("case", ["prefill_w16_s37", "prefill_w16_s9"])
def test_window_ids_of_a_prefill_are_the_released_ones(units, case):
    released = units[f"window_idx/{case}"][0]
    ids = np.asarray(window_ids(span_of([0], [len(released)], len(released)), 16, 16))[0]
    for mine, theirs in zip(ids, released, strict=True):
        assert [i - 16 for i in mine if i >= 0] == [i for i in theirs if i >= 0]


@pytest.mark.parametrize("position", [3, 15, 16, 37])
def test_window_ids_of_a_decode_step_are_the_released_ring_slots(units, position):
    released = units[f"window_idx/decode_w16_p{position}"][0, 0]
    ids = np.asarray(window_ids(span_of([position], [1], 1), 16, 16))[0, 0]
    slots = np.where(ids == 16, position % 16, ids)  # the released program writes before it reads
    assert slots.tolist() == released.tolist()


@pytest.mark.parametrize(
    ("first", "count"),
    [([0, 0], [3, 5]), ([2, 9], [0, 1]), ([11, 7], [1, 5]), ([10, 12], [5, 5]), ([11, 40], [3, 3]), ([0, 0], [0, 0])],
)
def test_write_entries_equals_a_loop_and_drops_what_does_not_fit(first, count):  # else the slice shifts back silently
    rng = np.random.default_rng(0)
    store, new = rng.standard_normal((2, 12, 3), np.float32), rng.standard_normal((2, 5, 3), np.float32)
    expected = store.copy()
    for row in range(2):
        for k in range(count[row]):
            if first[row] + k < 12:
                expected[row, first[row] + k] = new[row, k]
    got = write_entries(*map(jnp.asarray, (store, new)), jnp.asarray(first, jnp.int32), jnp.asarray(count, jnp.int32))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("seed", range(5))
def test_written_slots_are_unique(seed):  # which of two writes to one slot wins is unspecified
    rng = np.random.default_rng(seed)
    first, count = rng.integers(0, 14, 4).astype(np.int32), rng.integers(0, 7, 4).astype(np.int32)
    stored = np.asarray(
        write_entries(jnp.zeros((4, 12, 1)), jnp.ones((4, 6, 1)), jnp.asarray(first), jnp.asarray(count))
    )
    assert stored.sum(axis=(1, 2)).tolist() == np.clip(12 - first, 0, count).tolist()


def test_write_entries_keeps_the_stores_integer_bytes():
    store = jnp.full((1, 4, 2), 7, jnp.uint8)
    got = write_entries(
        store, jnp.full((1, 2, 2), 250, jnp.uint8), jnp.array([1], jnp.int32), jnp.array([1], jnp.int32)
    )
    assert got.dtype == jnp.uint8
    assert got[0, :, 0].tolist() == [7, 250, 7, 7]


def test_a_cache_lists_every_state(small):  # snapshots lose the open group and the history
    cache = small.init_cache(2, CAPACITY)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(cache)}
    spare = small.config.spare
    expected = {".length": (2,), ".history": (2, 3 + spare)}
    expected |= {f".layers[{i}].window": (2, W + spare, 32) for i in range(5)}
    for layer, ratio, waiting in ((1, 2, 1 + spare), (3, 1, 0)):  # the Full layers
        expected |= {f".layers[{layer}].{name}": (2, CAPACITY // ratio, 32) for name in ("main", "index_keys")}
        expected |= {f".layers[{layer}].{name}": (2, waiting, 32) for name in ("open_kv", "open_gate")}
    assert {name: leaf.shape for name, leaf in found.items()} == expected
    assert (np.asarray(found[".history"]) == -1).all()  # none, not token 0
    assert found[".length"].tolist() == [0, 0]


@pytest.mark.parametrize("length", [13, 20])
def test_a_snapshot_of_its_leaves_continues_like_the_original(small, length):  # at odd lengths a group is open
    tokens = np.random.default_rng(length).integers(0, 288, (2, length + 6))
    _, cache, _ = small.step(tokens[:, :length], small.init_cache(2, CAPACITY))
    leaves, structure = jax.tree.flatten(cache)
    saved = [np.array(leaf) for leaf in leaves]
    straight = []
    for t in range(6):
        logits, cache, _ = small.step(tokens[:, length + t : length + t + 1], cache)
        straight.append(np.asarray(logits))
    restored = structure.unflatten([jnp.asarray(leaf) for leaf in saved])
    for t in range(6):
        logits, restored, _ = small.step(tokens[:, length + t : length + t + 1], restored)
        np.testing.assert_array_equal(logits, straight[t])


def test_no_two_leaves_share_a_buffer(small):  # one buffer donated twice fails or hangs
    for cache in (small.init_cache(2, CAPACITY), small.init_cache(2, CAPACITY).copy()):
        leaves = [leaf for leaf in jax.tree.leaves(cache) if leaf.size]
        places = [leaf.ctypes.data if isinstance(leaf, np.ndarray) else leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len(set(places)) == len(leaves)


def test_a_copy_survives_the_step_that_consumes_the_original(small):  # donated buffers are gone
    cache = small.init_cache(2, CAPACITY)
    kept = cache.copy()
    tokens = np.array([[5], [6]])
    first, _, _ = small.step(tokens, cache)
    again, _, _ = small.step(tokens, kept)
    np.testing.assert_array_equal(first, again)


def test_a_consumed_cache_raises_and_says_so(small):  # JAX alone reports a deleted array, later
    cache = small.init_cache(2, CAPACITY)
    small.step(np.array([[5], [6]]), cache)
    with pytest.raises(ValueError, match=r"^cache: was consumed"):
        small.step(np.array([[5], [6]]), cache)


def test_seventeen_tokens_in_a_bucket_of_128_store_eight_groups(small):  # groups of padding stored as entries
    cache = small.init_cache(2, CAPACITY)
    layers = [
        layer
        if layer.main is None
        else replace(layer, main=jnp.full_like(layer.main, 7.0), index_keys=jnp.full_like(layer.index_keys, 7.0))
        for layer in cache.layers
    ]
    tokens = np.random.default_rng(4).integers(0, 288, (2, 17))
    _, cache, _ = small.step(tokens, replace(cache, layers=tuple(layers)))
    for layer, stored in ((1, 8), (3, 17)):
        for entries in (np.asarray(cache.layers[layer].main), np.asarray(cache.layers[layer].index_keys)):
            assert (entries[:, stored:] == 7.0).all()
            assert (entries[:, :stored] != 7.0).any(axis=-1).all()


def test_a_step_past_the_capacity_raises_and_changes_nothing(small):  # dynamic_update_slice would shift back
    tokens = np.random.default_rng(5).integers(0, 288, (2, CAPACITY))
    _, cache, _ = small.step(tokens[:, : CAPACITY - 1], small.init_cache(2, CAPACITY))
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    with pytest.raises(ValueError, match=rf"row 0 holds {CAPACITY - 1} tokens, 3 more exceed capacity {CAPACITY}"):
        small.step(np.zeros((2, 3), int), cache)
    with pytest.raises(ValueError, match=f"row 1 holds {CAPACITY - 1} tokens, 2 more"):
        small.step(np.zeros((2, 3), int), cache, lengths=np.array([1, 2]))
    with pytest.raises(ValueError, match=r"tokens: id 288 is outside 0\.\.287"):
        small.step(np.array([[288], [0]]), cache)
    for leaf, kept in zip(jax.tree.leaves(cache), before, strict=True):
        np.testing.assert_array_equal(leaf, kept)
    whole, _, _ = small.step(tokens, small.init_cache(2, CAPACITY))
    last, cache, _ = small.step(tokens[:, -1:], cache)  # the last place is usable
    np.testing.assert_allclose(last[:, 0], whole[:, -1], atol=1e-5)
    assert cache.length.tolist() == [CAPACITY] * 2


def test_padding_beyond_the_capacity_is_no_overflow(small):
    tokens = np.random.default_rng(6).integers(0, 288, (2, CAPACITY))
    _, cache, _ = small.step(tokens, small.init_cache(2, CAPACITY), lengths=np.array([CAPACITY, CAPACITY - 2]))
    main = np.asarray(cache.layers[3].main)
    logits, cache, _ = small.step(
        tokens[:, :16], cache, lengths=np.array([0, 2])
    )  # row 1 reaches the end, both are padded past it
    assert np.isfinite(np.asarray(logits)[1, :2]).all()
    np.testing.assert_array_equal(cache.layers[3].main[0], main[0])
    np.testing.assert_array_equal(cache.layers[3].main[1, : CAPACITY - 2], main[1, : CAPACITY - 2])


def test_take_gives_the_rows_in_the_order_asked(small):  # a beam's reorder must move the history too
    tokens = np.random.default_rng(7).integers(0, 288, (2, 5))
    _, cache, _ = small.step(tokens, small.init_cache(2, CAPACITY), lengths=np.array([5, 3]))
    taken = cache.take(jnp.array([1, 0, 1], jnp.int32))
    assert taken.length.tolist() == [3, 5, 3]
    for leaf, source in zip(jax.tree.leaves(taken), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(leaf, np.asarray(source)[[1, 0, 1]])


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 288, (2, 40))


@pytest.mark.parametrize("lengths", [(0, 0), (1, 2), (5, 8), (9, 16), (13, 24)])
def test_dead_cache_positions_reach_no_logit(small, tokens, lengths):  # what memory held before reads as keys
    lengths = np.array(lengths)
    cache = small.init_cache(2, CAPACITY)
    if lengths.any():
        _, cache, _ = small.step(tokens[:, : lengths.max()], cache, lengths=lengths)

    def poisoned(array, oldest):
        """NaN everywhere but in the slots of positions oldest .. length - 1."""
        rows = np.array(array)
        for row, length in enumerate(lengths):
            live = [p % rows.shape[1] for p in range(max(0, oldest(length)), length)] if rows.shape[1] else []
            rows[row, ~np.isin(np.arange(rows.shape[1]), live)] = np.nan
        return jnp.asarray(rows)

    layers = []
    for plan, layer in zip(small.config.layers, cache.layers, strict=True):
        layer = replace(layer, window=poisoned(layer.window, lambda n: n - W + 1))
        if plan.owns_kv:
            first = partial(lambda ratio, n: n - n % ratio, plan.ratio)  # of the open group
            waiting = {name: poisoned(getattr(layer, name), first) for name in ("open_kv", "open_gate")}
            stores = {k: np.array(getattr(layer, k)) for k in ("main", "index_keys")}
            for store in stores.values():
                store[np.arange(store.shape[1]) >= (lengths // plan.ratio)[:, None]] = np.nan
            layer = replace(layer, **waiting, **{k: jnp.asarray(v) for k, v in stores.items()})
        layers.append(layer)
    poison = replace(cache.copy(), layers=tuple(layers))
    for width in (1, 5, 11, 1):
        call = np.resize(tokens, (2, width))
        clean, cache, _ = small.step(call, cache)
        logits, poison, _ = small.step(call, poison)
        np.testing.assert_array_equal(logits, clean)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 36])
def test_chunk_sizes_give_equal_logits_and_caches(small, tokens, size):  # earlier chunks forgotten at a boundary
    whole, expected, _ = small.step(tokens[:, :37], small.init_cache(2, CAPACITY))
    cache = small.init_cache(2, CAPACITY)
    for first in range(0, 37, size):
        logits, cache, _ = small.step(tokens[:, first : min(first + size, 37)], cache)
    np.testing.assert_allclose(logits[:, -1], whole[:, -1], atol=1e-5)
    for leaf, other in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5)


def test_repeated_calls_are_bit_identical(small, tokens):  # sums in order of arrival, memory nobody wrote
    seen = set()
    for _ in range(20):
        jnp.full((2, 128, 288), jnp.nan).block_until_ready()  # freed at once: what uninitialised memory would hold
        logits, cache, _ = small.step(tokens[:, :37], small.init_cache(2, CAPACITY))
        leaves = [np.asarray(leaf) for leaf in [logits, *jax.tree.leaves(cache)]]
        seen.add(b"".join(leaf.tobytes() for leaf in leaves))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert len(seen) == 1


def test_reordered_rows_continue_like_swapped_prompts(small, tokens):  # history stays with the old row
    whole, _, _ = small.step(tokens[:, :9], small.init_cache(2, CAPACITY))
    _, cache, _ = small.step(tokens[:, :5], small.init_cache(2, CAPACITY))
    cache = cache.take(jnp.array([1, 0], jnp.int32))
    for t in range(5, 9):
        logits, cache, _ = small.step(tokens[::-1, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], np.asarray(whole)[::-1, t], atol=1e-5)


@pytest.mark.parametrize(("batch", "capacity"), [(0, 16), (-1, 16), (1, 0), (1, 5000)])
def test_sizes_out_of_range_raise_with_the_value(batch, capacity):
    bad = batch if batch < 1 else capacity
    with pytest.raises(ValueError, match=rf": {bad} is not in 1\.\."):
        init_cache(small_config(), batch, capacity, numerics_by_name("float32"))
