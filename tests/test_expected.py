"""What the released checkpoint must hold, and which tensors exist only for some layers."""

import re
from collections import Counter
from math import prod

import pytest
from conftest import GOLDEN
from test_safetensors import FILE, SIZE, decode

from dsv41_jax import Config
from dsv41_jax.files.expected import (
    Expected,
    by_parameter,
    differences,
    dotted,
    expected_tensors,
    flat_parameters,
    table_names,
)
from dsv41_jax.files.inventory import totals
from dsv41_jax.nn.transformer import abstract_parameters


@pytest.mark.parametrize("golden", GOLDEN)
def test_expected_tensors_are_those_of_the_released_programs_checkpoints(golden):
    expected = expected_tensors(Config.from_pretrained(GOLDEN[golden]))
    stored = decode((GOLDEN[golden] / FILE).read_bytes())
    assert {n: (e.dtype, list(e.shape)) for n, e in expected.items()} == {n: t[:2] for n, t in stored.items()}


def test_tensors_that_exist_only_for_some_layers():  # a gate demanded at ratio 1, keys of every indexer
    names = expected_tensors(Config.tiny())
    at = lambda part: [int(n.split(".")[1]) for n in names if n.startswith("layers") and part in n]  # noqa: E731
    assert at(".compressor.wkv.weight") == at(".indexer.wk.weight") == [1, 4]
    assert at(".compressor.wgate.weight") == [1]  # ratio 2
    assert at(".indexer.wq_b.weight") == [1, 3, 4, 6]
    assert not [n for n in names if "ape" in n.split(".") or re.match(r"mtp\.\d+\.(embed|head)", n)]


SIZES = {
    "F8_E4M3": (357, 204_015_223_296), "F8_E8M0": (47_589, 23_563_015_184), "I8": (47_232, 278_585_671_680),
    "BF16": (520, 3_952_883_712), "F32": (387, 169_229_128),
}  # fmt: skip


PARTS = {
    r"layers\.\d+\.ffn\.experts\.": 543_581_798_400, r"layers\.\d+\.attn\.": 5_126_564_864,
    r"layers\.\d+\.ffn\.shared_experts\.": 1_415_577_600, r"layers\.\d+\.engram\.(?!embed)": 314_654_720,
    r"layers\.\d+\.ffn\.gate\.": 78_673_920, r"layers\.\d+\.hc_": 39_323_760,
    r"(layers\.\d+\.(attn|ffn)_)?norm\.": 414_720, r"(embed|head)\.": 2 * 661_913_600,
    r"layers\.\d+\.engram\.embed": 196_613_849_600, r"vision|aligner|image_": 485_268_480,
    r"mtp\.\d+\.ffn\.experts\.": 13_589_544_960, r"mtp\.(?!\d+\.ffn\.experts\.)": 635_817_570,
}  # fmt: skip


@pytest.fixture(scope="module")
def flash() -> dict[str, Expected]:
    return expected_tensors(Config.flash())


def stored(tensors: dict[str, Expected], part: str = "", dtype: str = "") -> tuple[int, int]:
    """(number, bytes) of the tensors whose name begins like `part`."""
    found = [t for name, t in tensors.items() if re.match(part, name) and t.dtype.startswith(dtype)]
    return len(found), sum(prod(t.shape) * SIZE[t.dtype] for t in found)


def test_release_has_the_published_tensors_and_bytes(flash):
    assert stored(flash) == (96_085, 510_286_023_000)
    assert {dtype: stored(flash, dtype=dtype) for dtype in SIZES} == SIZES
    assert stored(flash, "vision|aligner") == (263, 970_506_240)
    assert stored(flash, r"layers\.1\.engram") == (6, 101_535_150_272)
    assert stored(flash, r"layers\.14\.engram") == (6, 101_537_925_968)


def test_release_has_the_published_tensors_in_every_block(flash):
    blocks = Counter(re.match(r"(layers|mtp)\.\d+|", name)[0] for name in flash if ".engram." not in name)
    wanted = {f"layers.{n}": 2334 for n in range(40)} | {f"layers.{n}": 2342 for n in (2, 8, 14)} | {"layers.20": 2341}
    wanted |= {f"layers.{n}": 2337 for n in (24, 28, 32, 36)} | {"mtp.0": 801, "mtp.1": 798, "mtp.2": 802}
    assert blocks == wanted | {"": 263 + 4 + 2}  # vision and aligner, embed and image vectors, head and norm


def test_release_has_the_published_parameters_in_every_part(flash):
    found = dict.fromkeys(PARTS, 0)
    for name, tensor in flash.items():
        (part,) = [pattern for pattern in PARTS if re.match(pattern, name)]
        if not name.endswith(".scale"):
            found[part] += prod(tensor.shape) * (2 if tensor.dtype == "I8" else 1)
    assert found == PARTS
    assert sum(found.values()) == 763_205_315_794
    counts, _ = totals(flash)
    assert counts.total() - counts["engram tables"] == 763_205_315_794 - 196_613_849_600


def test_differences_are_a_line_a_name():
    held = {"a": ("F32", (2,)), "b": ("F32", (2,)), "c": ("BF16", (2,)), "d": ("F32", ())}
    wanted = {"a": ("F32", (2,)), "b": ("F32", (2, 1)), "c": ("F32", (2,)), "e": ("F32", ())}
    assert differences(held, wanted, ("is", "expected")) == [
        "d: unexpected",
        "b: is F32 [2], expected F32 [2, 1]",
        "c: is BF16 [2], expected F32 [2]",
        "e: missing",
    ]
    assert differences(held, held, ("is", "expected")) == []


def test_every_tensor_belongs_to_one_parameter_or_to_a_table():
    expected, leaves = expected_tensors(Config.tiny()), flat_parameters(abstract_parameters(Config.tiny()))
    names = by_parameter(expected)
    assert names.keys() == leaves.keys()
    tables = [name for layer in Config.tiny().engram_layer_ids for name in table_names(layer)]
    assert sorted([*tables, *(name for parts in names.values() for name in parts)]) == sorted(expected)
    stacked = names[("layers", 3, "ffn", "experts", "w1", "weight")]
    assert stacked == [f"layers.3.ffn.experts.{e}.w1.weight" for e in range(Config.tiny().n_routed_experts)]
    assert [name for path, parts in names.items() if parts != [dotted(path)] for name in parts] == [
        name for name in expected if ".experts." in name
    ]
    for path, parts in names.items():
        assert sum(expected[name].nbytes for name in parts) == leaves[path].size * leaves[path].dtype.itemsize
