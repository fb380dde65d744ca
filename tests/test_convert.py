"""Orbax directories: what they hold, the way back byte for byte, other meshes, damage, and processes that are killed.

Expected bytes come from the safetensors files themselves, read by their format alone, and from the safetensors package.
"""

import contextlib
import json
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, random_memory, small_config
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save as library_save

from dsv41_jax import Checkpoint, CheckpointError, ConfigError, atomic, cli
from dsv41_jax.files import convert, orbax_writer
from dsv41_jax.files.directory import is_orbax
from dsv41_jax.files.inventory import misplaced
from dsv41_jax.files.load import load_tables
from dsv41_jax.files.orbax import OrbaxCheckpoint
from dsv41_jax.nn.transformer import abstract_parameters, random_parameters
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
    memory = random_memory(cfg)
    sharded = nnx.merge(graph, nnx.from_flat_state(flat))
    orbax_writer.save(sharded, directory, cfg, tables=memory.tables, files={"tokenizer.json": b"{}"})
    return params, memory, directory


def test_the_way_to_orbax_and_back_gives_the_same_files(source, stored, tmp_path):
    convert.convert_checkpoint(stored, tmp_path / "back")
    wanted = contents(source)
    wanted.pop(".git/HEAD")
    assert contents(tmp_path / "back") == wanted
    assert is_orbax(stored) and not is_orbax(source)


def test_parameters_and_tables_are_the_bytes_of_the_files_as_quantized_as_stored(stored):
    bundled = tensors(TINY / "model.safetensors")
    checkpoint = OrbaxCheckpoint(stored)
    seen, calls = set(), []
    restored = leaves(checkpoint.restore(on_progress=lambda *call: calls.append(call)))
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
    for path, leaf in nnx.to_flat_state(nnx.state(checkpoint.restore(placement))):
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


def library_files(params: nnx.Module, memory, file_of) -> dict[str, bytes]:
    """What the safetensors package writes for these parameters."""
    arrays = {}
    for path, leaf in nnx.to_flat_state(nnx.state(params)):
        name, value = ".".join(map(str, path)), np.asarray(leaf[...])
        value = value.view(np.int8) if value.dtype == np.uint8 else value
        head, _, tail = name.partition(".experts.")
        arrays |= {f"{head}.experts.{e}.{tail}": part for e, part in enumerate(value)} if tail else {name: value}
    for layer, table in zip((1,), memory.tables, strict=True):
        arrays[f"layers.{layer}.engram.embed.weight"] = table.weight.view(jnp.float8_e4m3fn)
        arrays[f"layers.{layer}.engram.embed.scale"] = table.scale.view(jnp.float8_e8m0fnu)
    files: dict[str, dict[str, np.ndarray]] = {}
    for name, value in arrays.items():
        files.setdefault(file_of(name), {})[name] = value
    return {file: library_save(part, {"format": "pt"}) for file, part in files.items()}


def test_a_live_model_comes_out_as_the_library_writes_it(live, tmp_path):
    params, memory, directory = live
    convert.convert_checkpoint(directory, tmp_path / "out")
    found = contents(tmp_path / "out")
    assert json.loads(found.pop("config.json")) == small_config().to_dict()
    assert found.pop("tokenizer.json") == b"{}"
    assert found == library_files(params, memory, lambda _: "model.safetensors")


