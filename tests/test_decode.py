"""Generation: chunks, greedy decoding, stopping, sampling, and a fixed number of compiled shapes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compilations, small_config

from dsv41_jax.engine.chunks import BUCKETS, cuts
from dsv41_jax.engine.decode import decode
from dsv41_jax.engine.engine import Engine
from dsv41_jax.engine.sampling import Draws, Sampling, nucleus, sample
from dsv41_jax.nn.rope import layer_frequencies
from dsv41_jax.nn.transformer import Output
from dsv41_jax.numerics import numerics_by_name

CAPACITY = 48
EOS, PAD = 7, 0
PROMPTS = [[5], [3, 250, 11, 47, 4, 4, 100, 101, 102, 103, 17]]


@pytest.mark.parametrize("length", [*range(1, 20), 127, 128, 129, 144, 511, 512, 513, 1024, 1025, 1300])
def test_chunks_cover_any_length_exactly(length):
    covered, padding = 0, 0
    for first, bucket in cuts(length):
        assert first == covered
        assert bucket in BUCKETS
        assert padding == 0  # only the last chunk may be padded
        covered, padding = min(first + bucket, length), max(first + bucket - length, 0)
    assert covered == length
    smaller = [b for b in BUCKETS if b < bucket]
    assert all(b < length - first for b in smaller)


def test_no_tokens_need_no_chunk():
    assert cuts(0) == []


def greedy_by_forward(small, prompts, count):
    """The arg max of a full forward pass over everything so far, `count` times."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(count):
        lengths = np.array([len(row) for row in rows])
        padded = np.zeros((len(rows), lengths.max()), np.int32)
        for row, ids in enumerate(rows):
            padded[row, : len(ids)] = ids
        logits, _, _ = small.step(padded, small.init_cache(len(rows), CAPACITY), lengths=lengths)
        for row, ids in enumerate(rows):
            ids.append(int(np.asarray(logits)[row, lengths[row] - 1].argmax()))
    return [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]


def test_greedy_equals_the_argmax_of_full_forward_passes(small):  # a step that ignores the prompt's entries
    together = small.generate(PROMPTS, 16)
    expected = greedy_by_forward(small, PROMPTS, 16)
    for row, ids in enumerate(expected):
        stop = ids.index(small.config.eos_token_id) + 1 if small.config.eos_token_id in ids else 16
        assert together[row] == ids[:stop]


def test_each_row_equals_generating_it_alone(small):  # offsets of later rows counted twice
    together = small.generate(PROMPTS, 12)
    assert small.generate(PROMPTS[:1], 12) == together[:1]
    for prompt, ids in zip(PROMPTS, together, strict=True):
        assert small.generate([prompt, prompt], 12) == [ids, ids]


def test_a_temperature_that_is_tiny_is_greedy(small):
    assert small.generate(PROMPTS, 8, temperature=1e-6, seed=3) == small.generate(PROMPTS, 8)


