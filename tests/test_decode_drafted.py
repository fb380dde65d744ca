"""Generation with drafts: the plain greedy output and caches whatever is accepted, stopping, and adaptive steps.

Random drafters are nearly never right, so most tests put the true continuation, spoilt at a chosen place, for the
guesses. One batch size throughout: 96 rows are 16 window places x 6 accepted lengths.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import altered
from scipy.stats import chisquare

from dsv41_jax import Model
from dsv41_jax.engine.decode import Drafted
from dsv41_jax.engine.programs import Programs
from dsv41_jax.engine.sampling import Draws, Sampling
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.nn.cache import init_cache

B, K, W, CAPACITY, NEVER = 96, 5, 16, 128, 288
GREEDY = Draws.first(Sampling(max_new_tokens=1, eos=NEVER))
ONES = np.ones(B, np.int32)


def ending(config, eos):
    """The config with another EOS; one past the vocabulary is in no config that can be made, so it is put there."""
    other = copy.copy(config)
    object.__setattr__(other, "eos_token_id", eos)
    return other


def feed(model, tokens, cache, count=ONES):
    """(logits behind each row's last token, cache)."""
    (chunk,) = model.engine.chunks(np.asarray(tokens, np.int32), count.astype(np.int32), cache)
    logits, cache, _ = model.engine.run(chunk, cache, last_only=True)
    return np.asarray(logits), cache


def prefilled(model, ids, lengths):
    """(logits, cache) after the first `lengths` ids of each row."""
    cache, newest = model.init_cache(B, CAPACITY), np.zeros((B, model.config.vocab_size), np.float32)
    for first in range(0, int(lengths.max()), 16):
        logits, cache = feed(model, ids[:, first : first + 16], cache, np.clip(lengths - first, 0, 16))
        newest = np.where((lengths > first)[:, None], logits, newest)
    return newest, cache


def guesses(model, cache, token):
    return model.engine.draft(token, cache, GREEDY)


def speculate(model, tokens, offered, alive, cache):
    logits = jnp.zeros((B, K, model.config.vocab_size), jnp.float32)
    return model.engine.verify(tokens, offered, alive, logits, cache, GREEDY.next(), method="greedy")


def live_leaves(cache, length, row, cfg):
    """Every part of a row's cache that anything later reads, by position."""
    window = np.arange(max(0, length - cfg.sliding_window), length)
    ids = np.arange(max(0, length - cfg.engram_max_ngram_size + 1), length)
    yield "length", cache.length[row]
    yield "history", cache.history[row, ids % cache.history.shape[1]]
    for stage, ring in enumerate(cache.drafts):
        yield f"draft ring {stage}", ring[row, window % ring.shape[1]]
    for plan, layer in zip(cfg.layers, cache.layers, strict=True):
        yield f"window {plan.id}", layer.window[row, window % layer.window.shape[1]]
        if layer.main is not None:
            yield f"main {plan.id}", layer.main[row, : length // plan.ratio]
            yield f"index keys {plan.id}", layer.index_keys[row, : length // plan.ratio]
        if plan.ratio > 1 and layer.open_kv is not None:
            group = np.arange(length - length % plan.ratio, length) % layer.open_kv.shape[1]
            yield f"open kv {plan.id}", layer.open_kv[row, group]
            yield f"open gate {plan.id}", layer.open_gate[row, group]


def check_same(got, expected, cfg, atol=1e-5):
    """Caches of numpy leaves agree in every live place; `expected` gives each row's cache."""
    for row in range(B):
        length = int(expected(row).length[row])
        pairs = zip(live_leaves(got, length, row, cfg), live_leaves(expected(row), length, row, cfg), strict=True)
        for (name, one), (_, two) in pairs:
            np.testing.assert_allclose(one, two, atol=atol, err_msg=f"{name} of row {row}, length {length}")


def on_host(cache):
    """The cache with NumPy leaves."""
    plain = {name: np.array(getattr(cache, name)) for name in ("length", "history")}
    layers = [SimpleNamespace(**{k: v if v is None else np.array(v) for k, v in vars(x).items()}) for x in cache.layers]
    return SimpleNamespace(layers=layers, drafts=[np.array(ring) for ring in cache.drafts], **plain)


class Plain:
    """Greedy decoding one token at a time from prompts of given lengths: tokens, logits and caches of every step."""

    def __init__(self, model, ids, lengths, steps, every=True):
        logits, cache = prefilled(model, ids, lengths)
        self.logits, self.tokens, self.kept, self.caches = [logits], [], [cache.copy()], [on_host(cache)]
        for step in range(steps):
            self.tokens.append(self.logits[-1].argmax(axis=-1).astype(np.int32))
            logits, cache = feed(model, self.tokens[-1][:, None], cache)
            self.logits.append(logits)
            if every or step == steps - 1:
                self.kept.append(cache.copy())
                self.caches.append(on_host(cache))
        self.tokens = np.stack([*self.tokens, self.logits[-1].argmax(axis=-1).astype(np.int32)], axis=1)


def spoilt(tokens, accepted, vocab):
    """Drafts of which exactly `accepted` are right; what follows the wrong one is right again."""
    out = tokens.copy()
    rows = np.flatnonzero(accepted < out.shape[1])
    out[rows, accepted[rows]] = (out[rows, accepted[rows]] + 1) % vocab
    return out


@pytest.fixture(scope="module", params=[1, 17, 34])
def plain(request, tiny):
    """Rows start at 16 consecutive lengths from `param` on; the first set crosses the end of the first window."""
    ids = np.random.default_rng(request.param).integers(6, 288, (B, 64))
    return Plain(tiny, ids, request.param + np.arange(B) % W, 2 * K)


@pytest.mark.parametrize("offer", ["all", "one too many", "mixed with resting rows"])
def test_any_acceptance_leaves_the_cache_and_logits_of_plain_decoding(tiny, plain, offer):
    row, accepted = np.arange(B), np.arange(B) // W
    drafts = spoilt(plain.tokens[:, 1 : 1 + K], accepted, 288)
    offered = np.full(B, K) if offer == "all" else np.minimum(accepted + 1, K)
    alive = np.ones(B, bool)
    if offer == "mixed with resting rows":
        offered = np.where(row % 2, accepted, offered)
        alive = row % 5 != 0
    tokens = np.concatenate([plain.tokens[:, :1], drafts], axis=1).astype(np.int32)
    got, token, guessed, cache = speculate(tiny, tokens, offered.astype(np.int32), alive, plain.kept[0].copy())
    fed = np.where(alive, 1 + accepted, 0)
    np.testing.assert_array_equal(np.asarray(got)[alive], accepted[alive])
    np.testing.assert_array_equal(np.asarray(token)[alive], plain.tokens[row, fed][alive])
    check_same(on_host(cache), lambda r: plain.caches[fed[r]], tiny.config)

    for a in range(K + 1):
        drafts = guesses(tiny, plain.kept[1 + a], plain.tokens[:, 1 + a])
        mine = alive & (accepted == a)
        np.testing.assert_allclose(guessed.logits[mine], drafts.logits[mine], atol=1e-4)
        np.testing.assert_allclose(guessed.confidence[mine], drafts.confidence[mine], atol=1e-4)
        np.testing.assert_array_equal(guessed.ids[mine], drafts.ids[mine])
    for more in range(3):
        logits, cache = feed(tiny, plain.tokens[row, fed + more][:, None], cache)
        np.testing.assert_allclose(logits, np.stack(plain.logits, axis=1)[row, fed + more + 1], atol=2e-5)


def test_sixty_four_drafted_tokens_leave_the_cache_of_plain_decoding(tiny):  # batched state drifts step by step
    rng, total = np.random.default_rng(7), 64
    run = Plain(tiny, rng.integers(6, 288, (B, 48)), 1 + np.arange(B) % 40, total, every=False)
    cache, done, row = run.kept[0].copy(), np.zeros(B, int), np.arange(B)
    padded = np.pad(run.tokens, ((0, 0), (0, K)), constant_values=9)
    while (done < total).any():
        alive, room = done < total, np.clip(total - done - 1, 0, K)
        accepted = np.minimum(rng.integers(0, K + 1, B), room)
        drafts = spoilt(padded[row[:, None], done[:, None] + 1 + np.arange(K)], accepted, 288)
        tokens = np.concatenate([padded[row, done][:, None], drafts], axis=1).astype(np.int32)
        got, token, _, cache = speculate(tiny, tokens, room.astype(np.int32), alive, cache)
        np.testing.assert_array_equal(np.asarray(got)[alive], accepted[alive])
        done += np.where(alive, 1 + accepted, 0)
        np.testing.assert_array_equal(np.asarray(token)[alive], run.tokens[row, done][alive])
    # Calls of other widths round float32 sums differently, and 64 tokens pass it on: the bound of the golden vectors.
    check_same(on_host(cache), lambda _: run.caches[-1], tiny.config, atol=1e-4)


def random_prompts(seed, count=B):
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 288, int(rng.integers(1, 17))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(0)


@pytest.fixture(scope="module")
def endless(tiny):
    """The model with an EOS that it cannot say."""
    return altered(tiny, config=ending(tiny.config, NEVER))


@pytest.fixture(scope="module")
def truth(endless, prompts):
    """26 tokens of plain greedy generation."""
    rows = endless.generate(prompts, 26)
    assert {len(row) for row in rows} == {26}
    return rows


def test_greedy_output_is_the_plain_one_token_by_token(endless, prompts, truth):
    heard, steps = [[] for _ in prompts], []
    rows = endless.generate(
        prompts,
        26,
        draft=True,
        on_token=lambda row, token: heard[row].append(token),
        on_step=lambda offered, accepted: steps.append((offered.copy(), accepted.copy())),
    )
    assert rows == truth == heard
    assert all((accepted >= 0).all() and (accepted <= offered).all() for offered, accepted in steps)
    assert sum(int((1 + accepted).sum()) for _, accepted in steps) == B * 25  # all but the prefill's token


class Oracle(Programs):
    """Programs whose drafter knows the plain continuation, errs in a part of its guesses and half knows where."""

    def __init__(self, model, prompts, truth, wrong=0.0):
        width = max(map(len, prompts)) + len(truth[0]) + 2 * K
        self.text = np.full((B, width), 9, np.int32)
        for row, (prompt, more) in enumerate(zip(prompts, truth, strict=True)):
            self.text[row, : len(prompt) + len(more)] = prompt + more
        self.real, self.wrong, self.rng = model.engine.programs, wrong, np.random.default_rng(5)
        self.step, self.bind = self.real.step, self.real.bind

    def known(self, drafts, cache):
        at = np.asarray(cache.length)[:, None] + 1 + np.arange(K)  # the token behind the cache is known, drafts follow
        ids = np.take_along_axis(self.text, np.minimum(at, self.text.shape[1] - 1), axis=1)
        bad = self.rng.random(ids.shape) < self.wrong
        trust = np.where(bad, -1.0, 3.0) + self.rng.normal(0, 0.5, ids.shape)
        ids = np.where(bad, (ids + 1) % 288, ids).astype(np.int32)
        return replace(drafts, ids=jnp.asarray(ids), confidence=jnp.asarray(trust.astype(np.float32)))

    def draft(self, cache, *rest):
        return self.known(self.real.draft(cache, *rest), cache)

    def verify(self, *args, **named):
        found = self.real.verify(*args, **named)
        return found._replace(drafts=self.known(found.drafts, found.cache))


def knowing(model, prompts, truth, wrong=0.0, eos=None):
    config = model.config if eos is None else ending(model.config, eos)
    return altered(model, _programs=Oracle(model, prompts, truth, wrong), config=config)


@pytest.mark.parametrize("wrong", [0.0, 0.2, 0.5])
def test_greedy_output_is_the_plain_one_when_many_drafts_stand(endless, prompts, truth, wrong):
    counts = np.zeros(K + 1, int)

    def count(offered, accepted):
        counts[:] += np.bincount(accepted, minlength=K + 1)

    assert knowing(endless, prompts, truth, wrong).generate(prompts, 26, draft=True, on_step=count) == truth
    assert counts[K] > 0 and (wrong == 0 or (counts > 0).all())


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 6, 7, 8, 12, 13])
def test_the_limit_cuts_accepted_drafts(endless, prompts, truth, limit):
    model = knowing(endless, prompts, truth, 0.1)
    assert model.generate(prompts, limit, draft=True) == [row[:limit] for row in truth]


@pytest.mark.parametrize("place", range(8))
def test_eos_among_accepted_drafts_ends_its_row_there(endless, prompts, truth, place):  # tokens kept after the end
    eos = next(row[place] for row in truth if row.index(row[place]) == place)
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in truth]
    rested, heard = [], [[] for _ in prompts]
    model = knowing(endless, prompts, truth, eos=eos)
    rows = model.generate(
        prompts, 26, draft=True, on_step=lambda o, _: rested.append(len(o)), on_token=lambda r, t: heard[r].append(t)
    )
    assert rows == heard == expected
    assert rested[-1] < B


