"""The whole model: golden vectors, and one result however a sequence is cut, padded, batched or repeated."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, altered, random_model, small_config
from flax import nnx

from dsv41_jax import Model
from dsv41_jax.engine.ngrams import Layout
from dsv41_jax.engine.tables import EngramLookup, Table
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.block import Streams
from dsv41_jax.nn.cache import Span
from dsv41_jax.nn.transformer import Call

CAPACITY, T = 48, 24
BLOCK_TAPS = ("out", "pre_mix", "attn_in", "attn_out", "ffn_out", "moe_experts", "moe_weights")
SOME_TAPS = {
    1: ("index_topk", "latent", "main_kv", "index_keys", "engram_hash_ids", "engram_gate", "engram_out"),
    3: ("index_topk",),
    4: ("index_topk", "candidate_blocks", "latent", "main_kv", "engram_hash_ids", "engram_gate"),
    6: ("index_topk",),
}


def all_taps(model):
    """Names that the docstring promises, for the golden models."""
    names = [f"layers.{i}.{name}" for i in range(model.config.num_hidden_layers) for name in BLOCK_TAPS]
    if model.config.engram_layer_ids:
        names += [f"layers.{i}.{name}" for i, extra in SOME_TAPS.items() for name in extra]
        names += [f"layers.{i}.draft_feature" for i in model.config.dspark_target_layer_ids] + ["main_hidden"]
    else:
        names += [f"layers.{i}.index_topk" for i in (1, 2, 4)] + ["layers.2.candidate_blocks"]
    return (*names, "final_norm")


@pytest.fixture(scope="module", params=list(GOLDEN))
def golden(request):
    """(model, inputs, released float32 arrays, logits and taps of case b's prefill)."""
    path = GOLDEN[request.param]
    tiny = request.param == "tiny-full"
    model = request.getfixturevalue("tiny") if tiny else Model.from_pretrained(path, numerics="float32")
    given, released = dict(np.load(path / "inputs.npz")), dict(np.load(path / "outputs_float32.npz"))
    return model, given, released, model(given["b_ids"][:, :37], taps=all_taps(model))


def stepped(model, tokens, cuts=None, capacity=CAPACITY):
    """Logits of all tokens in calls that end at `cuts` (default: after every token), and the cache."""
    cache, pieces, first = model.init_cache(len(tokens), capacity), [], 0
    for end in cuts or range(1, tokens.shape[1] + 1):
        logits, cache, _ = model.step(tokens[:, first:end], cache)
        pieces.append(np.asarray(logits))
        first = end
    return np.concatenate(pieces, axis=1), cache


def test_golden_prefill_logits(golden):
    model, given, released, (logits, *_) = golden
    np.testing.assert_allclose(logits, released["b/prefill_logits"], atol=1e-4)
    again, _, _ = model(np.tile(given["a_ids"], (2, 1)), taps=all_taps(model))
    np.testing.assert_allclose(again, np.tile(released["a/prefill_logits"], (2, 1, 1)), atol=1e-4)


@pytest.mark.parametrize("case", ["b", "c", "e"])
def test_golden_decode_logits(golden, case):  # unfinished groups score their own source's index keys
    model, given, released, _ = golden
    parts = [released[f"{case}/{part}_logits"] for part in ("prefill", "decode") if f"{case}/{part}_logits" in released]
    logits, _ = stepped(model, given[f"{case}_ids"], capacity=128)
    np.testing.assert_allclose(logits, np.concatenate(parts, axis=1), atol=1e-4)


def test_golden_taps(golden):
    model, _, released, (_, _, seen) = golden
    compared = 0
    for name, expected in released.items():
        case, _, tap = name.partition("/")
        if case != "b" or tap.removesuffix("[-3:]") not in seen:
            continue
        got = np.asarray(seen[tap.removesuffix("[-3:]")])
        if tap.endswith("moe_experts"):  # as sets
            np.testing.assert_array_equal(np.sort(got.reshape(expected.shape), axis=-1), np.sort(expected, axis=-1))
        elif tap.endswith("index_topk"):
            for mine, theirs in zip(got.reshape(-1, 8), expected.reshape(-1, 8), strict=True):
                assert set(mine[mine >= 0]) == set(theirs[theirs >= 0])
        else:
            got = got[:, -3:] if tap.endswith("[-3:]") else got
            np.testing.assert_allclose(got, expected, atol=1e-4)
        compared += 1
    assert compared >= 3 * model.config.num_hidden_layers + len(model.config.index_source_layer_ids)
    if model.engram is not None:
        hashes = np.stack([seen[f"layers.{layer}.engram_hash_ids"] for layer in (1, 4)], axis=2)
        np.testing.assert_array_equal(hashes, released["b/engram_hash_ids"])


def test_golden_candidates(golden):
    model, _, released, (_, _, seen) = golden
    source, size = model.config.candidate_source_layer_id, model.config.candidate_block_size
    kept, visible = released[f"b/layers.{source}.candidates"], np.arange(37) <= np.arange(37)[:, None]
    blocks = np.asarray(seen[f"layers.{source}.candidate_blocks"])
    mine = (blocks[..., None] == np.arange(37) // size).any(axis=-2)
    np.testing.assert_array_equal(mine & visible, kept & visible)


def test_golden_caches(golden):
    model, given, released, _ = golden
    _, cache = stepped(model, given["b_ids"][:, :37], capacity=128)
    rings = {"window_kv": ("window", range(21, 37)), "kv_state": ("open_kv", [36]), "score_state": ("open_gate", [36])}
    stores = {"compress_kv": "main", "index_k": "index_keys"}
    for name, expected in released.items():
        if not name.startswith("b/cache.layers."):
            continue
        layer, kind = cache.layers[int(name.split(".")[2])], name.split(".")[3]
        if kind in stores:
            np.testing.assert_allclose(getattr(layer, stores[kind])[:, : expected.shape[1]], expected, atol=1e-4)
            continue
        field, positions = rings[kind]  # position p stands in slot p % rows, and our rings may have more rows
        ring = np.asarray(getattr(layer, field))
        for p in positions:
            np.testing.assert_allclose(ring[:, p % ring.shape[1]], expected[:, p % expected.shape[1]], atol=1e-4)


def test_tap_names_and_shapes(golden):
    model, *_, (_, _, seen) = golden
    assert set(seen) == set(all_taps(model))
    for name, value in seen.items():
        layer, last = name.split(".")[1:] if name.startswith("layers.") else (None, name)
        entries = 37 // model.config.layers[int(layer)].ratio if last in ("latent", "main_kv", "index_keys") else 37
        assert value.shape[:2] == (2, entries), name
    assert seen["layers.1.out"].shape == (2, 37, model.config.hc_mult, model.config.hidden_size)
    with pytest.raises(ValueError, match=r"^taps: 'layers\.0\.latent' is not one of .*layers\.1\.latent"):
        model(np.zeros((2, 37), int), taps=["layers.0.latent"])


def mutated(tiny, change):
    """The bundled model with another Engram memory; it shares the compiled step."""
    changed = copy.copy(tiny.engram)
    change(changed, tiny.engram)
    return altered(tiny, engram=changed)


def zero_tables(slots):
    def change(new, old):
        blank = lambda table: Table(np.zeros_like(table.weight), np.asarray(table.scale))  # noqa: E731
        new.tables = tuple(blank(t) if slot in slots else t for slot, t in enumerate(old.tables))

    return change


def swap_multipliers(new: EngramLookup, old: EngramLookup):
    other = old.layouts[::-1]
    new.layouts = tuple(Layout(o.multipliers, m.primes, m.offsets) for m, o in zip(old.layouts, other, strict=True))


@pytest.mark.parametrize(
    ("change", "layer"),
    [(zero_tables([0, 1]), 1), (zero_tables([1]), 4), (zero_tables([0]), 1), (swap_multipliers, 1)],
)
def test_a_broken_engram_shows_in_the_hidden_state(tiny, change, layer):  # greedy text looks right without Engram
    released = np.load(GOLDEN["tiny-full"] / "outputs_float32.npz")[f"b/layers.{layer}.out[-3:]"]
    tokens = np.load(GOLDEN["tiny-full"] / "inputs.npz")["b_ids"][:, :37]
    _, _, seen = mutated(tiny, change)(tokens, taps=all_taps(tiny))
    assert np.abs(np.asarray(seen[f"layers.{layer}.out"])[:, -3:] - released).max() > 1e-3


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 288, (2, 40)).astype(np.int32)


@pytest.fixture(scope="module")
def by_token(small, tokens):
    return stepped(small, tokens)[0]


@pytest.mark.parametrize("length", range(1, T + 1))
def test_one_call_equals_chunks_equals_single_tokens(small, tokens, by_token, length):  # a chunk's end in mid-group
    rng = np.random.default_rng(length)
    ways = [[length]]
    for _ in range(3):
        inner = rng.choice(np.arange(1, length), min(int(rng.integers(1, 5)), length - 1), replace=False)
        ways.append([*sorted(int(cut) for cut in inner), length])
    caches = []
    for cuts in ways:
        logits, cache = stepped(small, tokens[:, :length], cuts)
        np.testing.assert_allclose(logits, by_token[:, :length], atol=1e-5)
        caches.append(jax.tree.leaves(cache))
    for other in caches[1:]:
        for leaf, expected in zip(other, caches[0], strict=True):
            np.testing.assert_allclose(leaf, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_unequal_lengths_advance_on_their_own(small, tokens, by_token, seed):  # a neighbour's pads in a group
    rng = np.random.default_rng(seed)
    at, cache = np.zeros(2, int), small.init_cache(2, CAPACITY)
    while at.max() < T:
        count = np.minimum(rng.integers(0, rng.choice([2, 9, 20]), 2), T - at)
        width = max(int(count.max()), 1)
        call = rng.integers(0, 288, (2, width))  # what stands behind a row's live tokens is arbitrary
        for row in range(2):
            call[row, : count[row]] = tokens[row, at[row] : at[row] + count[row]]
        logits, cache, _ = small.step(call, cache, lengths=count)
        for row in range(2):
            expected = by_token[row, at[row] : at[row] + count[row]]
            np.testing.assert_allclose(np.asarray(logits)[row, : count[row]], expected, atol=1e-5)
        at = at + count
        assert cache.length.tolist() == at.tolist()


def test_equal_rows_of_a_batch_have_equal_logits(small, tokens, by_token):  # row offsets counted twice after row 0
    logits, _, _ = small.step(np.tile(tokens[:1, :13], (3, 1)), small.init_cache(3, CAPACITY))
    np.testing.assert_array_equal(logits, np.tile(logits[:1], (3, 1, 1)))
    np.testing.assert_allclose(logits[0], by_token[0, :13], atol=1e-5)


# The parameters called, and compiled by their caller, with every intermediate.


@pytest.fixture(scope="module")
def run(small, tokens):
    """(params, tokens, count) -> (logits, cache, taps), each defaulting to `small` on T live tokens a row."""
    how = {"cfg": small.config, "numerics": small.numerics}
    compiled = jax.jit(lambda params, call, cache: params(call, cache, **how))

    def call(params=small.params, ids=tokens[:, :T], count=(T, T)):
        cache, count = small.init_cache(2, CAPACITY), np.array(count, np.int32)
        rows, _ = small.engram.read(ids, count, np.zeros(2, np.int32), np.asarray(cache.history))
        return compiled(params, Call(ids, count, rows), cache)

    return call


def norm64(x, norm):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-20) * np.asarray(norm.weight[...], np.float64)


def coefficients64(cfg, block, x, site):
    """(pre, post, comb) of single-pass mHC (paper 2.4.1), in float64."""
    fn, base, scale = (np.asarray(getattr(block, f"hc_{site}_{k}")[...], np.float64) for k in ("fn", "base", "scale"))
    z, streams, eps = x.reshape(*x.shape[:2], -1), x.shape[2], cfg.hc_eps
    m = z @ fn.T / np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + 1e-20)
    pre, post, comb = np.split(m * np.repeat(scale, [streams, streams, streams**2]) + base, [streams, 2 * streams], -1)
    comb = np.exp(comb.reshape(*x.shape[:2], streams, streams))
    comb = comb / comb.sum(axis=-1, keepdims=True) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    for _ in range(cfg.hc_sinkhorn_iters - 1):
        for axis in (-1, -2):
            comb = comb / (comb.sum(axis=axis, keepdims=True) + eps)
    return 1 / (1 + np.exp(-pre)) + eps, 2 / (1 + np.exp(-post)), comb


