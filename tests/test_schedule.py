"""Adaptive verification: costs, the budget against brute force, allocation of prefixes, and why the budget is stale."""

import jax
import numpy as np
import pytest

from dsv41_jax.engine.schedule import CostTable, allocate, budget, survival
from dsv41_jax.engine.verify import verify_standard

TABLE = CostTable((2, 4, 8), (1.0, 1.5, 2.5), 0.25)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 1.25), (1, 1.25), (2, 1.25), (3, 1.75), (4, 1.75), (5, 2.75), (8, 2.75), (9, 3.0), (12, 3.75), (108, 27.75)],
)
def test_cost_is_a_step_function_and_goes_on_with_the_last_slope(tokens, seconds):
    assert TABLE.cost(np.array([tokens]))[0] == pytest.approx(seconds, rel=1e-12)


def test_cost_never_falls_even_if_the_measurements_do():
    table = CostTable((1, 2, 3, 4), (1.0, 3.0, 2.0, 2.5), 0.0)
    np.testing.assert_allclose(table.cost(np.arange(1, 9)), [1, 3, 3, 3, 3, 3, 3, 3])
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = np.sort(rng.choice(np.arange(1, 200), 6, replace=False))
        table = CostTable(tuple(sizes.tolist()), tuple(rng.uniform(0.1, 2, 6).tolist()), float(rng.uniform(0, 1)))
        assert (np.diff(table.cost(np.arange(0, 400))) >= 0).all()


def test_a_single_measurement_is_extrapolated_in_proportion():
    np.testing.assert_allclose(CostTable((4,), (2.0,), 1.0).cost(np.array([1, 4, 8])), [3.0, 3.0, 5.0])


@pytest.mark.parametrize(
    ("tokens", "verify", "draft"),
    [
        ((), (), 0.0),
        ((1, 2), (1.0,), 0.0),
        ((2, 1), (1.0, 2.0), 0.0),
        ((1, 1), (1.0, 2.0), 0.0),
        ((1, 2), (1.0, -2.0), 0.0),
        ((1, 2), (0.0, 1.0), 0.0),
        ((1, 2), (1.0, 2.0), -0.1),
    ],
)
def test_bad_tables_are_refused_in_one_line(tokens, verify, draft):
    with pytest.raises(ValueError, match=r"^cost table: [^\n]*$"):
        CostTable(tokens, verify, draft)


def test_survival_is_the_running_product_of_probabilities():
    confidence = np.array([[0.0, 0.0, np.log(3.0)], [np.log(9.0), -np.log(3.0), 0.0]], np.float32)
    np.testing.assert_allclose(survival(confidence), [[0.5, 0.25, 0.1875], [0.9, 0.225, 0.1125]], rtol=1e-6)


def test_survival_of_extreme_logits_is_zero_or_one_without_a_warning():
    np.testing.assert_array_equal(survival(np.array([[1000.0, -1000.0, 1000.0]])), [[1.0, 0.0, 0.0]])


def best_by_hand(stale, table):
    """The budget by its words: try every B and keep the first best rate."""
    sizes, costs = list(table.tokens), list(table.verify)
    running = [max(costs[: i + 1]) for i in range(len(costs))]

    def cost(tokens):
        for size, seconds in zip(sizes, running, strict=True):
            if tokens <= size:
                return table.draft + seconds
        slope = (running[-1] - running[-2]) / (sizes[-1] - sizes[-2])
        return table.draft + running[-1] + slope * (tokens - sizes[-1])

    values = sorted((float(v) for row in stale for v in row), reverse=True)
    rates = [(len(stale) + sum(values[:b])) / cost(len(stale) + b) for b in range(len(values) + 1)]
    return rates.index(max(rates)), rates


@pytest.mark.parametrize("seed", range(40))
def test_budget_equals_brute_force_over_all_sizes(seed):
    rng = np.random.default_rng(seed)
    requests, block = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    stale = np.cumprod(rng.beta(4, 1, (requests, block)), axis=1)
    sizes = np.sort(rng.choice(np.arange(1, 60), 5, replace=False))
    costs = np.cumsum(rng.uniform(0.01, 1, 5)) + 0.5
    table = CostTable(tuple(sizes.tolist()), tuple(costs.tolist()), float(rng.uniform(0, 2)))
    expected, rates = best_by_hand(stale, table)
    got = budget(stale, table)
    assert rates[got] == pytest.approx(rates[expected], rel=1e-12)
    assert got == expected