def test_a_large_live_model_comes_out_in_the_released_placement(live, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SINGLE_FILE_BYTES", 10_000)
    params, memory, directory = live
    convert.convert_checkpoint(directory, tmp_path / "out", "safetensors")
    checkpoint = Checkpoint(tmp_path / "out")
    checkpoint.check()
    assert misplaced(checkpoint.placed, small_config()) == []
    found = contents(tmp_path / "out")
    total = sum(info.stop - info.start for info in checkpoint.tensors.values())
    assert json.loads(found["model.safetensors.index.json"])["metadata"] == {"total_size": total}
    wanted = library_files(params, memory, checkpoint.placed.__getitem__)
    assert {name: found[name] for name in found if name.endswith(".safetensors")} == wanted
    assert len(wanted) == 8  # embedding, five layers, head and norm, one Engram


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
            checkpoint.restore(template=nnx.merge(graph, nnx.from_flat_state(other)))
        assert ".".join(path) in str(caught.value) and said in str(caught.value)
        assert len(caught.value.problems) == 1
    mesh = jax.make_mesh((1, 4), ("data", "expert"))
    where = {path: NamedSharding(mesh, P()) for path in flat if path != ("norm", "weight")}
    with pytest.raises(ValueError, match=r"no sharding for norm\.weight"):
        checkpoint.restore(where)


def refused(directory: Path, said: str) -> None:
    """No restore takes it, and says why in one line."""
    with pytest.raises(CheckpointError) as caught:
        OrbaxCheckpoint(directory).restore()
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
    OrbaxCheckpoint(damaged).restore()


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
        OrbaxCheckpoint(damaged, checksums=False).restore()


def test_a_nan_scale_or_a_deviation_of_the_source_is_named_and_nothing_appears(source, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    info = Checkpoint(copy).tensors["layers.0.attn.wq_a.scale"]
    with info.file.open("r+b") as stream:
        stream.seek(info.start)
        stream.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"wq_a\.scale: holds E8M0 byte 255"):
        convert.convert_checkpoint(copy, tmp_path / "out")
    (copy / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        convert.convert_checkpoint(copy, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [copy]


def test_what_is_not_the_configs_is_not_saved(live, tmp_path):
    (params, memory, _), cfg = live, small_config()
    with pytest.raises(CheckpointError, match="tables: shapes"):
        orbax_writer.save(params, tmp_path / "out", cfg)
    graph, state = nnx.split(params)
    flat = dict(nnx.to_flat_state(state))
    path = ("norm", "weight")
    flat[path] = flat[path].replace(flat[path][...].astype(jnp.float32))
    with pytest.raises(CheckpointError, match=r"norm\.weight: is float32 \[32\], the config's is bfloat16"):
        orbax_writer.save(nnx.merge(graph, nnx.from_flat_state(flat)), tmp_path / "out", cfg, tables=memory.tables)
    assert list(tmp_path.iterdir()) == []


def test_only_a_complete_new_checkpoint_replaces_an_old_one(stored, live, tmp_path, monkeypatch):
    directory = Path(shutil.copytree(stored, tmp_path / "model"))
    old = contents(directory)
    with pytest.raises(FileExistsError, match="overwrite"):
        convert.convert_checkpoint(TINY, directory)

    def half(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_copy", half)
        with pytest.raises(OSError, match="disk full"):
            convert.convert_checkpoint(live[2], directory, overwrite=True)
    assert contents(directory) == old
    convert.convert_checkpoint(live[2], directory, overwrite=True)
    Checkpoint(directory).check()
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.parametrize("target", [".", "src", "src/in", "none/x", "photos", "a file"])
def test_targets_that_would_destroy_something_are_refused_in_one_line(target, tmp_path, capsys):
    shutil.copytree(GOLDEN["tiny-full"], tmp_path / "src")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/1.jpg").touch()
    (tmp_path / "a file").touch()
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", str(tmp_path / "src"), str(tmp_path / target), "--overwrite"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")
    assert contents(tmp_path) == before


def test_a_layout_that_the_source_has_already_is_refused(stored, tmp_path):
    with pytest.raises(ValueError, match="'orbax' is not 'safetensors'"):
        convert.convert_checkpoint(stored, tmp_path / "x", "orbax")


CONVERT = """
import sys
from dsv41_jax.files import convert
print("ready", flush=True)
convert.convert_checkpoint(sys.argv[1], sys.argv[2], overwrite=True)
print("done", flush=True)
"""


def child(source: Path, target: Path) -> subprocess.Popen:
    """A process that is about to convert."""
    command = [sys.executable, "-c", CONVERT, str(source), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def duration(source: Path, target: Path) -> float:
    """Seconds of a conversion in a process of its own."""
    process, start = child(source, target), time.monotonic()
    assert process.communicate(timeout=600)[0] == "done\n"
    return time.monotonic() - start


def survives(source: Path, old: Path, complete: Path, target: Path, moments: list[float], read) -> None:
    """After each kill `target` is `old` or reads as `complete`, and what lies beside it does too or is refused. Then a
    conversion runs through and nothing but its result is left."""
    before, new = contents(old), read(complete)
    unfinished = 0
    for seconds in moments:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(old, target)
        process = child(source, target)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        unfinished += "done" not in process.communicate(timeout=60)[0]
        assert contents(target) == before or read(target) == new, seconds
        for partial in atomic.partials(target):
            if contents(partial) == before:  # killed between the exchange and the removal of the old one
                continue
            with contextlib.suppress(CheckpointError, ConfigError):
                assert read(partial) == new, seconds
    assert unfinished > 0
    convert.convert_checkpoint(source, target, overwrite=True)
    assert read(target) == new
    assert list(target.parent.iterdir()) == [target]


def moments(count: int, seconds: float) -> list[float]:
    """Random moments of a conversion that takes so long, one of them surely inside it."""
    rng = random.Random(time.time_ns())
    return [0.05 * seconds, *(rng.uniform(0.0, 1.1 * seconds) for _ in range(count - 1))]


def parameters(directory: Path) -> dict:
    return leaves(OrbaxCheckpoint(directory).restore())


def test_killed_on_the_way_to_orbax_leaves_the_old_or_the_new(source, stored, live, tmp_path):
    survives(source, live[2], stored, tmp_path / "model", moments(2, 2.0), parameters)


@pytest.mark.slow
def test_killed_at_20_moments_on_the_way_to_orbax_leaves_the_old_or_the_new(source, stored, live, tmp_path):
    seconds = duration(source, tmp_path / "model")
    survives(source, live[2], stored, tmp_path / "model", moments(20, seconds), parameters)


@pytest.mark.slow
def test_killed_at_20_moments_on_the_way_back_leaves_the_old_or_the_new(source, stored, live, tmp_path):
    def checked(directory: Path) -> dict[str, bytes]:
        Checkpoint(directory).check()
        return {name: content for name, content in contents(directory).items() if not name.startswith(".git/")}

    seconds = duration(stored, tmp_path / "model")
    survives(stored, live[2], source, tmp_path / "model", moments(20, seconds), checked)