FREE, DEAR = CostTable((1, 1000), (1.0, 1.0), 0.1), CostTable((1, B, 1000), (0.01, 1.0, 1000.0), 0.1)
LEAP = CostTable((1, 2, 3), (1.0, 1.9, 1.95), 0.0)


@pytest.mark.parametrize(("cost", "most"), [(FREE, K), pytest.param(DEAR, 0, marks=pytest.mark.slow)])
def test_adaptive_verification_keeps_the_greedy_output(endless, prompts, truth, cost, most):
    offers = []
    model = knowing(endless, prompts, truth)
    limit = 1 + 2 * (K + 1)
    assert model.generate(prompts, limit, draft=True, cost=cost, on_step=lambda o, _: offers.append(o)) == [
        row[:limit] for row in truth
    ]
    assert {int(o) for step in offers for o in step} == {most}
    assert len(offers) == (2 if most else limit - 1)


@pytest.mark.parametrize(("stale", "current", "offered"), [((0.8, 0.76), (0.8, 0.0), 2), ((0.8, 0.0), (0.8, 0.76), 0)])
def test_the_budget_comes_from_the_step_before(small, stale, current, offered):
    engine = Drafted(small.engine, "greedy", LEAP)
    most = np.array([0, 2], np.int32)  # the first row rests; it neither takes part in the budget nor gets an offer
    both = np.array([[1.0, 1.0], current]), np.array([[1.0, 1.0], stale])
    assert engine.offer(*both, most, most > 0).tolist() == [0, offered]
    # With one draft left to use, the second cannot make the leap pay: (1 + 0.8) / 1.9 is less than 1 / 1.
    assert engine.offer(*both, np.array([0, 1], np.int32), most > 0).tolist() == [0, 0]
    assert Drafted(small.engine, "greedy").offer(*both, most, most > 0).tolist() == [0, 2]


