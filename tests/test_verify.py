"""Acceptance rules: the target's distribution exactly, worked examples, and expected lengths in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from dsv41_jax.engine.verify import verify_block, verify_greedy, verify_standard

K, V, DRAWS = 3, 3, 1_000_000
RULES = {"standard": jax.jit(verify_standard), "block": jax.jit(verify_block)}
RULE = pytest.mark.parametrize("rule", list(RULES))
OFFERS = {"all": [K], "fewer": [2], "none": [0], "mixed": [0, 1, 2, 3]}


def trees(rng, zeros=False):
    """Distributions behind each context of 0..K tokens: [3^i, 3] for i = 0..K; `zeros` forbids one token in each."""
    out = []
    for depth in range(K + 1):
        p = rng.dirichlet(np.full(V, 0.7), V**depth) + 0.02
        if zeros:
            p[np.arange(len(p)), rng.integers(0, V, len(p))] = 0
        out.append(p / p.sum(axis=-1, keepdims=True))
    return out


def walk(tree, rng, count, prefix=None, fixed=None):
    """Draw sequences of len(tree) tokens; the first `fixed` tokens of each row stay those of `prefix`."""
    context, ids = np.zeros(count, np.int64), []
    for depth, p in enumerate(tree):
        drawn = (rng.random(count)[:, None] > np.cumsum(p, axis=1)[context, :-1]).sum(axis=1)
        drawn = drawn if fixed is None else np.where(depth < fixed, prefix[:, depth], drawn)
        context = context * V + drawn
        ids.append(drawn)
    return np.stack(ids, axis=1).astype(np.int32)


def along(tree, drafts):
    """The distributions that a model computes behind 0, 1, ... of these drafts."""
    context, rows = np.zeros(len(drafts), np.int64), []
    for depth, p in enumerate(tree):
        rows.append(p[context].astype(np.float32))
        context = context * V + drafts[:, min(depth, drafts.shape[1] - 1)]
    return np.stack(rows, axis=1)


def exact(tree):
    """Probability of every sequence of len(tree) tokens, in base-3 order."""
    joint = np.ones(1)
    for p in tree:
        joint = (joint[:, None] * p).ravel()
    return joint


def simulate(rule, target, source, offered, seed=0):
    """(first K + 1 tokens of every run, accepted lengths): a step's output, then plain draws from the target."""
    rng = np.random.default_rng(seed)
    drafts = walk(source[:K], rng, DRAWS)
    offered = np.resize(np.array(offered, np.int32), DRAWS)
    uniforms = rng.random((DRAWS, K), dtype=np.float32)
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    accepted, token = map(
        np.array, RULES[rule](along(target, drafts), along(source[:K], drafts), drafts, offered, uniforms, keys)
    )
    assert (accepted >= 0).all() and (accepted <= offered).all()
    emitted = np.concatenate([drafts, np.zeros((DRAWS, 1), np.int32)], axis=1)
    emitted[np.arange(DRAWS), accepted] = token
    return walk(target, rng, DRAWS, emitted, accepted + 1), accepted


def check_distribution(sequences, tree):
    codes = sequences @ V ** np.arange(K, -1, -1)
    seen, expected = np.bincount(codes, minlength=V ** (K + 1)), exact(tree)
    assert (seen[expected == 0] == 0).all()
    live = expected > 0
    assert chisquare(seen[live], expected[live] / expected[live].sum() * len(codes)).pvalue > 1e-3


@pytest.fixture(scope="module")
def models():
    rng = np.random.default_rng(5)
    return trees(rng), trees(rng)


@RULE
@pytest.mark.parametrize("offer", list(OFFERS))
def test_sequences_have_the_targets_distribution(models, rule, offer):
    target, source = models
    sequences, _ = simulate(rule, target, source, OFFERS[offer], seed=len(offer))
    check_distribution(sequences, target)


@RULE
def test_tokens_that_the_target_forbids_are_never_emitted(rule):
    rng = np.random.default_rng(8)
    target, source = trees(rng, zeros=True), trees(rng, zeros=True)
    sequences, _ = simulate(rule, target, source, OFFERS["mixed"], seed=3)
    check_distribution(sequences, target)