def test_a_seed_fixes_the_output(small):
    first, again, other = (small.generate(PROMPTS, 12, temperature=1.0, top_p=0.95, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_new_ids_are_plain_integers(small):
    assert all(type(i) is int for row in small.generate(PROMPTS, 2) for i in row)


class Script(Engine):
    """An engine whose rows say a fixed text each, whatever they are given; it keeps what it was called with."""

    def __init__(self, texts, vocabulary=12):
        self.config = small_config(engram_layer_ids=[], engram_num_embeddings=[], pad_token_id=PAD)
        self.numerics, self.engram = numerics_by_name("float32"), None
        self.texts, self.vocabulary, self.calls = texts, vocabulary, []

    programs = None

    def run(self, chunk, cache, **_):
        self.calls.append((np.array(chunk.call.tokens), np.array(chunk.count)))
        logits = np.full((len(self.texts), self.vocabulary), -1.0, np.float32)
        for row, text in enumerate(self.texts):
            logits[row, text[min(len(self.calls) - 1, len(text) - 1)]] = 5.0
        return Output(jnp.asarray(logits), replace(cache, length=cache.length + chunk.count), {})


def run_script(texts, prompts, limit, on_token=None):
    script = Script(texts)

    def start():
        return script.prefill(prompts, script.init_cache(len(prompts), 2048))

    sampling = Sampling(max_new_tokens=limit, eos=EOS)
    return decode(script, start, len(prompts), sampling, on_token=on_token), script


def test_eos_stops_its_row_and_is_kept_while_others_go_on():
    rows, script = run_script([[1, EOS, 9, 9, 9], [2, 3, 4, 5, EOS, 9]], [[1], [1]], 20)
    assert rows == [[1, EOS], [2, 3, 4, 5, EOS]]
    assert len(script.calls) == 5  # the prefill and four decode steps; none after the last row stopped
    fed = [(tokens[:, 0].tolist(), count.tolist()) for tokens, count in script.calls[1:]]
    assert fed == [([1, 2], [1, 1]), ([PAD, 3], [0, 1]), ([PAD, 4], [0, 1]), ([PAD, 5], [0, 1])]


def test_eos_as_the_first_token_ends_generation_at_once():
    rows, script = run_script([[EOS], [EOS]], [[1], [2]], 20)
    assert rows == [[EOS], [EOS]]
    assert len(script.calls) == 1


def test_the_limit_cuts_every_row_and_needs_no_step_more():
    rows, script = run_script([[1, 2, 3, 4], [5, 6, 8, 9]], [[1], [2]], 3)
    assert rows == [[1, 2, 3], [5, 6, 8]]
    assert len(script.calls) == 3


def test_tokens_are_reported_as_they_come_in_row_order():
    seen = []
    run_script([[1, 2, EOS], [5, EOS], [8, 9, 10]], [[1], [2], [3]], 3, on_token=lambda row, i: seen.append((row, i)))
    assert seen == [(0, 1), (1, 5), (2, 8), (0, 2), (1, EOS), (2, 9), (0, EOS), (2, 10)]


@pytest.mark.parametrize("lengths", [(1, 1), (3, 20), (130, 2), (17, 700)])
def test_prefill_feeds_every_prompt_token_once_in_order(lengths):
    prompts = [np.random.default_rng(n).integers(1, 12, n).tolist() for n in lengths]
    _, script = run_script([[1], [2]], prompts, 1)
    fed = [[], []]
    for tokens, count in script.calls:
        assert tokens.shape[1] >= count.max()
        for row in range(2):
            fed[row] += tokens[row, : count[row]].tolist()
    assert fed == prompts


def test_the_first_token_follows_each_rows_own_last_prompt_token():
    texts = [[1, 9, 9], [9, 9, 2]]  # row 0 ends in the first chunk, row 1 in the third
    rows, script = run_script(texts, [[5] * 512, [5] * 1100], 1)
    assert len(script.calls) == 3
    assert rows == [[1], [2]]


def test_no_new_tokens_need_no_step(small):
    rows, script = run_script([[1], [2]], [[1], [2]], 0)
    assert rows == [[], []]
    assert script.calls == []
    assert small.generate(PROMPTS, 0) == [[], []]


# Sampling: exact probabilities, chi-square at the 1e-4 quantile.

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
CHI2 = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74}


def draws(seed, step, temperature=1.0, top_p=1.0):
    sampling = Sampling(max_new_tokens=1, eos=EOS, temperature=temperature, top_p=top_p, seed=seed)
    return replace(Draws.first(sampling), step=step)


def softmax64(logits):
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


def nucleus64(logits, top_p):
    """Probabilities within the smallest set of most probable tokens that reaches top_p, by a loop."""
    p, kept, total = softmax64(logits), [], 0.0
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if total >= top_p:
            break
        kept.append(i)
        total += p[i]
    return np.where(np.isin(np.arange(len(p)), kept), p, 0) / p[kept].sum()


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.56, 0.75, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [3, 5, 0, 4, 1, 2]])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, order):
    logits = LOGITS[order]
    kept = np.asarray(nucleus(jnp.asarray(logits)[None], top_p))[0]
    expected = nucleus64(logits, top_p) > 0
    np.testing.assert_array_equal(np.isfinite(kept), expected)
    np.testing.assert_array_equal(kept[expected], logits[expected])
    assert (kept[~expected] == -np.inf).all()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.75), (1.7, 0.9)])
def test_draws_have_the_exact_distribution(temperature, top_p):
    rows = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (rows, 6))
    p = nucleus64(LOGITS / np.float32(temperature), top_p)
    live = p > 0
    for step in (0, 5):
        ids = np.asarray(sample(logits, draws(11, step, temperature, top_p)))
        counts = np.bincount(ids, minlength=6)
        assert counts[p == 0].sum() == 0
        statistic = ((counts - rows * p)[live] ** 2 / (rows * p[live])).sum()
        assert statistic < CHI2[live.sum() - 1]


def test_steps_of_one_row_are_independent_draws():
    pairs = np.zeros((6, 6))
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[:6]), (5000, 6))
    first, second = (np.asarray(sample(logits, draws(0, s))) for s in (0, 1))
    np.add.at(pairs, (first, second), 1)
    p = softmax64(LOGITS)
    expected = 5000 * np.outer(p, p)
    likely = expected > 5
    statistic = ((pairs - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < likely.sum() + 4 * np.sqrt(2 * likely.sum())


def test_a_seed_draws_what_gumbel_noise_on_the_logits_draws():  # so that a seed of an earlier release stays its text
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32))
    for step in range(5):
        key = jax.random.key(9)
        keys = [jax.random.fold_in(jax.random.fold_in(key, row), step) for row in range(4)]
        noise = jnp.stack([jax.random.gumbel(k, (50,)) for k in keys])
        expected = jnp.argmax(nucleus(logits / 0.7, 0.9) + noise, axis=-1)
        assert sample(logits, draws(9, step, 0.7, 0.9)).tolist() == expected.tolist()