def test_an_outer_jit_changes_nothing(run, by_token):
    np.testing.assert_allclose(run()[0], by_token[:, :T], atol=1e-5)


def test_each_site_collapses_with_the_mix_of_the_site_before(small, tokens, run):  # as V4 did: with its own mix
    seen = {name: np.asarray(value, np.float64) for name, value in run()[2].items()}
    streams = np.asarray(small.params.embed.weight[...], np.float64)[tokens[:, :T]]
    streams, mix = np.repeat(streams[:, :, None], 4, axis=2), np.eye(4)[np.zeros((2, T), int)]
    collapse = lambda: np.einsum("btm,btmd->btd", mix, streams)  # noqa: E731
    for i, block in enumerate(small.params.layers):
        tap = {name: seen[f"layers.{i}.{name}"] for name in BLOCK_TAPS}
        streams = seen.get(f"layers.{i}.engram_out", streams)
        np.testing.assert_allclose(tap["attn_in"], norm64(collapse(), block.attn_norm), atol=2e-5)
        for site, y in (("attn", tap["attn_out"]), ("ffn", tap["ffn_out"])):
            if site == "ffn":  # its input is not a tap, but the router's weights are a function of it
                routed = norm64(collapse(), block.ffn_norm) @ np.asarray(block.ffn.gate.weight[...], np.float64).T
                score = np.take_along_axis(np.sqrt(np.log1p(np.exp(routed))), tap["moe_experts"].astype(int), axis=-1)
                weights = score / score.sum(axis=-1, keepdims=True) * small.config.routed_scaling_factor
                np.testing.assert_allclose(tap["moe_weights"], weights, atol=2e-5)
            mix, post, comb = coefficients64(small.config, block, streams, site)
            streams = post[..., None] * y[:, :, None] + np.einsum("btij,btid->btjd", comb, streams)
        np.testing.assert_allclose(tap["pre_mix"], mix, atol=2e-5)
        np.testing.assert_allclose(tap["out"], streams, atol=5e-5)
    np.testing.assert_allclose(seen["final_norm"], norm64(collapse(), small.params.norm), atol=2e-5)


