"""The engine: edits of parameters are seen, lengths stay on the host, and a profile tells the parts apart."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compilations, random_model, small_config
from flax import nnx

from dsv41_jax import Call, Model
from dsv41_jax.engine.programs import split_for_kernels
from dsv41_jax.nn.random import random_parameters

TOKENS = np.random.default_rng(0).integers(0, 288, (2, 12)).astype(np.int32)


@pytest.fixture
def model():
    """One of its own, for tests that edit it."""
    return random_model(small_config())


def logits(model):
    return np.asarray(model(TOKENS).logits)


def zero(model):
    model.params.head.weight[...] = jnp.zeros_like(model.params.head.weight[...])


def another(model):
    model.params = random_parameters(model.config, seed=1)


def a_new_module(model):
    model.params.layers[2] = random_parameters(model.config, seed=1).layers[2]


@pytest.mark.parametrize("edit", [zero, another, a_new_module])
def test_the_next_call_sees_an_edit_and_compiles_nothing_for_it(model, edit):
    before = logits(model)
    edit(model)
    assert compilations(lambda: logits(model)) == 0
    after = logits(model)
    np.testing.assert_array_equal(
        after, logits(Model(model.config, model.params, numerics="float32", engram=model.engram))
    )
    assert np.abs(after - before).max() > 1e-2
    assert model.generate([[1, 2]], 3) == Model(
        model.config, model.params, numerics="float32", engram=model.engram
    ).generate([[1, 2]], 3)


def test_an_edit_changes_the_fingerprint(model):
    first = model.fingerprint
    assert model.fingerprint == first
    zero(model)
    assert model.fingerprint != first


def test_parameters_that_do_not_fit_are_refused_at_the_next_call(model):
    model.params = random_parameters(small_config(hidden_size=64))
    with pytest.raises(ValueError, match=r"^config: [^\n]* needs [^\n]*and the model has it as \[[^\n]*\]$"):
        model(TOKENS)


def test_lengths_and_histories_lie_on_the_host_between_calls(small):
    cache = small.init_cache(2, 32)
    _, cache, _ = small.prefill([[1, 2, 3], [4]], cache)
    _, cache, _ = small.step([[5], [6]], cache, lengths=[1, 0])
    assert isinstance(cache.length, np.ndarray) and isinstance(cache.history, np.ndarray)
    assert cache.length.tolist() == [4, 1]
    assert isinstance(cache.copy().length, np.ndarray) and isinstance(cache.take([1]).length, np.ndarray)


def test_nothing_is_read_back_while_tokens_are_fed(small, monkeypatch):
    cache = small.prefill([[1, 2, 3]], small.init_cache(1, 32)).cache
    small.step([[5]], cache.copy())

    def guarded(read):
        def asked(value, *args, **named):
            assert not isinstance(value, jax.Array), "an array was read from its device"
            return read(value, *args, **named)

        return asked

    for name in ("asarray", "array"):
        monkeypatch.setattr(np, name, guarded(getattr(np, name)))
    with pytest.raises(AssertionError, match="read from its device"):
        np.asarray(cache.layers[0].window)
    for token in (5, 6, 7):
        _, cache, _ = small.step([[token]], cache)
    assert cache.length.tolist() == [6]


def test_an_unknown_tap_leaves_the_cache(small):
    cache = small.init_cache(2, 32)
    with pytest.raises(ValueError, match=r"^taps: 'layers\.0\.nothing' is not one of "):
        small.step(TOKENS, cache, taps=["layers.0.nothing"])
    assert small.step(TOKENS, cache).cache.length.tolist() == [12, 12]


def test_a_call_without_its_engram_rows_is_refused(small):
    call = Call(jnp.asarray(TOKENS), jnp.full(2, 12, jnp.int32))
    with pytest.raises(ValueError, match=r"^call: Engram rows of 0 layers, layers \(1,\) read some$"):
        small.params(call, small.init_cache(2, 32), cfg=small.config, numerics=small.numerics)


def test_engram_tables_of_other_layers_are_refused(small):
    with pytest.raises(ValueError, match=r"^engram: tables of layers \[\], layers \[1\] read some$"):
        Model(small.config, small.params, numerics="float32")


def scopes(jaxpr):
    """The names under which the operations of a program stand in a profile."""
    for equation in jaxpr.eqns:
        yield str(equation.source_info.name_stack)


def test_a_profile_names_every_part_and_site(tiny):
    cache, tokens, one = tiny.init_cache(1, 128), np.zeros((1, 16), np.int32), np.full(1, 16, np.int32)
    chunk = tiny.engine.chunk(tokens, one, cache.length, cache.history)
    how = {"cfg": tiny.config, "numerics": tiny.numerics}
    traced = jax.make_jaxpr(lambda params, call, cache: params(call, cache, **how))(tiny.params, chunk.call, cache)
    names = set(scopes(traced.jaxpr))
    sites = ("attn", "ffn/gate", "ffn/experts", "ffn/shared_experts", "hc_attn", "hc_ffn", "collapse")
    for layer in tiny.config.layers:
        parts = [*sites, *["engram"] * (layer.engram_slot is not None), *["attn/compressor"] * layer.owns_kv]
        for part in parts + ["attn/indexer"] * layer.owns_indexer:
            assert any(name.startswith(f"layers.{layer.id}/{part}") for name in names), (layer.id, part)
    assert {"embed", "head", "head/mtp"} <= {"/".join(name.split("/")[:2]) for name in names} | names
    inside = re.compile(r"(embed|head|layers\.\d+/(attn|ffn|engram|hc_|collapse))")
    between = {"", *(f"layers.{layer.id}" for layer in tiny.config.layers)}  # norms and casts between the parts
    assert {name for name in names if not inside.match(name)} <= between


def test_kernels_read_halves_beside_a_parameter_that_keeps_its_name_and_shape(model):
    split = split_for_kernels(model.params)
    assert model.params.layers[0].hc_attn_split is None
    for block, plain in zip(split.layers, model.params.layers, strict=True):
        for site in ("attn", "ffn"):
            fn, halves = getattr(block, f"hc_{site}_fn")[...], getattr(block, f"hc_{site}_split")[...]
            assert fn is getattr(plain, f"hc_{site}_fn")[...] and fn.dtype == jnp.float32
            joined = halves.astype(jnp.float32).reshape(2, *fn.shape).sum(axis=0)
            np.testing.assert_allclose(joined, fn, rtol=2**-15)
    named = {path for path, _ in nnx.to_flat_state(nnx.state(split, nnx.Param))}
    assert named == {path for path, _ in nnx.to_flat_state(nnx.state(model.params, nnx.Param))}
