"""One function opens every layout, and what it gives answers to one protocol."""

import subprocess
import sys

import pytest
from test_orbax import contents, leaves

from dsv41_jax import Checkpoint, CheckpointError
from dsv41_jax.files.checkpoint import Stored, open_checkpoint
from dsv41_jax.files.orbax import OrbaxCheckpoint

pytest_plugins = ["test_orbax"]  # fixtures


def test_both_layouts_give_the_same_model(source, stored):
    one, other = open_checkpoint(source), open_checkpoint(str(stored))
    assert isinstance(one, Checkpoint) and isinstance(other, OrbaxCheckpoint)
    assert isinstance(one, Stored) and isinstance(other, Stored)
    assert (one.path, other.path) == (source, stored)
    assert one.config == other.config and one.check() == other.check()
    assert leaves(one.parameters()) == leaves(other.parameters())
    for place in ("mmap", "host"):
        for mine, theirs in zip(one.tables(place), other.tables(place), strict=True):
            assert mine.weight.tobytes() == theirs.weight.tobytes() and mine.scale.tobytes() == theirs.scale.tobytes()
    assert one.held()[1] == other.held()[1] == 2_346_349
    assert other.verify() == []


def test_an_orbax_checkpoint_does_not_go_on_from_a_part(stored):
    with pytest.raises(ValueError, match=r"^loaded: an Orbax checkpoint cannot go on from a part of it"):
        open_checkpoint(stored).parameters(loaded={})


def test_tables_of_an_orbax_checkpoint_are_checked_wherever_they_go(damaged):
    file = damaged / "orbax/engram/layers.4.engram.embed.scale"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    for place in ("mmap", "host", "device"):
        with pytest.raises(CheckpointError, match=r"layers\.4\.engram\.embed\.scale: damaged"):
            open_checkpoint(damaged).tables(place)


def test_the_bundled_checkpoint_opens_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "tiny/orbax").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_checkpoint("tiny"), Checkpoint)
    with pytest.raises(CheckpointError, match="MANIFEST: cannot be read"):
        open_checkpoint("./tiny")
    assert contents(tmp_path) == {}


def test_only_what_works_with_orbax_imports_it():
    code = """
import sys, types
model = sys.modules["dsv41_jax.model"] = types.ModuleType("dsv41_jax.model")  # what it needs is its own affair
model.Model = type("Model", (), {})
from dsv41_jax.files import arrays, checkpoint, directory, expected, inventory, load, safetensors, snapshot
print([name for name in ("orbax", "orbax.checkpoint", "tokenizers", "huggingface_hub", "click") if name in sys.modules])
safetensors.Checkpoint("tiny").parameters()
print([name for name in ("orbax", "orbax.checkpoint", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]