def test_the_stack_cut_in_two_equals_the_whole(small, tokens, run):  # the pending mix lost at the cut
    cfg, how = small.config, {"cfg": small.config, "numerics": small.numerics}

    @partial(jax.jit, static_argnames=("first", "last"))
    def segment(params, streams, shared, engram, first, last):
        cache = small.init_cache(2, CAPACITY)
        span = Span.after(cache.length, jnp.full(2, T, jnp.int32), T)
        for plan in cfg.layers[first:last]:
            own = engram if plan.engram_slot is not None else None
            streams, shared, *_ = params.layers[plan.id](
                streams, shared, cache.layers[plan.id], span, plan=plan, engram=own, **how
            )
        return streams, shared

    history = np.asarray(small.init_cache(2, CAPACITY).history)
    rows, _ = small.engram.read(tokens[:, :T], np.full(2, T, np.int32), np.zeros(2, np.int32), history)
    h = small.params.embed.weight[...][tokens[:, :T]].astype(jnp.float32)[:, :, None]
    first_mix = jnp.zeros((2, T, 4)).at[..., 0].set(1)
    streams, shared = segment(small.params, Streams(jnp.repeat(h, 4, axis=2), first_mix), Shared(), rows[0], 0, 2)
    (x, mix), _ = segment(small.params, streams, shared, rows[0], 2, 5)
    seen = run()[2]
    # Streams of scale 4 and more, summed in another order by each compilation: 1e-5 of the largest.
    np.testing.assert_allclose(x, seen["layers.4.out"], atol=1e-5 * float(np.abs(x).max()))
    np.testing.assert_allclose(mix, seen["layers.4.pre_mix"], atol=1e-5)