def test_what_cannot_be_drafted_is_refused(tiny, small):
    for model, options, rule in (
        (small, {}, "draft: [^\n]*num_nextn_predict_layers 0"),
        (tiny, {"verify": "greedy"}, "verify: 'greedy' is not one of"),
        (tiny, {"verify": "fly"}, "verify: 'fly' is not one of"),
        (tiny, {"temperature": -1.0}, "temperature: "),
    ):
        with pytest.raises(ValueError, match=rf"^{rule}[^\n]*$"):
            model.generate([[1, 2]], 3, draft=True, **options)
    with pytest.raises(ValueError, match=r"^cost table: [^\n]*$"):
        tiny.generate([[1, 2]], 3, draft=True, cost=CostTable((2, 1), (1.0, 2.0), 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["standard", "block"])
def test_sampled_output_has_the_targets_distribution_and_a_seed_fixes_it(tiny, verify):
    prompt, bins, warmth = [0, 40, 41, 42], 12, 0.8
    logits, cache = prefilled(tiny, np.tile(prompt, (B, 1)), np.full(B, 4))

    def soft(x):
        e = np.exp((x.astype(np.float64) - x.max(axis=-1, keepdims=True)) / warmth)
        return e / e.sum(axis=-1, keepdims=True)

    first, second = soft(logits[0]), np.zeros(288)
    for low in range(0, 288, B):  # every first token, three batches of 96
        after, _ = feed(tiny, np.arange(low, low + B)[:, None], cache.copy())
        second += first[low : low + B] @ soft(after)
    options = {"draft": True, "verify": verify, "temperature": warmth}
    runs = [tiny.generate([prompt] * B, 8, seed=seed, **options) for seed in range(20)]
    assert tiny.generate([prompt] * B, 8, seed=3, **options) == runs[3]
    assert runs[3] != runs[4]
    drawn = np.array([row[:2] for run in runs for row in run if len(row) > 1])
    for place, p in enumerate((first, second)):
        group = np.argsort(np.argsort(p)) * bins // 288
        seen = np.bincount(group[drawn[:, place]], minlength=bins)
        expected = np.bincount(group, weights=p, minlength=bins)
        assert chisquare(seen, expected / expected.sum() * seen.sum()).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 9))
def test_greedy_output_is_the_plain_one_at_every_block_size(tiny, block):
    cfg = tiny.config.replace(dspark_block_size=block)
    model = Model(cfg, tiny.params, numerics="float32", engram=tiny.engram)
    assert init_cache(cfg, 1, 16, model.numerics).drafts[0].shape[1] == W + block
    prompts = random_prompts(block, 200)
    plain = model.generate(prompts, 24)
    assert model.generate(prompts, 24, draft=True) == plain
    if block == 1:
        assert model.generate(prompts[:B], 24, draft=True) == tiny.generate(prompts[:B], 24)


@pytest.mark.slow
def test_adaptive_verification_of_every_width_keeps_the_greedy_output(endless, prompts, truth):
    cost, widths = CostTable((96, 144, 192, 600), (1.0, 1.05, 1.15, 6.0), 0.05), []
    model = knowing(endless, prompts, truth, 0.3)
    rows = model.generate(prompts, 26, draft=True, cost=cost, on_step=lambda o, _: widths.append(o.copy()))
    assert rows == truth
    assert len({int(o) for step in widths for o in step}) > 2
