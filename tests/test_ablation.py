"""Other roles over the same parameters: what a config says is what runs, whatever tree it is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax import Config, ConfigError, Model
from dsv41_jax.ablation import ablated
from dsv41_jax.nn.random import random_parameters

TOKENS = np.random.default_rng(0).integers(0, 288, (2, 40)).astype(np.int32)
# Layers: 0 window, 1 full (ratio 2), 2 reuse, 3 full (ratio 1, publishes candidates), 4 reindex.


def logits(model, tokens=TOKENS):
    return np.asarray(model(tokens).logits)


def copied(source, cfg):
    """A tree made for `cfg`, with the parameters of `source` in it: what a checkpoint of that config would load."""
    fresh = random_parameters(cfg)
    from_path = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(source)[0]}
    return jax.tree_util.tree_map_with_path(lambda path, _: from_path[jax.tree_util.keystr(path)], fresh)


@pytest.mark.parametrize(
    "change",
    [
        {"candidates": False},
        {"engram": False},
        {"window_only": [2]},
        {"window_only": [1, 4]},
        {"roles": {4: "reuse"}},
        {"roles": {4: "window", 2: "window"}},
        {"roles": {3: "reindex", 4: "reuse"}, "candidates": False},
    ],
    ids=str,
)
def test_an_ablated_model_is_the_model_that_was_built_so(small, change):
    if change.get("roles", {}).get(3):  # entries of ratio 2 have no ratio-1 reader: another small model
        small = random_model(small_config(compress_ratios=[0, 1, 1, 1, 1]))
    model = small.ablate(**change)
    built = Model(model.config, copied(small.params, model.config), numerics="float32", engram=model.engram)
    np.testing.assert_array_equal(logits(model), logits(built))
    assert np.abs(logits(model) - logits(small)).max() > 1e-3


def test_a_config_handed_over_beside_parameters_is_obeyed(small):  # modules that keep their own config ignore it
    config = small.config.replace(candidate_source_layer_id=None)
    moved = logits(Model(config, small.params, numerics="float32", engram=small.engram))
    np.testing.assert_array_equal(moved, logits(small.ablate(candidates=False)))
    for key, value in {
        "swiglu_limit": 0.01, "routed_scaling_factor": 3.0, "num_experts_per_tok": 1, "rms_norm_eps": 1.0,
        "index_topk": 2, "sliding_window": 4, "hc_sinkhorn_iters": 1, "rope_theta": 50.0,
    }.items():  # fmt: skip
        other = Model(small.config.replace(**{key: value}), small.params, numerics="float32", engram=small.engram)
        assert np.abs(logits(other) - logits(small)).max() > 1e-4, key


def test_a_window_only_layer_sees_its_window_and_still_publishes(small):
    names = ["layers.3.index_topk", "layers.3.out", "layers.2.out", "layers.4.main_kv"]
    plain, alone = (model(TOKENS, taps=names[:3]).taps for model in (small, small.ablate(window_only=[3])))
    np.testing.assert_array_equal(plain["layers.2.out"], alone["layers.2.out"])
    np.testing.assert_array_equal(plain["layers.3.index_topk"], alone["layers.3.index_topk"])
    assert np.abs(np.asarray(plain["layers.3.out"] - alone["layers.3.out"])).max() > 1e-3
    # Its attention is that of a short prompt: nothing beyond the window moves what the last token gets.
    layer = small.ablate(window_only=[1, 2, 3, 4], engram=False)
    far = TOKENS.copy()
    far[:, 0] = (far[:, 0] + 1) % 288
    behind = 1 + (small.config.sliding_window - 1) * small.config.num_hidden_layers
    np.testing.assert_array_equal(logits(layer)[:, behind:], logits(layer, far)[:, behind:])


def test_a_layer_keeps_the_rotary_frequencies_that_it_was_trained_with(small):
    cfg = ablated(small.config, roles={4: "window"})
    assert (cfg.layers[4].mode, cfg.layers[4].ratio, cfg.layers[4].kv_source) == ("window", 1, None)
    assert cfg.compress_ratios == small.config.compress_ratios


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": {2: "full"}}, r"config: layer 2 as full needs layers\.2\.attn\.compressor\.norm\.weight \[32\]"),
        ({"roles": {2: "reindex"}}, r"config: layer 2 as reindex needs layers\.2\.attn\.indexer\."),
        ({"roles": {0: "reuse"}}, "roles: layer 0 was trained on its window alone"),
        ({"roles": {2: "fly"}}, "roles: 'fly' of layer 2 is not one of"),
        ({"roles": {9: "reuse"}}, "ablate: layer 9 is not in 0..4"),
        ({"window_only": [-1]}, "ablate: layer -1 is not in 0..4"),
        ({"roles": {3: "reuse"}}, "text_config.candidate_source_layer_id: 3 is not in"),
        ({"roles": {1: "window"}}, r"text_config\.kv_source_layer_ids: \(3,\) leaves layer 2"),
        ({"cache": "fp3"}, "cache: 'fp3' is not one of"),
    ],
    ids=str,
)
def test_roles_that_do_not_fit_are_refused_in_one_line(small, change, message):
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        small.ablate(**change)


def test_ablations_without_candidates_or_sources_say_what_is_missing():
    with pytest.raises(ConfigError, match="kv_source_layer_ids"):
        ablated(Config.flash(), roles={2: "reindex"})
    free = ablated(Config.flash(), candidates=False, engram=False, window_only=range(Config.flash().num_hidden_layers))
    assert {plan.kv_source for plan in free.layers} == {None}
    assert [plan.id for plan in free.layers if plan.mode == "full"] == [2, 8, 14, 20]  # they still publish


def test_a_cache_of_another_format_is_one_argument(small):
    exact, bf16, fp4 = (logits(small.ablate(cache=name)) for name in ("exact", "bf16", "fp4"))
    np.testing.assert_array_equal(exact, logits(small))
    near, far = (np.abs(found - exact).max() for found in (bf16, fp4))
    assert 0 < near < 0.1 * far
    cache = small.ablate(cache="fp8").init_cache(1, 16)
    assert (cache.layers[1].main.dtype, cache.layers[1].main.shape[-1]) == (jnp.uint8, 33)
    with pytest.raises(ValueError, match=r"^cache: rows of 33 uint8 are not those of 'float32'$"):
        small.step([[1]], cache)