@RULE
def test_one_hot_drafts_keep_the_targets_distribution(models, rule):
    target, source = models[0], [np.eye(V)[p.argmax(axis=-1)] for p in models[1]]
    sequences, _ = simulate(rule, target, source, OFFERS["mixed"], seed=4)
    check_distribution(sequences, target)


def expected_lengths(target, source):
    """Mean accepted length in closed form. A draft prefix x of length i has probability M_s(x); it stands with
    prod min(1, M_b / M_s) under standard rejection, and with p_i = min(p_{i-1} M_b / M_s, 1) under block rejection."""
    drawn, standard, block = np.ones(1), np.ones(1), np.ones(1)
    total = {"standard": 0.0, "block": 0.0}
    for b, s in zip(target[:K], source[:K], strict=True):
        drawn = (drawn[:, None] * s).ravel()
        standard = (standard[:, None] * np.minimum(b / s, 1)).ravel()
        block = np.minimum(block[:, None] * b / s, 1).ravel()
        total["standard"] += drawn @ standard
        total["block"] += drawn @ block
    return total


def test_accepted_lengths_have_their_exact_means_and_block_accepts_more(models):
    expected, mean = expected_lengths(*models), {}
    assert expected["block"] > expected["standard"] + 0.02
    for rule in RULES:
        _, accepted = simulate(rule, *models, [K], seed=6)
        mean[rule] = accepted.mean()
        assert abs(mean[rule] - expected[rule]) < 4.5 * accepted.std() / DRAWS**0.5
    assert mean["block"] > mean["standard"]


@RULE
def test_equal_distributions_accept_all_that_is_offered(rule):
    rng = np.random.default_rng(1)
    target = rng.dirichlet(np.ones(7), (40, K + 1)).astype(np.float32)
    drafts, offered = rng.integers(0, 7, (40, K)).astype(np.int32), np.arange(40, dtype=np.int32) % (K + 1)
    largest = np.full((40, K), np.nextafter(np.float32(1), np.float32(0)))
    accepted, _ = RULES[rule](target, target[:, :K], drafts, offered, largest, jax.random.split(jax.random.key(0), 40))
    np.testing.assert_array_equal(accepted, offered)


@RULE
def test_what_lies_past_the_offered_drafts_changes_nothing(rule):
    rng = np.random.default_rng(2)
    target, draft = (rng.dirichlet(np.ones(5), (64, n)).astype(np.float32) for n in (K + 1, K))
    drafts, uniforms = rng.integers(0, 5, (64, K)).astype(np.int32), rng.random((64, K), dtype=np.float32)
    offered, keys = np.arange(64, dtype=np.int32) % K, jax.random.split(jax.random.key(1), 64)
    first = RULES[rule](target, draft, drafts, offered, uniforms, keys)
    past = np.arange(K) >= offered[:, None]
    other = np.where(past, (drafts + 1) % 5, drafts).astype(np.int32)
    moved = np.where(past[..., None], draft[::-1], draft)
    behind = np.concatenate([np.zeros((64, 1), bool), past], axis=1)
    behind = np.where(behind[..., None], target[::-1], target)
    second = RULES[rule](behind, moved, other, offered, np.where(past, 1 - uniforms, uniforms), keys)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)


def judge(rule, target, draft, drafts, uniforms, offered=None):
    """(accepted, the set of next tokens over 64 keys) of one row."""
    rows = 64

    def tile(x, dtype):
        return np.repeat(np.array([x], dtype), rows, axis=0)

    accepted, token = RULES[rule](
        tile(target, np.float32),
        tile(draft, np.float32),
        tile(drafts, np.int32),
        np.full(rows, len(drafts) if offered is None else offered, np.int32),
        tile(uniforms, np.float32),
        jax.random.split(jax.random.key(9), rows),
    )
    assert len(set(np.asarray(accepted).tolist())) == 1
    return int(accepted[0]), set(np.asarray(token).tolist())


@RULE
@pytest.mark.parametrize(
    ("draft", "uniform", "accepted", "tokens"),
    [
        (0, 0.9999, 1, {0}),  # 0.7 / 0.5 > 1: always stands; the bonus position only has token 0
        (1, 0.5999, 1, {0}),  # 0.3 / 0.5 = 0.6
        (1, 0.6001, 0, {0}),  # the residual max(M_b - M_s, 0) = (0.2, 0)
    ],
)
def test_one_draft_stands_below_the_ratio(rule, draft, uniform, accepted, tokens):
    target = [[0.7, 0.3], [1.0, 0.0]]
    assert judge(rule, target, [[0.5, 0.5]], [draft], [uniform]) == (accepted, tokens)