def test_padding_of_nan_reaches_no_live_logit_and_no_cache(small, tokens, run):  # pads mixed in layer by layer
    live, count = tokens[:, :T] % 287, np.array([17, 3])
    params = nnx.clone(small.params)
    params.embed.weight[...] = params.embed.weight[...].at[287].set(jnp.nan)
    padded = np.where(np.arange(T) < count[:, None], live, 287).astype(np.int32)
    (clean, kept, _), (logits, cache, _) = run(ids=live, count=count), run(params, padded, count)
    assert np.isnan(np.asarray(logits)[0, 17:]).all()  # the poison is real
    np.testing.assert_array_equal(logits[0, :17], clean[0, :17])
    np.testing.assert_array_equal(logits[1, :3], clean[1, :3])
    for leaf, expected in zip(jax.tree.leaves(cache), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_sinks_and_candidates_show_in_the_hidden_state(small, tokens, run):  # greedy text looks right without them
    with_both, params = run()[2], nnx.clone(small.params)
    for block in params.layers:
        block.attn.attn_sink[...] = jnp.full(4, -jnp.inf)
    without = run(params)[2]["layers.0.out"]
    assert np.abs(np.asarray(without - with_both["layers.0.out"])).max() > 1e-3
    unrestricted = random_model(small_config(candidate_source_layer_id=None))
    _, _, seen = unrestricted(tokens[:, :T], taps=["layers.3.out", "layers.4.out"])
    np.testing.assert_allclose(seen["layers.3.out"], with_both["layers.3.out"], atol=1e-4)
    assert np.abs(np.asarray(seen["layers.4.out"] - with_both["layers.4.out"])).max() > 1e-3


def products_of(jaxpr):
    for equation in jaxpr.eqns:
        if "dot" in equation.primitive.name:
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products_of(inner)


def test_no_float32_product_runs_in_tf32(small, tokens):  # TF32 flips routers and selections on a GPU
    cache = small.init_cache(2, CAPACITY)
    zeros = np.zeros(2, np.int32)
    rows, _ = small.engram.read(tokens[:, :T], zeros + T, zeros, np.asarray(cache.history))
    how, call = {"cfg": small.config, "numerics": small.numerics}, Call(tokens[:, :T], zeros + T, rows)
    with jax.default_matmul_precision("bfloat16"):
        traced = jax.make_jaxpr(lambda params, call, cache: params(call, cache, **how))(small.params, call, cache)
    products = list(products_of(traced.jaxpr))
    assert len(products) > 50
    for equation in products:
        precision = equation.params["precision"]
        assert precision in (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)
