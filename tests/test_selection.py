"""Selection tile by tile: the same ids as one sort, and no work past the last token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax import indexer as module
from dsv41_jax.indexer import Indexer
from dsv41_jax.quant import numerics
from pallas_kernels.indexer import index_scores


@pytest.mark.parametrize("tile", [2, 4, 6])
def test_the_tile_changes_no_selection(tile, monkeypatch):
    """Ties, NaN and unseen entries included: the running best over tiles equals one sort, for selections and blocks."""
    rng = np.random.default_rng(tile)
    cfg = small_config()
    num, tokens, entries = numerics("float32"), 5, 19
    query = rng.integers(-1, 2, (2, tokens, cfg.index_n_heads, cfg.index_head_dim)).astype(np.float32)
    keys = rng.integers(-1, 2, (2, entries, cfg.index_head_dim)).astype(np.float32)
    keys[0, 7] = np.nan
    heads = rng.integers(-1, 2, (2, tokens, cfg.index_n_heads)).astype(np.float32)
    visible = np.array([[0, 1, 7, 12, 19], [19, 3, 4, 15, 16]], np.int32)
    for plan in (cfg.layers[1], cfg.layers[3], cfg.layers[4]):
        part = Indexer(cfg, plan)
        blocks = jnp.asarray([[[0, 2, -1], [0, 1, 2], [1, 4, 9], [3, 5, 8], [2, 6, 7]]] * 2, jnp.int32)
        given = (*map(jnp.asarray, (query, heads, keys)), blocks, jnp.asarray(visible), num)
        monkeypatch.setattr(module, "TILE", 1 << 20)
        whole = part.select(*given)
        monkeypatch.setattr(module, "TILE", tile)
        for one, other in zip(whole, part.select(*given), strict=True):
            np.testing.assert_array_equal(one, other)


def test_tiles_past_the_last_token_are_not_scored(monkeypatch):
    """Time follows the entries that a query sees: keys of unseen tiles are never read by the loop."""
    cfg, num = small_config(), numerics("float32")
    monkeypatch.setattr(module, "TILE", 2)
    scored = []

    def scores(query, keys, heads, **options):
        scored.append(keys.shape)
        return index_scores(query, keys, heads, **options)

    monkeypatch.setattr(module, "index_scores", scores)
    with jax.disable_jit():
        part = Indexer(cfg, cfg.layers[1])
        query, heads = jnp.ones((1, 1, cfg.index_n_heads, cfg.index_head_dim)), jnp.ones((1, 1, cfg.index_n_heads))
        part.select(query, heads, jnp.ones((1, 64, cfg.index_head_dim)), None, jnp.full((1, 1), 5, jnp.int32), num)
    assert len(scored) == 3


def test_a_model_of_many_tiles_equals_a_model_of_one(monkeypatch):
    tokens = np.random.default_rng(1).integers(8, 280, (2, 100))
    taps = ["layers.3.candidate_blocks", "layers.4.index_topk", "layers.1.index_topk"]
    found = []
    for tile in (1 << 20, 8):
        monkeypatch.setattr(module, "TILE", tile)
        model = random_model(small_config())  # traced anew
        found.append(model(tokens, taps=taps))
    (one, seen), (other, also) = found
    np.testing.assert_array_equal(one, other)
    for name in taps:
        np.testing.assert_array_equal(seen[name], also[name])
