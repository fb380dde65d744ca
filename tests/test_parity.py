"""The parity command on the bundled vectors, and that it does notice what is wrong."""

import shutil

import numpy as np
import pytest
from conftest import GOLDEN, ROOT

from dsv41_jax import Model
from parity import golden
from parity.table import FAIL, PASS, compare, compare_equal, compare_sets
from parity.units import compare_units


def verdicts(rows):
    return {(row.case, row.array): row.verdict for row in rows}


def test_every_vector_of_single_operations_passes():
    rows = compare_units(ROOT / "tests/golden/units")
    assert {row.verdict for row in rows} == {PASS}, [row for row in rows if row.verdict != PASS]
    golden_keys = set(np.load(ROOT / "tests/golden/units/units.npz"))
    inputs = {
        "x",
        "weight",
        "bias",
        "bias_vl",
        "image_mask",
        "q",
        "kv",
        "sink",
        "idx",
        "mixes",
        "scale",
        "base",
        "scores",
    }
    outputs = {key for key in golden_keys if key.split("/")[1] not in inputs and not key.endswith(("_args", "_bytes"))}
    assert len(rows) == len(outputs - {"candidates/decode_scores"})


@pytest.mark.parametrize("name", GOLDEN)
def test_released_numerics_pass_layer_by_layer_where_they_are_stable(name):
    ((_, rows),) = golden.compare_directory(GOLDEN[name], ["reference"], cases=["e"])
    assert len(rows) > 15
    assert {row.verdict for row in rows} == {PASS}


def test_float32_passes_on_every_array_of_the_smaller_checkpoint():
    ((_, rows),) = golden.compare_directory(GOLDEN["text-min"], ["float32"], cases=["b", "c"])
    keys = set(np.load(GOLDEN["text-min"] / "outputs_float32.npz"))
    assert {f"{row.case}/{row.array}" for row in rows} == {key for key in keys if key[0] in "bc"}
    assert {row.verdict for row in rows if not row.array.startswith("margin.")} == {PASS}


def test_a_disabled_feature_is_noticed(tmp_path, monkeypatch):  # greedy text can be right without Engram
    """Engram rows forced to zero: the parity of hidden states and gates fails, not only the logits."""
    copied = tmp_path / "copy"
    shutil.copytree(GOLDEN["tiny-full"], copied)
    real = Model.from_pretrained

    def without_engram(*arguments, **keywords):
        model = real(*arguments, **keywords)
        for table in model.engram.tables:
            object.__setattr__(table, "weight", np.zeros_like(table.weight))
        return model

    monkeypatch.setattr(Model, "from_pretrained", without_engram)
    ((_, rows),) = golden.compare_directory(copied, ["float32"], cases=["b"])
    found = verdicts(rows)
    assert found["b", "layers.1.engram_gate"] == FAIL
    assert found["b", "layers.1.out[-3:]"] == FAIL
    assert found["b", "engram_hash_ids"] == PASS


@pytest.mark.parametrize(
    ("got", "wanted", "verdict"),
    [
        ([1.0, 2.0], [1.0, 2.00005], PASS),
        ([1.0, 2.0], [1.0, 2.001], FAIL),
        ([1.0, np.nan], [1.0, 2.0], FAIL),
        ([1.0, np.nan], [1.0, np.nan], PASS),
        ([np.inf, 1.0], [np.inf, 1.0], PASS),
        ([np.inf, 1.0], [-np.inf, 1.0], FAIL),
        ([1.0, 2.0, 3.0], [1.0, 2.0], FAIL),
    ],
)
def test_comparison_fails_on_size_place_and_special_values(got, wanted, verdict):
    assert compare("c", "a", np.array(got), np.array(wanted), 1e-4).verdict == verdict


def test_sets_ignore_order_and_nothing_else():
    one = np.array([[3, 1, -1]])
    assert compare_sets("c", "a", one, np.array([[-1, 3, 1]])).verdict == PASS
    assert compare_sets("c", "a", one, np.array([[3, 2, -1]])).verdict == FAIL
    assert compare_equal("c", "a", one, np.array([[1, 3, -1]])).verdict == FAIL
