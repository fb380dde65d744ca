"""Selection kernels: every small case, and the rule row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError
from pallas_kernels.topk import cases, kernel, merge, selection, start, topk


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_kernel_and_reference_choose_what_a_sort_chooses(case):
    given = case.inputs(3)
    assert not case.problems(given, case.kernel(*given, tile=cases.TINY, interpret=True))
    assert not case.problems(given, case.reference(*given))


def test_the_oracle_of_the_cases_follows_the_rule():
    row = np.array([np.nan, 1, np.inf, -0.0, 0.0, -np.inf, 1, -2])
    assert cases.best(row, 4).tolist() == [1, 2, 3, 6]
    assert cases.best(row, 9).tolist() == [1, 2, 3, 4, 6, 7, -1, -1, -1]


@pytest.mark.parametrize(
    ("row", "count", "expected"),
    [
        ([1, 3, 3, 3, 1], 2, [1, 2]),
        ([-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
        ([np.nan, 1, -np.nan, 2, -np.inf], 3, [1, 3, -1]),
        ([5, -np.inf, 3, np.inf], 2, [0, 3]),
        ([np.nan, -np.inf], 3, [-1, -1, -1]),
        ([-3e38, 3e38, -1e-45, 1e-45], 3, [1, 2, 3]),
    ],
)
def test_every_tie_and_special_value_is_decided(row, count, expected):
    found = kernel.topk(jnp.array([row], jnp.float32), count, tile=cases.TINY, interpret=True)
    assert found[0].tolist() == expected


def test_bracket_of_keys_that_span_all_of_int32_closes():
    """Values of opposite ends of float32: the difference of their keys does not fit int32."""
    row = np.array([3e38, -3e38, 2e38, -2e38] * 8, np.float32)
    found = kernel.topk(jnp.asarray(row)[None], 20, tile=cases.TINY, interpret=True)
    assert found[0].tolist() == cases.best(row, 20).tolist()


def test_the_chunk_of_the_newest_entry_is_chosen_whatever_its_maximum():
    row = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    row[41] = -9  # the newest of 334 entries
    levels, length = (jnp.asarray(row)[None],), jnp.array([334], jnp.int32)
    found = selection.refine(levels, length, count=4, first=1, newest=True, tile=cases.TINY, interpret=True)
    row[41], row[42:] = np.inf, -np.inf
    assert found[0].tolist() == cases.best(row, 4).tolist()


def test_what_no_kernel_takes_is_refused_in_one_line():
    with pytest.raises(BackendError, match="65536 values of one step are more than 32768"):
        kernel.topk(jnp.zeros((1, 131072)), 8192, tile=cases.TINY, interpret=True)
    with pytest.raises(BackendError, match="topk needs a GPU"):
        topk(jnp.zeros((1, 8)), 2, backend="pallas")
    with pytest.raises(BackendError, match="topk"):
        merge(start((1,), 2), jnp.zeros((1, 4)), jnp.zeros((1, 4), jnp.int32), backend="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*cases.SMALL, *cases.MODEL], ids=lambda case: case.name)
def test_on_a_gpu_every_case_chooses_what_a_sort_chooses(case):
    given = case.inputs(7)
    assert not case.problems(given, jax.jit(case.kernel)(*given))
