"""Checkpoints: what is read, what is refused before anything is allocated, and what the released one must hold.

Writer and reader here know safetensors by its format alone: 8 bytes of header length, JSON, bytes.
"""

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN
from flax import nnx

from dsv41_jax import Checkpoint, CheckpointError, Config, ConfigError
from dsv41_jax.files.load import load
from dsv41_jax.nn.transformer import Transformer, abstract_parameters
from pallas_kernels.formats import dequantize_fp4, dequantize_fp8

SIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}


Tensors = dict[str, tuple[str, list[int], bytes]]


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def frame(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def encode(tensors: Tensors) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return frame(json.dumps(header).encode(), data)


def split(raw: bytes) -> tuple[dict, bytes]:
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return header, raw[start:]


def decode(raw: bytes) -> Tensors:
    header, data = split(raw)
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def write_shards(directory: Path, *shards: Tensors, damage: Callable = lambda index: None) -> None:
    (directory / FILE).unlink()
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for file, tensors in zip((A, B), shards, strict=True):
        (directory / file).write_bytes(encode(tensors))
        index["weight_map"] |= dict.fromkeys(tensors, file)
        index["metadata"]["total_size"] += sum(len(content) for _, _, content in tensors.values())
    damage(index)
    (directory / INDEX).write_text(json.dumps(index))


@pytest.fixture(scope="module")
def bundled() -> Tensors:
    return decode((GOLDEN["tiny-full"] / FILE).read_bytes())


@pytest.fixture(scope="module")
def loaded() -> Transformer:
    return load(Checkpoint("tiny"))


@pytest.fixture(scope="module")
def abstract() -> Transformer:
    return abstract_parameters(Config.tiny())


@pytest.fixture
def directory(tmp_path) -> Path:
    for name in ("config.json", FILE):
        shutil.copy(GOLDEN["tiny-full"] / name, tmp_path)
    return tmp_path


def refused(directory: Path, abstract: Transformer) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Checkpoint(directory).check(abstract)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def leaves(params: nnx.Module) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(dtype, shape, bytes) of every parameter by its dotted path."""
    flat = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(params))}
    return {name: (value.dtype.name, value.shape, value.tobytes()) for name, value in flat.items()}


READ = {
    "F8_E4M3": (b"\x77\x78\x7e", [240.0, 256.0, 448.0], ml_dtypes.float8_e4m3fn),
    "F8_E8M0": (bytes([126, 127, 128, 0, 254]), [0.5, 1.0, 2.0, 2.0**-127, 2.0**127], ml_dtypes.float8_e8m0fnu),
    "BF16": (b"\x80\x3f\x00\xc0\x01\x00", [1.0, -2.0, 2.0**-133], ml_dtypes.bfloat16),
    "F32": (struct.pack("<3f", 1.5, -0.25, 2.0**127), [1.5, -0.25, 2.0**127], np.float32),
    "I8": (b"\x00\x7f\x80", [0, 127, -128], np.int8),
    "I64": (struct.pack("<3q", 2**53 + 1, -(2**63), 2**61 + 3), [2**53 + 1, -(2**63), 2**61 + 3], np.int64),
}


@pytest.mark.parametrize("dtype", READ)
def test_reader_gives_each_dtype_with_its_shape_and_sub_ranges(dtype, directory):  # E8M0 and FP4 fail in safetensors
    content, values, kind = READ[dtype]
    before = ("I8", [1], b"\x05")  # an odd start: the data of the next tensor are not aligned
    (directory / FILE).write_bytes(encode({"before": before, "x": (dtype, [len(values), 1], content)}))
    array = Checkpoint(directory).read("x")
    assert (array.dtype, array.shape) == (np.dtype(kind), (len(values), 1))
    assert [v.item() if "I" in dtype else float(v) for v in array.ravel()] == values
    assert array[1:2].tobytes() == content[SIZE[dtype] : 2 * SIZE[dtype]]


def test_released_bytes_decode_to_the_published_values():  # FP4 read as FP8, or the high nibble first
    dense, packed = np.zeros((32, 32), np.uint8), np.zeros((1, 16), np.uint8)
    dense[0, :8] = list(bytes.fromhex("d871f2797069f0e5"))
    packed[0, :8] = list(bytes.fromhex("a0a8ec4aadaf42aa"))
    fp8 = dequantize_fp8(jnp.asarray(dense.view(ml_dtypes.float8_e4m3fn)), jnp.full((1, 1), 0x73, jnp.uint8))
    fp4 = dequantize_fp4(jnp.asarray(packed), jnp.full((1, 1), 0x78, jnp.uint8))
    published = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert fp8[0, :8].tolist() == published
    assert (fp4[0, :16] * 128).tolist() == [0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]


def test_every_parameter_holds_the_bytes_of_the_file_as_quantized_as_stored(bundled, loaded):
    kinds = dict(zip(SIZE, ("float8_e4m3fn", "float8_e8m0fnu", "uint8", "bfloat16", "float32"), strict=False))
    unread = set(bundled)
    for name, (kind, shape, content) in leaves(loaded).items():
        experts = range(shape[0] if ".experts." in name else 1)
        parts = [name.replace(".experts.", f".experts.{e}.") for e in experts]
        assert content == b"".join(bundled[part][2] for part in parts), name
        assert {kind} == {kinds[bundled[part][0]] for part in parts}, name
        unread -= set(parts)
    assert unread == {f"layers.{layer}.engram.embed.{part}" for layer in (1, 4) for part in ("weight", "scale")}


@pytest.mark.parametrize(("scales_in", "backwards"), [(B, False), (A, False), (A, True)])
def test_two_shards_load_as_one_file_in_any_order(scales_in, backwards, bundled, loaded, directory):
    halves = [{}, {}]
    for name in sorted(bundled, reverse=backwards):
        halves[name.endswith(".scale") == (scales_in == B)][name] = bundled[name]
    write_shards(directory, *halves)
    assert leaves(load(Checkpoint(directory))) == leaves(loaded)
    for layer, table in zip((1, 4), Checkpoint(directory).tables(), strict=True):
        assert table.weight.tobytes() == bundled[f"layers.{layer}.engram.embed.weight"][2]
        assert table.scale.tobytes() == bundled[f"layers.{layer}.engram.embed.scale"][2]


def test_loading_twice_gives_identical_parameters(loaded):  # a layout changed in place by the first load
    checkpoint = Checkpoint("tiny")
    load(checkpoint)
    assert leaves(load(checkpoint)) == leaves(loaded)


W, S, X = "layers.2.attn.wq_a.weight", "layers.2.attn.wq_a.scale", "layers.4.ffn.experts.3.w2.scale"


GATE, NORM, HC = "layers.4.attn.compressor.wgate.weight", "norm.weight", "layers.0.hc_attn_fn"  # ratio 1: no wgate


TABLE = "layers.1.engram.embed.scale"


def retype(t: Tensors, name: str, dtype: str, shape: list[int]) -> None:
    length = prod(shape) * SIZE[dtype]
    t[name] = (dtype, shape, t[name][2].ljust(length, b"\0")[:length])


TENSORS = {  # what happens to the tensors, what the message says
    "weight missing": (lambda t: t.pop(W), [W]),
    "scale missing": (lambda t: t.pop(S), [S]),
    "expert missing": (lambda t: t.pop(X), [X]),
    "table missing": (lambda t: t.pop(TABLE), [TABLE]),
    "unexpected": (lambda t: t.update({GATE: ("BF16", [64, 96], bytes(12288))}), [GATE]),
    "leftover scale": (lambda t: t.update({"head.scale": ("F8_E8M0", [9, 3], bytes(27))}), ["head.scale"]),
    "transposed": (lambda t: retype(t, W, "F8_E4M3", [96, 64]), [W, "[96, 64]", "[64, 96]"]),
    "extra axis": (lambda t: retype(t, NORM, "BF16", [96, 1]), [NORM]),
    "fp8 as int8": (lambda t: retype(t, W, "I8", [64, 96]), [W, "I8", "F8_E4M3"]),
    "float32 as bf16": (lambda t: retype(t, HC, "BF16", t[HC][1]), [HC, "BF16", "F32"]),
    "scale blocks of 128": (lambda t: retype(t, S, "F8_E8M0", [1, 1]), [S, "[1, 1]", "[2, 3]"]),
    "expert scale per 128": (lambda t: retype(t, X, "F8_E8M0", [96, 2]), [X]),
}  # fmt: skip


HEADER = {  # what happens to the header and to W's entry in it; the message names W
    "overlap": lambda h, w: w.update(data_offsets=h["layers.3.attn.wq_a.weight"]["data_offsets"]),
    "out of range": lambda h, w: w.update(data_offsets=[10**9, 10**9 + 6144]),
    "negative": lambda h, w: w.update(data_offsets=[-6144, 0]),
    "short": lambda h, w: w.update(shape=[65, 96]),
    "no dtype": lambda h, w: w.pop("dtype"),
    "odd dtype": lambda h, w: w.update(dtype="F8_E5M2"),
    "shape of floats": lambda h, w: w.update(shape=[64.0, 96.0]),
    "no object": lambda h, w: h.update({W: 3}),
    "dtype of lists": lambda h, w: w.update(dtype=[["F8_E4M3"]]),
    "a thousand axes": lambda h, w: w.update(shape=[64, 96, *[1] * 1000]),
    "a million axes": lambda h, w: w.update(shape=[2**62] * 1_000_000),  # their product alone takes minutes
}


RAW = {  # what happens to the bytes; the message names the file
    "empty": lambda raw: b"",
    "cut in the header": lambda raw: raw[:1000],
    "cut in the data": lambda raw: raw[:-100],
    "longer": lambda raw: raw + b"\0",
    "header longer than file": lambda raw: struct.pack("<Q", len(raw)) + raw[8:],
    "header of 2**63 bytes": lambda raw: struct.pack("<Q", 2**63) + raw[8:],
    "no JSON": lambda raw: frame(b"{" + b"x" * 50),
    "nested": lambda raw: frame(b"[" * 100_000),
    "duplicate names": lambda raw: frame(2 * json.dumps(split(raw)[0]).encode(), split(raw)[1]).replace(b"}}{", b"}, "),
}


SHARDED = {  # what happens to the index of two shards, what the message says
    "missing shard": (lambda i: i["weight_map"].update({W: "model-00003.safetensors"}), ["model-00003.safetensors"]),
    "misplaced": (lambda i: i["weight_map"].update({W: B}), [W]),
    "not in its shard": (lambda i: i["weight_map"].update({"ghost.weight": A}), ["ghost.weight"]),
    "not in the index": (lambda i: i["weight_map"].pop(W), [W]),
    "escapes": (lambda i: i["weight_map"].update({W: "../" + A}), ["../" + A]),
    "parent": (lambda i: i["weight_map"].update({W: ".."}), ["'..'", "not the name of a file beside it"]),
    "nul": (lambda i: i["weight_map"].update({W: "a\0b"}), ["not the name of a file beside it"]),
    "wrong total": (lambda i: i["metadata"].update(total_size=2346348), ["total_size", "2346348", "2346349"]),
    "map of numbers": (lambda i: i["weight_map"].update({W: 3}), [INDEX]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_wrong_set_of_tensors_is_refused_by_name(kind, bundled, directory, abstract):  # also weights without scales
    damage, words = TENSORS[kind]
    tensors = dict(bundled)
    damage(tensors)
    (directory / FILE).write_bytes(encode(tensors))
    message = refused(directory, abstract)
    assert all(word in message for word in [*words, ": 1 problem: "])


@pytest.mark.parametrize("kind", [*HEADER, *RAW])
def test_damaged_file_is_refused_by_name(kind, directory, abstract):  # overlaps, short files, names twice
    raw = (directory / FILE).read_bytes()
    if kind in RAW:
        raw = RAW[kind](raw)
    else:
        header, data = split(raw)
        HEADER[kind](header, header[W])
        raw = frame(json.dumps(header).encode(), data)
    (directory / FILE).write_bytes(raw)
    assert (FILE if kind in RAW else W) in refused(directory, abstract)


@pytest.mark.parametrize("kind", SHARDED)
def test_damaged_index_is_refused_by_name(kind, bundled, directory, abstract):
    halves = [{n: t for n, t in bundled.items() if (n < "layers.4") == first} for first in (True, False)]
    write_shards(directory, *halves, damage=SHARDED[kind][0])
    message = refused(directory, abstract)
    assert all(word in message for word in SHARDED[kind][1])


@pytest.mark.parametrize("gone", [["config.json"], [FILE], ["config.json", FILE]])
def test_incomplete_or_missing_directory_is_refused_by_name(gone, directory, abstract):
    for name in gone:
        (directory / name).unlink()
    assert gone[0] in refused(directory, abstract)
    assert "absent" in refused(directory / "absent", abstract)


def test_every_damage_is_listed_at_once_and_nothing_reaches_a_device(bundled, directory, monkeypatch):
    tensors = dict(bundled)
    kinds = ["weight missing", "unexpected", "extra axis", "float32 as bf16", "expert scale per 128", "table missing"]
    for kind in kinds:
        TENSORS[kind][0](tensors)
    (directory / FILE).write_bytes(encode(tensors))
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("something was put on a device"))
    alive = len(jax.live_arrays())
    with pytest.raises(CheckpointError) as caught:
        load(Checkpoint(directory))
    assert len(jax.live_arrays()) <= alive
    assert "\n" not in str(caught.value)
    for kind in kinds:
        assert all(word in str(caught.value) for word in TENSORS[kind][1])


def test_many_names_and_one_of_them_twice_are_refused_at_once(directory, abstract):  # a count for each takes minutes
    names = [*(f'"{n}": 0' for n in range(100_000)), '"7": 0']
    (directory / FILE).write_bytes(frame(("{" + ", ".join(names) + "}").encode()))
    begin = time.monotonic()
    assert "names 7 more than once" in refused(directory, abstract)
    assert time.monotonic() - begin < 10


def test_header_longer_than_those_of_the_safetensors_package_is_not_read(directory, abstract):  # 6 GiB of holes
    (directory / FILE).write_bytes(struct.pack("<Q", 6 << 30))
    with (directory / FILE).open("r+b") as stream:
        stream.truncate(7 << 30)
    begin = time.monotonic()
    assert "header of 6442450944 bytes, more than 100000000" in refused(directory, abstract)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("name", [FILE, INDEX, "config.json"])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_what_is_no_regular_file_is_refused_unopened(name, kind, directory, abstract):  # a FIFO waits for its writer
    (directory / name).unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(directory / name)
        case "device":
            (directory / name).symlink_to("/dev/zero")
        case "directory":
            (directory / name).mkdir()
    message = refused(directory, abstract)
    assert name in message and "not a regular file" in message


def test_many_problems_are_cut_in_the_line_and_kept_as_a_tuple(bundled, directory, abstract):  # 40,000 letters
    (directory / FILE).write_bytes(encode({name: ("F32", [1], b"abcd") for name in bundled}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).check(abstract)
    problems = caught.value.problems
    assert len(problems) > 600
    line = "; ".join([*problems[:8], f"and {len(problems) - 8} more"])
    assert str(caught.value) == f"{directory}: {len(problems)} problems: {line}"
    assert list(problems) == Checkpoint(directory).deviations()


def test_names_that_are_long_or_many_are_not_all_repeated(directory, abstract):
    twice = ", ".join(f'"{n}": 0' for n in [*range(100_000), *range(100_000)])
    for header in ("{" + twice + "}", json.dumps({"x" * 10**6: {"dtype": "F4", "shape": [], "data_offsets": [0, 0]}})):
        (directory / FILE).write_bytes(frame(header.encode()))
        with pytest.raises(CheckpointError) as caught:
            load(Checkpoint(directory))
        assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize("name", [S, X])
def test_scale_byte_255_is_refused_at_load(name, bundled, directory):  # E8M0's NaN would spread silently
    damaged = (*bundled[name][:2], bundled[name][2][:-1] + b"\xff")
    (directory / FILE).write_bytes(encode(bundled | {name: damaged}))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(Checkpoint(directory))
