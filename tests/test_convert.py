"""Conversion: the way back byte for byte, processes that are killed, and memory.

Expected bytes come from the safetensors files themselves, read by their format alone, and from the safetensors package.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, small_config
from flax import nnx
from safetensors.numpy import save as library_save
from test_orbax import TINY, contents, forge, leaves

from dsv41_jax import Checkpoint, CheckpointError, ConfigError, atomic, cli
from dsv41_jax.files import convert
from dsv41_jax.files.directory import is_orbax
from dsv41_jax.files.expected import expected_tensors
from dsv41_jax.files.inventory import misplaced
from dsv41_jax.files.orbax import OrbaxCheckpoint

WEIGHTS = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
pytest_plugins = ["test_orbax"]  # fixtures


def test_the_way_to_orbax_and_back_gives_the_same_files(source, stored, tmp_path):
    convert.convert_checkpoint(stored, tmp_path / "back")
    wanted = contents(source)
    wanted.pop(".git/HEAD")
    assert contents(tmp_path / "back") == wanted
    assert is_orbax(stored) and not is_orbax(source)


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


def test_a_forged_checkpoint_writes_nothing_outside_its_target(stored, tmp_path):
    evil = Path(shutil.copytree(stored, tmp_path / "x/y/model"))
    (tmp_path / "x/y/payload").write_bytes(b"payload")

    def change(document):
        document["files"]["../payload"] = {"bytes": 7, "sha256": hashlib.sha256(b"payload").hexdigest()}
        return document

    forge(evil, change)
    (tmp_path / "victim").mkdir()
    with pytest.raises(CheckpointError, match=r"'\.\./payload': is not a file inside the checkpoint"):
        convert.convert_checkpoint(evil, tmp_path / "victim/model")
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "inference/notes.txt", "circle"])
def test_a_link_out_of_the_source_is_refused(name, source, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    (tmp_path / "secret").write_bytes(b"secret")
    (copy / name).symlink_to("../../secret" if "/" in name else "../secret")
    with pytest.raises(CheckpointError, match=re.escape(f"{name!r}: is not a file inside the checkpoint")):
        convert.convert_checkpoint(copy, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "secret"}
    (copy / name).unlink()
    (copy / name).symlink_to("config.json" if "/" not in name else "../config.json")  # inside it may link
    convert.convert_checkpoint(copy, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == (source / "config.json").read_bytes()


def test_the_hubs_cache_of_links_converts(source, stored, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(path for path in source.iterdir() if path.is_file()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    convert.convert_checkpoint(snapshot, tmp_path / "out")
    wanted = {path.name for path in source.iterdir() if path.is_file()}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_file()} == wanted - WEIGHTS
    assert parameters(tmp_path / "out") == parameters(stored)


def test_what_comes_back_is_read_before_it_counts(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "check", lambda self, *_: self.fail())
    with pytest.raises(AttributeError, match="fail"):
        convert.convert_checkpoint(stored, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


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
    return leaves(OrbaxCheckpoint(directory).parameters())


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


MEASURE = """
import json, resource, sys
from dsv41_jax.files import orbax_writer
from dsv41_jax.files.convert import convert_checkpoint
orbax_writer.PART_BYTES = int(sys.argv[3])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert_checkpoint("tiny", sys.argv[2] + ".warm")
before = peak()
convert_checkpoint(sys.argv[1], sys.argv[2])
there = peak()
convert_checkpoint(sys.argv[2], sys.argv[2] + ".back")
print(json.dumps([before, there, peak()]))
"""


def test_memory_is_that_of_a_part_and_not_of_the_checkpoint(tmp_path):
    cfg = small_config(
        n_routed_experts=32, hidden_size=512, moe_intermediate_size=512, engram_num_embeddings=[2_000_000]
    )
    wanted = expected_tensors(cfg)
    header, at = {}, 0
    for name, tensor in wanted.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(cfg.to_dict()))
    with (tmp_path / "source/model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)
    part = 8 << 20  # the largest parameter is smaller
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "source"), str(tmp_path / "orbax"), str(part)]
    # One arena: what the allocator keeps for each of Orbax's threads is not what is looked for.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment)
    before, there, back = json.loads(done.stdout)
    assert at > 12 * part
    assert max(there, back) - before < 6 * part, (there - before, back - before)
