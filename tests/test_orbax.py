"""Orbax directories: what they hold, how they come onto other meshes, and damage.

Expected bytes come from the safetensors files themselves, read by their format alone.
"""

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, small_config
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv41_jax import CheckpointError, cli
from dsv41_jax.engine.tables import EngramLookup
from dsv41_jax.files import convert, orbax_writer
from dsv41_jax.files.load import load_tables
from dsv41_jax.files.orbax import OrbaxCheckpoint
from dsv41_jax.nn.random import random_parameters
from dsv41_jax.nn.transformer import abstract_parameters
from dsv41_jax.sharding import placements

TINY = GOLDEN["tiny-full"]


KIND = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "uint8", "BF16": "bfloat16", "F32": "float32"}


def tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    raw = file.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {n: (e["dtype"], e["shape"], raw[start:][slice(*e["data_offsets"])]) for n, e in header.items()}


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def leaves(params: nnx.Module) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(dtype, shape, bytes) of every parameter by its dotted path."""
    flat = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(params))}
    return {name: (value.dtype.name, value.shape, value.tobytes()) for name, value in flat.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The bundled tensors as no library would write them: two shards, tensors shuffled, odd spaces, metadata."""
    directory = tmp_path_factory.mktemp("source") / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, directory)
    (directory / "inference").mkdir()
    (directory / "inference/model.py").write_text("# released beside the weights\n")
    (directory / ".git").mkdir()
    (directory / ".git/HEAD").write_text("not a part of the checkpoint")
    bundled = list(tensors(TINY / "model.safetensors").items())
    random.Random(1).shuffle(bundled)
    placed = {}
    for number, chosen in ((1, bundled[::3]), (2, [*bundled[1::3], *bundled[2::3]])):
        file, header, data = f"model-{number:05d}-of-00002.safetensors", {"__metadata__": {"by": "hand"}}, b""
        for name, (dtype, shape, content) in chosen:
            header[name] = {"shape": shape, "data_offsets": [len(data), len(data) + len(content)], "dtype": dtype}
            data += content
            placed[name] = file
        text = json.dumps(header, indent=number).encode() + b"   " * number
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


@pytest.fixture(scope="module")
def stored(source) -> Path:
    """`source` in Orbax, by the command."""
    directory = source.parent / "stored"
    cli.main(["convert", str(source), str(directory)])
    return directory


@pytest.fixture
def damaged(stored, tmp_path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "damaged"))


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """(parameters, Engram memory, the Orbax directory) of a random model saved while it lies on four devices."""
    cfg, directory = small_config(), tmp_path_factory.mktemp("live") / "orbax"
    params = random_parameters(cfg)
    mesh = jax.make_mesh((1, 4), ("data", "expert"))
    graph, state = nnx.split(params)
    where, flat = placements(params, mesh), dict(nnx.to_flat_state(state))
    flat = {path: leaf.replace(jax.device_put(leaf[...], where[path])) for path, leaf in flat.items()}
    assert len({leaf[...].sharding for leaf in flat.values()}) > 1
    memory = EngramLookup.random(cfg)
    sharded = nnx.merge(graph, nnx.from_flat_state(flat))
    orbax_writer.save(sharded, directory, cfg, tables=memory.tables, files={"tokenizer.json": b"{}"})
    return params, memory, directory


def test_parameters_and_tables_are_the_bytes_of_the_files_as_quantized_as_stored(stored):
    bundled = tensors(TINY / "model.safetensors")
    checkpoint = OrbaxCheckpoint(stored)
    seen, calls = set(), []
    restored = leaves(checkpoint.parameters(on_progress=lambda *call: calls.append(call)))
    for name, (kind, shape, content) in restored.items():
        at = name.find(".experts.") + len(".experts.")
        parts = [f"{name[:at]}{e}.{name[at:]}" for e in range(shape[0])] if ".experts." in name else [name]
        assert {KIND[bundled[part][0]] for part in parts} == {kind}
        assert [tuple(bundled[part][1]) for part in parts] == [shape[len(parts) > 1 :]] * len(parts)
        assert b"".join(bundled[part][2] for part in parts) == content
        seen |= set(parts)
    for layer, mapped, read in zip((1, 4), checkpoint.tables(), load_tables(checkpoint, "host"), strict=True):
        for kind in ("weight", "scale"):
            name = f"layers.{layer}.engram.embed.{kind}"
            assert bundled[name][2] == getattr(mapped, kind).tobytes() == getattr(read, kind).tobytes()
            seen.add(name)
    assert seen == set(bundled)
    assert [call[:2] for call in calls] == [(i + 1, len(restored)) for i in range(len(restored))]


