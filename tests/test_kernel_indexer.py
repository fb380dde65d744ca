"""Indexer kernels: every small case, the rounding of the oracle, and the composition that `select` stands for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, oracle64
from pallas_kernels.indexer import cases, decode, index_scores, kernel, reference, select
from pallas_kernels.topk.cases import best


def one(seed: int, pool: int = 0) -> tuple:
    """Three queries and 200 entries."""
    return cases.inputs(seed, cases.Shape(tokens=3, entries=200, pool=pool))


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_kernel_gives_what_the_oracle_allows(case):
    given = case.inputs(5)
    assert not case.problems(given, case.kernel(*given, tile=cases.TINY, interpret=True))


@pytest.mark.parametrize("pool", [0, 6, 25])
def test_tiled_reference_selects_what_a_sort_of_the_oracle_selects(pool):
    """By gathering a pool smaller than the entries, and by mask."""
    given = one(1, pool)
    for tile in (64, 4096):
        found = jax.jit(partial(reference.select, count=16, candidates=0 if pool else 5, tile=tile))(*given)
        assert not cases.select_problems(given, found, count=16, candidates=0 if pool else 5)


def test_reference_is_within_the_bounds_which_meet_for_nearly_all_fp4_keys():
    q, keys, weights, _ = one(2)
    rough = jax.random.normal(jax.random.key(0), (1, 200, 128), jnp.bfloat16)
    for row, least in ((keys, 0.95), (rough, 0.5)):
        query = [np.asarray(x[0, 0]).astype(np.float64) for x in (q, weights)]
        low, high = cases.bounds(query[0], oracle64.cached_rows(np.asarray(row), 128)[0], query[1])
        scores = np.asarray(index_scores(q, reference.unpack(row)[:, None], weights))[0, 0]
        assert ((low <= scores) & (scores <= high)).all()
        assert np.mean(low == high) > least


def test_the_check_of_selections_sees_a_wrong_one():
    """The last id replaced by a neighbour, an id twice, one too few."""
    given = one(3)
    ids, _ = reference.select(*given, count=9)
    assert not cases.select_problems(given, (ids, None), count=9)
    for wrong in (ids.at[0, 0, -1].add(1), ids.at[0, 0, 1].set(ids[0, 0, 0]), ids.at[0, 0, -1].set(-1)):
        assert cases.select_problems(given, (wrong, None), count=9)


def test_every_byte_of_codes_and_every_common_scale_is_unpacked_exactly():
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    for scale in (67, 126, 127, 128, 190):
        row = np.concatenate([codes, np.full((4, 4), scale, np.uint8)], 1)
        even, odd = decode.unpack(jnp.asarray(codes), jnp.asarray(row[:, 64:]), True)
        exact = oracle64.cached_rows(row, 128) * 2.0**-decode.EXPONENT
        np.testing.assert_array_equal(np.asarray(even).astype(np.float64), exact[:, 0::2])
        np.testing.assert_array_equal(np.asarray(odd).astype(np.float64), exact[:, 1::2])


def test_queries_in_groups_select_as_all_at_once(monkeypatch):
    given = one(4)
    want = reference.select(*given, count=9)
    monkeypatch.setattr(kernel, "SCRATCH", 1)
    found = kernel.select(*given, count=9, tile=cases.TINY, interpret=True)
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_scores_of_keys_of_each_query_equal_those_of_the_reference():
    q, keys, weights, _ = one(6)
    own = reference.unpack(keys)[:, None].repeat(3, 1).at[:, 1].multiply(2)
    found = kernel.index_scores(q, own, weights, tile=cases.TINY, interpret=True)
    np.testing.assert_array_equal(found, index_scores(q, own, weights))


def test_all_equal_scores_select_the_lowest_entries_and_the_newest_block():
    q, keys, weights, _ = one(7)
    visible = jnp.array([[90, 9, 0]], jnp.int32)
    ids, blocks = select(q, keys, 0 * weights, visible, count=10, candidates=3)
    assert ids[0].tolist() == [best(np.zeros(n), 10).tolist() for n in (90, 9, 0)]
    assert blocks[0].tolist() == [[0, 1, 11], [0, 1, -1], [-1, -1, -1]]


def test_what_no_kernel_takes_is_refused_in_one_line():
    q, keys, weights, visible = one(0)
    with pytest.raises(BackendError, match="index_scores needs a GPU"):
        select(q, keys, weights, visible, count=4, backend="pallas")
    with pytest.raises(BackendError, match="queries and weights are float32"):
        kernel.select(q.astype(jnp.float32), keys, weights, visible, count=4, tile=cases.TINY)
    with pytest.raises(BackendError, match="blocks of 4"):
        kernel.select(q, keys, weights, visible, count=4, size=4, tile=cases.TINY)
    with pytest.raises(BackendError, match="pools of 24 entries are not in multiples of 128"):
        decode.score(q, keys, weights, visible, jnp.zeros((1, 3, 3), jnp.int32), interpret=True)


@pytest.mark.parametrize("blocks", [6, 16, 48])  # a part of a tile, one tile, three: no whole span
def test_pools_of_any_length_select_as_the_reference(blocks):
    given = cases.inputs(blocks, cases.Shape(batch=2, tokens=2, entries=500, pool=blocks))
    want = reference.select(*given, count=40)
    found = kernel.select(*given, count=40, tile=cases.TINY, interpret=True)
    np.testing.assert_array_equal(found[0], want[0])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*cases.SMALL, *cases.MODEL], ids=lambda case: case.name)
def test_on_a_gpu_every_case_is_what_the_oracle_allows(case):
    given = case.inputs(9)
    assert not case.problems(given, jax.jit(case.kernel)(*given))