def test_a_rows_draw_does_not_depend_on_the_other_rows():
    rng = np.random.default_rng(0)
    logits, other = rng.standard_normal((2, 3, 50)).astype(np.float32)
    other[1] = logits[1]
    for step in range(20):
        drawn = [sample(jnp.asarray(a), draws(5, step, top_p=0.9))[1] for a in (logits, other)]
        assert drawn[0] == drawn[1]


def test_greedy_takes_the_lower_id_of_equals():
    logits = jnp.array([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    assert sample(logits, Draws.first(Sampling(max_new_tokens=1, eos=EOS))).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: -1"),
        ({"temperature": -0.1}, r"temperature: -0\.1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"top_p": 0.0}, r"top_p: 0\.0"),
        ({"top_p": 1.5}, r"top_p: 1\.5"),
        ({"top_p": float("nan")}, "top_p: nan"),
        ({"prompts": []}, "prompts: none given"),
        ({"prompts": [[1], []]}, "prompts: number 1 is empty"),
        ({"prompts": [[1, 288]]}, "tokens: id 288"),
        ({"prompts": [[1, -1]]}, "tokens: id -1"),
        ({"prompts": ["text"]}, "prompts: text needs a tokenizer"),
        ({"max_new_tokens": 4090}, r"tokens: 4101 positions exceed max_position_embeddings 4096"),
    ],
)
def test_bad_arguments_raise_one_line(small, options, message):
    given = {"prompts": PROMPTS, "max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        small.generate(**given)


# Compilations and positions.


def test_no_length_and_no_step_compiles_anything_new(small):  # growing shapes, and Python integers in a trace
    for first in (1, 2):  # the buckets 1 and 16 that two rows need
        small.generate([[5] * first, [1]], 2)

    def every_length():
        for length in range(1, 17):
            small.generate([list(range(1, length + 1)), [1]], 2)
        small.generate([[8, 9], [4] * 15], 50)

    assert compilations(lambda: jax.jit(lambda x: x * 3.0)(1.0)) == 1  # the counter counts
    assert compilations(every_length) == 0


def test_decode_positions_advance(small):  # a position baked in as a constant repeats the first
    cache, rows = small.init_cache(2, CAPACITY), []
    for position in range(CAPACITY):
        _, cache, _ = small.step(np.array([[21], [21]]), cache)
        rows.append(np.asarray(cache.layers[0].window)[0, position % 8].astype(np.float64))
    freqs = layer_frequencies(small.config, 0).astype(np.float64)
    still, turning = len(rows[0]) - 2 * len(freqs), rows[0][-2 * len(freqs) :]  # position 0 is not rotated
    for position, row in enumerate(rows):
        np.testing.assert_allclose(row[:still], rows[0][:still], atol=1e-6)
        turned = (turning[0::2] + 1j * turning[1::2]) * np.exp(1j * position * freqs)
        np.testing.assert_allclose(row[still::2] + 1j * row[still + 1 :: 2], turned, atol=1e-5)
    assert len({row.tobytes() for row in rows}) == CAPACITY


# What `step` and `generate` accept.


@pytest.mark.parametrize(
    ("bad", "lengths", "message"),
    [
        (np.zeros((2, 3)), None, "tokens: float64 of shape"),
        (np.zeros(3, int), None, r"tokens: int64 of shape \(3,\)"),
        (np.zeros((2, 0), int), None, r"tokens: int64 of shape \(2, 0\)"),
        (np.full((2, 3), 288), None, "tokens: id 288 is outside 0..287"),
        (np.full((2, 3), -1), None, "tokens: id -1 is outside 0..287"),
        (np.zeros((2, 3), int), np.array([1]), r"lengths: \[1\]"),
        (np.zeros((2, 3), int), np.array([4, 1]), r"lengths: \[4, 1\]"),
        (np.zeros((2, 3), int), np.array([-1, 1]), r"lengths: \[-1, 1\]"),
        (np.zeros((2, 3), int), np.array([1.5, 1.0]), "lengths: "),
        (np.zeros((3, 3), int), None, "cache: holds 2 rows, tokens have 3"),
    ],
)
def test_bad_inputs_raise_one_line_and_leave_the_cache(small, bad, lengths, message):
    cache = small.init_cache(2, CAPACITY)
    with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
        small.step(bad, cache, lengths=lengths)
    assert cache.length.tolist() == [0, 0]


def test_tokens_and_lengths_may_be_nested_lists(small):
    logits, _, _ = small.step([[5], [6]], small.init_cache(2, CAPACITY), lengths=[1, 0])
    assert logits.shape == (2, 1, 288)


@pytest.mark.parametrize("start", [4, 5])
def test_entry_taps_of_a_step_hold_every_entry_it_finishes(small, start):
    tokens = np.random.default_rng(start).integers(0, 288, (2, start + 3))
    _, cache, _ = small.step(tokens[:, :start], small.init_cache(2, CAPACITY))
    _, cache, seen = small.step(tokens[:, start:], cache, taps=["layers.1.main_kv"])
    finished = np.asarray(cache.layers[1].main)[:, start // 2 : (start + 3) // 2]
    np.testing.assert_array_equal(seen["layers.1.main_kv"], finished)