def test_budget_verifies_all_when_tokens_are_free_and_none_when_drafts_cannot_stand():
    stale = np.cumprod(np.full((3, 5), 0.8), axis=1)
    assert budget(stale, CostTable((1, 100), (1.0, 1.0), 0.0)) == 15
    assert budget(np.zeros((3, 5)), CostTable((1, 2, 3, 4, 100), (1.0, 1.1, 1.2, 1.3, 9.0), 0.5)) == 0


def test_budget_searches_beyond_a_first_decrease():
    # Rates: 1 / 1, 1.9 / 2, 2.75 / 2.1: the second token alone does not pay, both together do.
    assert budget(np.array([[0.9, 0.85]]), CostTable((1, 2, 3), (1.0, 2.0, 2.1), 0.0)) == 2


def test_budget_takes_the_smaller_of_equal_rates():
    assert budget(np.array([[1.0, 1.0]]), CostTable((1, 2, 3), (1.0, 2.0, 3.0), 0.0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_allocation_takes_the_largest_survivals_and_spends_the_whole_budget(seed):
    rng = np.random.default_rng(seed)
    requests, block = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    current = np.cumprod(rng.beta(4, 1, (requests, block)), axis=1)
    for total in range(requests * block + 1):
        offered = allocate(current, total)
        assert offered.sum() == total and (offered >= 0).all() and (offered <= block).all()
        taken = np.arange(block) < offered[:, None]
        best = np.sort(current, axis=None)[::-1][:total]
        np.testing.assert_array_equal(np.sort(current[taken])[::-1], best)


def test_allocation_serves_earlier_positions_and_then_earlier_rows_among_equals():
    ones = np.ones((3, 2))
    assert [allocate(ones, total).tolist() for total in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]
    assert allocate(np.array([[0.5, 0.5], [0.9, 0.5]]), 2).tolist() == [1, 1]


def test_allocation_gives_prefixes_even_where_survivals_rise():
    assert allocate(np.array([[0.2, 0.9], [0.5, 0.4]]), 2).tolist() == [0, 2]
    assert allocate(np.array([[0.2, 0.9], [0.5, 0.4]]), 3).tolist() == [1, 2]


def test_a_budget_beyond_all_slots_offers_all():
    assert allocate(np.full((2, 3), 0.5), 100).tolist() == [3, 3]


ROWS = 200_000
TARGET, DRAFT = np.array([0.7, 0.3], np.float32), np.array([0.5, 0.5], np.float32)
LEAP = CostTable((1, 2, 3), (1.0, 1.9, 1.95), 0.0)  # one more token costs nearly as much as two
BLOCKS = np.array([[0.8, 0.76], [0.8, 0.0]])  # survivals: the follower of a first draft 0 looks good, of 1 hopeless


def first_tokens(stale_choice):
    """How often token 0 comes first when the budget of each row is taken by this first draft's confidences."""
    rng = np.random.default_rng(11)
    drafts = rng.integers(0, 2, (ROWS, 2)).astype(np.int32)
    sizes = np.array([budget(block[None], LEAP) for block in BLOCKS])
    np.testing.assert_array_equal(sizes, [2, 0])
    choice = drafts[:, 0] if stale_choice is None else stale_choice
    offers = np.array([allocate(block[None], int(size))[0] for block, size in zip(BLOCKS, sizes, strict=True)])
    accepted, token = jax.jit(verify_standard)(
        np.broadcast_to(TARGET, (ROWS, 3, 2)),
        np.broadcast_to(DRAFT, (ROWS, 2, 2)),
        drafts,
        offers[choice],
        rng.random((ROWS, 2), dtype=np.float32),
        jax.random.split(jax.random.key(12), ROWS),
    )
    first = np.where(np.asarray(accepted) > 0, drafts[:, 0], np.asarray(token))
    return (first == 0).mean()


def test_a_budget_from_the_current_block_biases_the_output_to_085():
    # A first draft 0 is verified and always stands; a draft 1 is not, and the target is drawn from: 0.5 + 0.5 * 0.7.
    assert abs(first_tokens(None) - 0.85) < 4.5 * (0.85 * 0.15 / ROWS) ** 0.5


def test_a_budget_from_an_earlier_block_keeps_the_targets_distribution():
    earlier = np.random.default_rng(13).integers(0, 2, ROWS)
    assert abs(first_tokens(earlier) - 0.7) < 4.5 * (0.7 * 0.3 / ROWS) ** 0.5
