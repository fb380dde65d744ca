"""Selection tile by tile: the same ids as one sort, and no work past the last token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax.nn import indexer
from pallas_kernels.indexer import reference, select


@pytest.mark.parametrize("tile", [2, 4, 6])
def test_the_tile_changes_no_selection(tile):
    """Ties, NaN and unseen entries included: the running best over tiles equals one sort, for selections and blocks."""
    rng = np.random.default_rng(tile)
    cfg = small_config()
    tokens, entries = 5, 19
    query = rng.integers(-1, 2, (2, tokens, cfg.index_n_heads, cfg.index_head_dim)).astype(np.float32)
    keys = rng.integers(-1, 2, (2, entries, cfg.index_head_dim)).astype(np.float32)
    keys[0, 7] = np.nan
    heads = rng.integers(-1, 2, (2, tokens, cfg.index_n_heads)).astype(np.float32)
    visible = np.array([[0, 1, 7, 12, 19], [19, 3, 4, 15, 16]], np.int32)
    blocks = jnp.asarray([[[0, 2, -1], [0, 1, 2], [1, 4, 9], [3, 5, 8], [2, 6, 7]]] * 2, jnp.int32)
    given = tuple(map(jnp.asarray, (query, keys, heads, visible)))
    for pool, candidates in ((None, 0), (None, 3), (blocks, 0)):
        run = partial(select, *given, pool, count=cfg.index_topk, candidates=candidates, size=2)
        for one, other in zip(run(tile=1 << 20), run(tile=tile), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)


def test_tiles_past_the_last_token_are_not_scored(monkeypatch):
    """Time follows the entries that a query sees: keys of unseen tiles are never read by the loop."""
    scored, plain = [], reference.index_scores

    def scores(query, keys, heads):
        scored.append(keys.shape)
        return plain(query, keys, heads)

    monkeypatch.setattr(reference, "index_scores", scores)
    with jax.disable_jit():
        visible = jnp.full((1, 1), 5, jnp.int32)
        given = jnp.ones((1, 1, 4, 32)), jnp.ones((1, 64, 32)), jnp.ones((1, 1, 4)), visible
        reference.select(*given, count=4, size=2, tile=2)
    assert len(scored) == 3


def test_a_model_of_many_tiles_equals_a_model_of_one(monkeypatch):
    tokens = np.random.default_rng(1).integers(8, 280, (2, 100))
    taps = ["layers.3.candidate_blocks", "layers.4.index_topk", "layers.1.index_topk"]
    found = []
    for tile in (1 << 20, 8):
        monkeypatch.setattr(indexer, "select", partial(select, tile=tile))
        model = random_model(small_config())  # traced anew
        found.append(model(tokens, taps=taps))
    (one, _, seen), (other, _, also) = found
    np.testing.assert_array_equal(one, other)
    for name in taps:
        np.testing.assert_array_equal(seen[name], also[name])