RESTORE = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from dsv41_jax.files.orbax import OrbaxCheckpoint
from dsv41_jax.nn.transformer import abstract_parameters
mesh = jax.make_mesh((1, 2), ("data", "expert"))
checkpoint = OrbaxCheckpoint(sys.argv[1])
paths = [path for path, _ in nnx.to_flat_state(nnx.state(abstract_parameters(checkpoint.config)))]
own = {path: NamedSharding(mesh, P(None, "expert") if path[0] == "embed" else P()) for path in paths}
arrays, report = {}, {}
for kind, placement in (("mesh", mesh), ("own", own)):
    for path, leaf in nnx.to_flat_state(nnx.state(checkpoint.parameters(placement))):
        name = kind + ":" + ".".join(map(str, path))
        arrays[name] = np.frombuffer(np.asarray(leaf[...]).tobytes(), np.uint8)
        pieces = [shard.data.shape for shard in leaf[...].addressable_shards]
        report[name] = (len(leaf[...].sharding.device_set), leaf[...].shape, pieces)
np.savez(sys.argv[2], **arrays)
print(json.dumps(report))
"""


def test_what_four_devices_saved_two_restore_in_their_own_shardings(live, tmp_path):
    params, _, directory = live
    out = tmp_path / "restored.npz"
    command = [sys.executable, "-c", RESTORE, str(directory), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    report, found, wanted = json.loads(done.stdout), np.load(out), leaves(params)
    assert set(found) == {f"{kind}:{name}" for kind in ("mesh", "own") for name in wanted}
    for name in found:
        assert found[name].tobytes() == wanted[name.partition(":")[2]][2], name
        devices, shape, pieces = report[name]
        halved = {"mesh": 0 if ".experts." in name else None, "own": 1 if ":embed." in name else None}
        axis = halved[name.partition(":")[0]]
        piece = [size // 2 if i == axis else size for i, size in enumerate(shape)]
        assert (devices, pieces) == (2, [piece, piece]), name
    assert sum(".experts." in name for name in found) > 0


def test_nothing_is_cast_cut_or_left_unplaced(stored):  # Orbax restores into another dtype silently
    checkpoint = OrbaxCheckpoint(stored)
    template = abstract_parameters(checkpoint.config)
    graph, state = nnx.split(template)
    flat = dict(nnx.to_flat_state(state))
    for path, changed, said in (
        (("norm", "weight"), jax.ShapeDtypeStruct((96,), jnp.float32), "bfloat16 [96], to be restored as float32 [96]"),
        (("head", "weight"), jax.ShapeDtypeStruct((287, 96), jnp.bfloat16), "restored as bfloat16 [287, 96]"),
    ):
        other = flat | {path: flat[path].replace(changed)}
        with pytest.raises(CheckpointError) as caught:
            checkpoint.parameters(template=nnx.merge(graph, nnx.from_flat_state(other)))
        assert ".".join(path) in str(caught.value) and said in str(caught.value)
        assert len(caught.value.problems) == 1
    mesh = jax.make_mesh((1, 4), ("data", "expert"))
    where = {path: NamedSharding(mesh, P()) for path in flat if path != ("norm", "weight")}
    with pytest.raises(ValueError, match=r"no sharding for norm\.weight"):
        checkpoint.parameters(where)


def refused(directory: Path, said: str) -> None:
    """No restore takes it, and says why in one line."""
    with pytest.raises(CheckpointError) as caught:
        OrbaxCheckpoint(directory).parameters()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def flip(file: Path, at: float) -> None:
    """Change a bit of a byte, at this share of the file."""
    raw = bytearray(file.read_bytes())
    raw[int(at * len(raw))] ^= 1 << random.Random(len(raw)).randrange(8)
    file.write_bytes(raw)


def kinds(directory: Path) -> dict[str, Path]:
    """A file of every kind; of the first part, so that it is found soon."""
    part = min((directory / "orbax/parameters").iterdir())
    largest = max((path for path in part.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    inner = ("MANIFEST", "headers/model-00002-of-00002.safetensors", "engram/layers.4.engram.embed.scale")
    names = ("config.json", "inference/model.py", *(f"orbax/{name}" for name in inner))
    return {name: directory / name for name in names} | {"data": largest, "metadata": part / "_METADATA"}


def test_a_flipped_byte_in_any_kind_of_file_is_refused_and_the_file_named(damaged, tmp_path):
    manifest = damaged / "orbax/MANIFEST"
    places = [(file, 0.37) for file in kinds(damaged).values()] + [(manifest, 0.0), (manifest, 0.99999)]
    body = manifest.read_bytes()
    places.append((manifest, body.rindex(b"\n") / len(body)))
    for file, at in places:
        before = file.read_bytes()
        flip(file, at)
        refused(damaged, str(file.relative_to(damaged)))
        file.write_bytes(before)
    flip(kinds(damaged)["data"], 0.5)
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        convert.convert_checkpoint(damaged, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [damaged]


@pytest.mark.slow
def test_a_flipped_byte_in_any_file_is_refused(damaged):
    for file in sorted(path for path in damaged.rglob("*") if path.is_file()):
        before = file.read_bytes()
        flip(file, random.Random(str(file)).random())
        refused(damaged, str(file.relative_to(damaged)))
        file.write_bytes(before)
    OrbaxCheckpoint(damaged).parameters()


def test_an_incomplete_directory_is_refused(damaged):
    for name, file in kinds(damaged).items():
        before = file.read_bytes()
        file.write_bytes(before[:-1])
        refused(damaged, str(file.relative_to(damaged)))
        file.unlink()
        refused(damaged, "orbax/MANIFEST: cannot be read" if name == "orbax/MANIFEST" else "missing")
        file.write_bytes(before)
    (damaged / "orbax/parameters/more").write_bytes(b"")
    refused(damaged, "orbax/parameters/more: unexpected")


def test_sizes_alone_still_refuse_what_orbax_cannot_read(damaged):
    flip(kinds(damaged)["metadata"], 0.0)
    with pytest.raises(CheckpointError, match=r"parameters/001\.0: Orbax cannot read it"):
        OrbaxCheckpoint(damaged, checksums=False).parameters()


def forge(directory: Path, change) -> None:
    """Rewrite the manifest as its own author would: `change(document)`, then its right sum."""
    manifest = directory / "orbax/MANIFEST"
    document = json.loads(manifest.read_bytes().rpartition(b"\n")[0])
    body = json.dumps(change(document)).encode()
    manifest.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode())


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "ABSOLUTE", "./config.json", "", "a\0b", "link"])
def test_a_manifest_names_no_file_outside_its_directory(name, damaged):  # not even to say that its bytes are others
    secret = damaged.parent / "secret"
    secret.write_bytes(b"secret")
    (damaged / "link").symlink_to(secret)
    name = str(secret) if name == "ABSOLUTE" else name
    entry = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    for wrong in (entry, entry | {"bytes": 7}):
        forge(damaged, lambda document, wrong=wrong: document | {"files": document["files"] | {name: wrong}})
        refused(damaged, f"{name!r}: is not a file inside the checkpoint")


@pytest.mark.parametrize("part", ["..", "../..", "/tmp", ".", ""])
def test_a_manifest_names_no_part_outside_its_directory(part, damaged):
    def change(document):
        document["parameters"]["norm.weight"]["part"] = part
        return document

    forge(damaged, change)
    refused(damaged, "is not a file inside the checkpoint")


@pytest.mark.parametrize(
    "document",
    [
        [], {}, None, 3, {"format": 1}, {"format": 1, "files": [], "parameters": {}},
        {"format": 1, "files": {"config.json": {}}, "parameters": {}},
        {"format": 1, "files": {"config.json": {"bytes": "3", "sha256": ""}}, "parameters": {}},
        {"format": 1, "files": {"config.json": {"bytes": -3, "sha256": ""}}, "parameters": {}},
        {"format": 1, "files": {}, "parameters": {"a": {"part": 1, "dtype": "float32", "shape": []}}},
        {"format": 1, "files": {}, "parameters": {"a": {"part": "1", "dtype": "float32", "shape": None}}},
        {"format": 1, "files": {}, "parameters": {"a": {"part": "1", "dtype": "float32", "shape": ["2"]}}},
    ],
)  # fmt: skip
def test_a_malformed_manifest_is_one_line(document, damaged):
    forge(damaged, lambda _: document)
    refused(damaged, "orbax/MANIFEST: malformed")


@pytest.mark.parametrize("kind", ["fifo", "device", "sparse"])
def test_a_manifest_that_never_ends_is_not_read(kind, damaged):
    manifest = damaged / "orbax/MANIFEST"
    manifest.unlink()
    if kind == "sparse":
        with manifest.open("wb") as stream:
            stream.truncate(6 << 30)
    elif kind == "fifo":
        os.mkfifo(manifest)
    else:
        manifest.symlink_to("/dev/zero")
    refused(damaged, "6442450944 bytes, more than 100000000" if kind == "sparse" else "not a regular file")


def test_a_manifest_of_a_later_format_says_so(damaged):
    forge(damaged, lambda document: {"format": 2, "anything": document})
    refused(damaged, "orbax/MANIFEST: format 2 is not 1")


def test_verify_finds_what_a_manifest_with_right_sums_hides(damaged):  # a part that Orbax itself left incomplete
    assert OrbaxCheckpoint(damaged).verify() == []
    (damaged / "orbax/parameters/001.0/manifest.ocdbt").unlink()

    def change(document):
        document["files"].pop("orbax/parameters/001.0/manifest.ocdbt")
        return document

    forge(damaged, change)
    (problem,) = OrbaxCheckpoint(damaged).verify()
    assert problem.startswith("orbax/parameters/001.0: Orbax cannot read it")
