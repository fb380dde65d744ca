"""Counts of the released model, and `dsv41 verify` on a full-size checkpoint made of holes."""

import json
import math
import os
import shutil
import struct

import pytest
from conftest import ROOT

from dsv41_jax import Config, cli
from dsv41_jax.files.expected import expected_tensors
from dsv41_jax.files.inventory import active, part_of, totals

SIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}


@pytest.fixture(scope="module")
def expected():
    return expected_tensors(Config.flash())


def test_parameters_and_bytes_are_the_published_ones(expected):
    counts, sizes = totals(expected)
    assert counts["routed experts"] == 543_581_798_400
    assert counts["attention"] == 5_126_564_864
    assert counts["shared experts"] == 1_415_577_600
    assert counts["engram"] == 314_654_720
    assert counts["router"] == 78_673_920
    assert counts["hyper-connections"] == 39_323_760
    assert counts["norms"] == 414_720
    assert counts["engram tables"] == 196_613_849_600
    assert counts["vision"] == 485_268_480
    assert (counts["draft"], counts["draft experts"]) == (635_817_570, 13_589_544_960)
    assert counts.total() == 763_205_315_794
    assert sizes.total() == 510_286_023_000


def test_active_parameters_are_the_published_ones(expected):
    assert active(expected, Config.flash()) == (16_130_583_664, 7_895_563_064)


def shard(name, cfg):
    """The placement of `model.safetensors.index.json`, written down independently of the code."""
    head = name.split(".")[0]
    if head in ("vision", "aligner"):
        return 1
    if head in ("embed", "image_start", "image_newline", "image_end"):
        return 2
    if head in ("head", "norm"):
        return 43
    number = int(name.split(".")[1])
    if head == "mtp":
        return 44 + number
    if ".engram." in name:
        return {1: 47, 14: 48}[number]
    return 3 + number


def write_shard(path, tensors):
    """A file with an exact header and a hole for its data."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * SIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


@pytest.fixture(scope="module")
def full(tmp_path_factory, expected):
    """(directory, shards: file -> {name: (dtype, shape)}) of the released checkpoint, 510 GB of holes."""
    directory = tmp_path_factory.mktemp("full")
    cfg = Config.flash()
    files = {}
    for name, tensor in expected.items():
        file = f"model-{shard(name, cfg):05d}-of-00048.safetensors"
        files.setdefault(file, {})[name] = (tensor.dtype, tensor.shape)
    for file, tensors in files.items():
        write_shard(directory / file, tensors)
    placed = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 510_286_023_000}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(ROOT / "dsv41_jax/data/flash/config.json", directory)
    return directory, files


def verify(directory, capsys):
    """(exit status, lines) of `dsv41 verify`."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(directory)])
    return stop.value.code, capsys.readouterr().out.splitlines()


def test_full_size_checkpoint_of_holes_passes_and_takes_almost_no_disk(full, capsys):
    directory, _ = full
    status, lines = verify(directory, capsys)
    assert (status, lines[-1].split(": ")[1]) == (0, "96,085 tensors, 510,286,023,000 bytes, 0 deviations")
    assert sum(os.stat(file).st_blocks * 512 for file in directory.iterdir()) < 64 << 20


EXPERT = "layers.7.ffn.experts.3.w1"


def without(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != f"{EXPERT}.weight"}


SEEDED = {
    "missing": (10, without, [f"{EXPERT}.weight"]),
    "extra": (10, lambda t: t | {"layers.7.extra": ("F32", (3,))}, ["layers.7.extra"]),
    "shape": (10, lambda t: t | {f"{EXPERT}.scale": ("F8_E8M0", (2304, 161))}, [f"{EXPERT}.scale", "[2304, 161]"]),
}


@pytest.mark.parametrize("kind", SEEDED)
def test_seeded_deviation_of_a_shard_is_found_and_named(full, capsys, kind):
    directory, files = full
    number, change, said = SEEDED[kind]
    file = f"model-{number:05d}-of-00048.safetensors"
    try:
        write_shard(directory / file, change(files[file]))
        status, lines = verify(directory, capsys)
    finally:
        write_shard(directory / file, files[file])
    assert status == 1
    assert len(lines) <= 3
    assert any(all(word in line for word in said) for line in lines[:-1])


def test_scale_stored_as_plain_bytes_is_named(full, capsys):
    directory, files = full
    file = "model-00010-of-00048.safetensors"
    with (directory / file).open("r+b") as stream:
        at = stream.read(1 << 20).index(b"F8_E8M0")
        stream.seek(at)
        stream.write(b'U8"     ')  # the same length, so that every offset stays
    try:
        status, lines = verify(directory, capsys)
    finally:
        write_shard(directory / file, files[file])
    assert status == 1
    assert "dtype U8, expected F8_E8M0" in lines[0]
    assert len(lines) == 2


def test_swapped_shards_are_named_in_a_line_each(full, capsys):
    directory, _ = full
    one, other, aside = (
        directory / name for name in ("model-00005-of-00048.safetensors", "model-00006-of-00048.safetensors", "x")
    )

    def swap():
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    swap()
    try:
        status, lines = verify(directory, capsys)
    finally:
        swap()
    assert status == 1
    assert lines[:2] == [
        f"{one.name}: holds the tensors of {other.name}",
        f"{other.name}: holds the tensors of {one.name}",
    ]
    assert len(lines) == 3


def test_truncated_shard_is_named(full, capsys):
    directory, files = full
    file = directory / "model-00047-of-00048.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    try:
        status, lines = verify(directory, capsys)
    finally:
        write_shard(file, files[file.name])
    assert status == 1
    assert file.name in lines[0]
    assert "outside" in lines[0]


def test_wrong_total_and_wrong_placement_are_named(full, capsys):
    directory, files = full
    path = directory / "model.safetensors.index.json"
    right = path.read_text()
    index = json.loads(right)
    moved = ("model-00043-of-00048.safetensors", "model-00002-of-00048.safetensors")
    try:
        path.write_text(json.dumps(index | {"metadata": {"total_size": 510_286_023_001}}))
        status, lines = verify(directory, capsys)
        assert status == 1
        assert "510286023001" in lines[0]
        index["weight_map"]["norm.weight"] = moved[1]
        path.write_text(json.dumps(index))
        write_shard(directory / moved[0], {n: t for n, t in files[moved[0]].items() if n != "norm.weight"})
        write_shard(directory / moved[1], files[moved[1]] | {"norm.weight": ("BF16", (5120,))})
        status, lines = verify(directory, capsys)
        assert status == 1
        assert lines[0].startswith("norm.weight: stands in model-00002")
        assert len(lines) == 2
    finally:
        path.write_text(right)
        for file in moved:
            write_shard(directory / file, files[file])


def test_every_part_is_one_of_the_listed(expected):
    assert {part_of(name) for name in expected} == set(totals(expected)[0])


def test_verify_accepts_the_bundled_checkpoint(capsys):
    assert verify("tiny", capsys)[0] == 0