# M_b = (0.8, 0.2) then (0.9, 0.1) then only token 1; M_s = (0.4, 0.6) then (0.1, 0.9); drafts (1, 1).
#   ratios 1/3 and 1/9; p_1 = 1/3, p_2 = 1/27; S_1 = 0.9/3 - 0.1 = 0.2, h_1 = 0.2 / (0.2 + 2/3) = 3/13;
#   h_2 = p_2
DEEP = ([[0.8, 0.2], [0.9, 0.1], [0.0, 1.0]], [[0.4, 0.6], [0.1, 0.9]])


@pytest.mark.parametrize(
    ("rule", "drafts", "uniforms", "accepted", "tokens"),
    [
        ("standard", [1, 1], [0.3333, 0.1111], 2, {1}),
        ("standard", [1, 1], [0.3333, 0.1112], 1, {0}),  # residual (0.8, 0)
        ("standard", [1, 1], [0.3334, 0.0], 0, {0}),  # a later draft cannot stand without the earlier one
        ("standard", [1, 0], [0.3334, 0.0], 0, {0}),
        ("block", [1, 1], [0.2307, 0.5], 1, {0}),  # residual max(p_1 M_b - M_s, 0) = (0.2, 0)
        ("block", [1, 1], [0.2308, 0.5], 0, {0}),
        ("block", [1, 1], [0.99, 0.0370], 2, {1}),  # the largest i counts, not the first failure
        ("block", [1, 1], [0.99, 0.0371], 0, {0}),
        ("block", [1, 0], [0.99, 0.9999], 2, {1}),  # p_2 = min(1/3 * 9, 1) = 1
    ],
)
def test_two_drafts_by_hand(rule, drafts, uniforms, accepted, tokens):
    assert judge(rule, *DEEP, drafts, uniforms) == (accepted, tokens)


def test_a_block_of_one_offered_draft_uses_its_own_ratio_not_its_followers():
    target, draft = DEEP  # offered 1: h_1 = p_1 = 1/3, and behind it M_b itself, both tokens of it
    assert judge("block", target, draft, [1, 1], [0.3333, 0.0], offered=1) == (1, {0, 1})
    assert judge("block", target, draft, [1, 1], [0.3334, 0.0], offered=1) == (0, {0})
    assert judge("block", target, draft, [1, 1], [0.0, 0.0], offered=0) == (0, {0, 1})


@RULE
def test_a_one_hot_draft_stands_with_the_targets_probability(rule):
    target, draft = [[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]], [[0.0, 1.0, 0.0]]
    assert judge(rule, target, draft, [1], [0.4999]) == (1, {2})
    assert judge(rule, target, draft, [1], [0.5001]) == (0, {0, 2})


@pytest.mark.parametrize(
    ("drafts", "offered", "accepted", "token"),
    [
        ([2, 0, 1], 3, 3, 3),  # all stand, and one more
        ([2, 0, 0], 3, 2, 1),
        ([2, 3, 1], 3, 1, 0),  # a later match does not count
        ([0, 0, 1], 3, 0, 2),
        ([2, 0, 1], 2, 2, 1),  # the third is not offered
        ([2, 0, 1], 0, 0, 2),
    ],
)
def test_greedy_accepts_up_to_the_first_difference_from_the_argmax(drafts, offered, accepted, token):
    logits = np.zeros((1, 4, 4), np.float32)
    for place, best in enumerate([2, 0, 1, 3]):
        logits[0, place, best] = 1e-3
    got = verify_greedy(jnp.asarray(logits), jnp.array([drafts], jnp.int32), jnp.array([offered], jnp.int32))
    assert [int(x[0]) for x in got] == [accepted, token]


def test_greedy_takes_the_lower_id_of_equal_logits():
    logits = jnp.zeros((1, 2, 4), jnp.float32).at[0, :, jnp.array([1, 3])].set(5.0)
    for draft, accepted in ((1, 1), (3, 0)):
        got = verify_greedy(logits, jnp.array([[draft]], jnp.int32), jnp.array([1], jnp.int32))
        assert [int(x[0]) for x in got] == [accepted, 1]
