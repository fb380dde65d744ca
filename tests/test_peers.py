"""The benchmark's PyTorch formulas compute what the kernels compute: run without their compiler on small shapes.

PyTorch is no dependency of the suite: `pytest -m parity tests/test_peers.py` where it is installed.
"""

import importlib
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.indexer import reference

pytestmark = pytest.mark.parity


def cases(op: str):
    return importlib.import_module(f"pallas_kernels.{op}.cases")


WHOLE = [(op, case) for op in ("block_linear", "mhc", "sparse_attention") for case in cases(op).SMALL]
WHOLE += [("grouped_matmul", case) for case in cases("grouped_matmul").SMALL[:2]]


def peer(op: str):
    """(its module, tensor: what hands it an array)."""
    return importlib.import_module(f"parity.peers.{op}"), importlib.import_module("parity.peers.graphs").tensor


def output(op: str, case, inputs, **options) -> object:
    module, tensor = peer(op)
    given = module.arrays(inputs) if hasattr(module, "arrays") else map(tensor, inputs)
    return jax.tree.map(jax.numpy.from_dlpack, module.formula(case, lambda formula: formula)(*given, **options))


@pytest.mark.parametrize(("op", "case"), WHOLE, ids=lambda x: getattr(x, "name", x))
def test_a_peer_passes_the_cases_own_check(op, case):
    inputs = case.inputs(5)
    assert case.problems(inputs, output(op, case, inputs)) == []


@pytest.mark.parametrize("case", cases("pack").SMALL, ids=lambda case: case.name)
def test_packed_rows_have_the_bytes_that_the_formats_say(case):
    inputs = case.inputs(6)
    assert case.problems(inputs, output("pack", case, inputs)[:, :-1]) == []


def test_torch_topk_takes_the_values_that_a_sort_takes():
    case = cases("topk").case("12 of 4 x 300", rows=4, entries=300, count=12)
    x, lengths = case.inputs(7)
    ids = np.asarray(output("topk", case, (x, lengths)))
    np.testing.assert_array_equal(np.sort(np.take_along_axis(np.asarray(x), ids, 1)), np.sort(x)[:, -12:])


def test_index_scores_are_the_references_bit_for_bit():
    case = cases("indexer").scores(
        "prefill 70 x 130", cases("indexer").Shape(tokens=70, entries=130), reference.index_scores
    )
    q, keys, weights, visible = case.inputs(8)
    expected = reference.index_scores(q, reference.unpack(keys)[:, None], weights)
    np.testing.assert_array_equal(output("indexer", case, (q, keys, weights, visible)).astype(np.float32), expected)


def chosen(scores, ids) -> np.ndarray:
    """Scores of chosen places in ascending order, -inf where there is none: what a choice among equals leaves open."""
    ids = np.asarray(ids)
    return np.sort(np.where(ids < 0, -np.inf, np.take_along_axis(np.asarray(scores), np.maximum(ids, 0), -1)))


@pytest.mark.parametrize(("name", "pool", "blocks"), [("select", 0, 0), ("candidates", 0, 4), ("pools", 6, 0)])
def test_a_selection_takes_scores_as_high_as_the_references(name, pool, blocks):
    indexer = cases("indexer")
    shape = indexer.Shape(batch=2, tokens=3, entries=200, pool=pool, full=True)
    case = indexer.select(f"select, {name}", shape, count=16, candidates=blocks)
    inputs = case.inputs(9)
    q, keys, weights = inputs[:3]
    options = {"candidates": blocks} if not pool else {}
    ids, ours = output("indexer", case, inputs, count=16, **options)
    expected, theirs = partial(reference.select, count=16, candidates=blocks)(*inputs)
    scores = reference.index_scores(q, reference.unpack(keys)[:, None], weights)
    np.testing.assert_array_equal(chosen(scores, ids), chosen(scores, expected))
    assert (np.diff(ids, axis=-1) > 0).all()
    if blocks:
        best = np.asarray(scores).reshape(2, 3, -1, 8).max(-1)
        best[..., -1] = np.inf
        np.testing.assert_array_equal(chosen(best, ours), chosen(best, theirs))
