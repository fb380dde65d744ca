"""The oracle of Bounded Replay: one call over all tokens whose window masks are truncated here (paper 3.2.2).

It runs the plain forward pass once, from an empty cache, with two of its pieces replaced: which window rows a query
sees, layer by layer and row by row, and which compressed entries stand instead of those that the call makes.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.nn import attention
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.transformer import Call
from dsv41_jax.nn.vision import ImageInput

TOL = {"atol": 2e-5, "rtol": 0}
W, ROWS, WIDTH, CAPACITY = 8, 40, 56, 128  # of the tests' small models: a row of the batch for every length 1 .. 40
LENGTHS = np.arange(1, ROWS + 1)


def oracle(cfg, numerics, batch, width, capacity):
    """Compiled (params, tokens, count, image, rows, floor [L, B], held [B], given) -> (logits, cache).

    A query at or behind `floor` sees no window row before it. Of each Full layer, the entries of the first `held`
    tokens are those of `given`, in the caches and for whoever reads them.
    """

    def run(params, tokens, count, image, rows, floor, held, given):
        layers, stands = iter(floor), iter(given)

        def window_ids(span, window, ring):
            first = next(layers)[:, None, None]
            query = jnp.arange(width, dtype=jnp.int32)[:, None]
            row = query - jnp.arange(window - 1, -1, -1, dtype=jnp.int32)
            lowest = jnp.where(query >= first, first, 0)
            return jnp.where(row >= lowest, ring + row, -1)  # the call starts at position 0, so its row is its position

        def write_entries(store, new, first, number):
            ratio, kept = next(stands)
            made = min(new.shape[1], store.shape[1])
            finished = (jnp.arange(made) < number[:, None])[..., None]
            store = store.at[:, :made].set(jnp.where(finished, new[:, :made], 0))
            reused = (jnp.arange(store.shape[1]) < held[:, None] // ratio)[..., None]
            return jnp.where(reused, kept, store)

        with (
            mock.patch.object(attention, "window_ids", window_ids),
            mock.patch.object(attention, "write_entries", write_entries),
        ):
            cache = init_cache(cfg, batch, capacity, numerics)
            call = Call(tokens, count, rows, image)
            logits, cache, _ = params(call, cache, cfg=cfg, numerics=numerics)
        assert next(layers, None) is None and next(stands, None) is None
        return logits, cache

    ratios = [plan.ratio for plan in cfg.layers if plan.owns_kv for _ in range(2)]
    compiled = jax.jit(lambda *a: run(*a[:-1], list(zip(ratios, a[-1], strict=True))))
    blank = [
        np.zeros((batch, capacity // ratio, width), np.float32)
        for ratio, width in zip(ratios, widths(cfg), strict=True)
    ]

    def call(model, tokens, count, floor, image=None, held=None, given=None):
        tokens, count = np.asarray(tokens, np.int32), np.asarray(count, np.int32)
        if image is None:
            image = ImageInput(jnp.zeros((batch, width), bool), jnp.zeros((batch, width, cfg.hidden_size)))
        history, zero = np.asarray(init_cache(cfg, batch, capacity, numerics).history), np.zeros(batch, np.int32)
        rows = model.engram.read(tokens, count, zero, history, np.asarray(image.mask))[0] if model.engram else ()
        held = zero if held is None else np.asarray(held, np.int32)
        stands = (
            blank if given is None else [wide(part, b.shape) for part, b in zip(sum(given, ()), blank, strict=True)]
        )
        floor = jnp.asarray(np.asarray(floor, np.int32))
        logits, cache = compiled(
            model.params, tokens, jnp.asarray(count), image, rows, floor, jnp.asarray(held), stands
        )
        return np.asarray(logits), cache

    return call


def widths(cfg):
    """Width of main entries and index keys of each Full layer, in turn."""
    return [w for plan in cfg.layers if plan.owns_kv for w in (cfg.head_dim, cfg.index_head_dim)]


def wide(part, shape):
    """An array cut or filled with zeros to `shape` along axis 1."""
    out = np.zeros(shape, part.dtype)
    rows = min(part.shape[1], shape[1])
    out[:, :rows] = part[:, :rows]
    return out


def last_rows(cfg, n, rings, ring_rows):
    """(slots [B, W], which are live) of the last W positions before `n` in rings of `ring_rows` rows."""
    position = np.asarray(n)[:, None] - np.arange(cfg.sliding_window, 0, -1)
    return position % ring_rows, position >= 0


def assert_same(cache, expected, cfg, n, tol=TOL):
    """Every live value of a cache of `n` tokens a row: windows, entries, open groups, draft rings, length."""
    n = np.asarray(n)
    np.testing.assert_array_equal(cache.length, n)

    def ring(name, mine, theirs, positions):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        live = (positions >= 0) & (positions < n[:, None])
        pick = lambda x: np.where(  # noqa: E731
            live[..., None], np.take_along_axis(x, (positions % x.shape[1])[..., None], 1), 0
        )
        np.testing.assert_allclose(pick(mine), pick(theirs), **tol, err_msg=name)

    window = n[:, None] - np.arange(cfg.sliding_window, 0, -1)
    for i, (one, two) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        ring(f"window of layer {i}", one.window, two.window, window)
        if one.main is None:
            continue
        live = (np.arange(one.main.shape[1]) < n[:, None] // one.ratio)[..., None]
        for name in ("main", "index_keys"):
            mine, theirs = np.asarray(getattr(one, name)), np.asarray(getattr(two, name))
            mine, theirs = (np.where(live, x, 0) for x in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, **tol, err_msg=f"{name} of layer {i}")
        if one.ratio > 1:
            waiting = n[:, None] // one.ratio * one.ratio + np.arange(one.ratio - 1)
            ring(f"open kv of layer {i}", one.open_kv, two.open_kv, waiting)
            ring(f"open gate of layer {i}", one.open_gate, two.open_gate, waiting)
    for i, (one, two) in enumerate(zip(cache.drafts, expected.drafts, strict=True)):
        ring(f"draft ring {i}", one, two, window)


def assert_history(model, cache, tokens, n, mask=None):
    """The ids that Engram looks back at are those of the last tokens, -1 at images."""
    ids = model.engram.token_map[np.asarray(tokens)]
    ids = ids if mask is None else np.where(mask, -1, ids)
    past, history = model.config.engram_max_ngram_size - 1, np.asarray(cache.history)
    for row, length in enumerate(n):
        for p in range(max(0, length - past), length):
            assert history[row, p % history.shape[1]] == ids[row, p], (row, p)


def append(model, cache, tokens, at, count):
    """(logits behind the next `count` tokens of each row, the cache after them)."""
    return model.prefill([row[a : a + c] for row, a, c in zip(tokens, at, count, strict=True)], cache)[:2]


def behind(logits, n):
    """Rows' logits at their last of `n` tokens."""
    return logits[np.arange(len(n)), np.asarray(n) - 1]


def worst(one, two):
    """The largest difference in each row."""
    return np.abs(np.asarray(one) - np.asarray(two)).reshape(len(one), -1).max(axis=1)


def floors(cut, start, layers=4):
    """Queries of layers `cut` and above see nothing before `start`."""
    return [start if layer >= cut else np.zeros_like(start) for layer in range(layers)]


def assert_entries_are_the_snapshots(cache, snapshot, n):
    """Bit for bit; what stands behind a row's own prefix is dead."""
    kept = [layer for layer in cache.layers if layer.main is not None]
    for layer, stored in zip(kept, snapshot.entries, strict=True):
        for one, two in zip((layer.main, layer.index_keys), stored, strict=True):
            live = (np.arange(one.shape[1]) < np.asarray(n)[:, None] // layer.ratio)[..., None]
            np.testing.assert_array_equal(np.where(live, one, 0), np.where(live, wide(two, one.shape), 0))
