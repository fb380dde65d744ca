"""Writing to Orbax: nothing but the config's parameters, and nothing that cannot be read back."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import small_config
from flax import nnx
from test_orbax import contents, leaves

from dsv41_jax import CheckpointError
from dsv41_jax.files import orbax_writer
from dsv41_jax.files.convert import convert_checkpoint
from dsv41_jax.files.orbax import OrbaxCheckpoint

pytest_plugins = ["test_orbax"]  # fixtures


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


@pytest.mark.parametrize("parent", ["run[1]", "a*", "q?", "[!x]", "#% é"])
def test_a_path_may_hold_letters_of_patterns(parent, source, stored, tmp_path):  # Orbax finds its files by a glob
    (tmp_path / parent).mkdir()
    (tmp_path / "ab").mkdir()  # which `a*` matches
    target = tmp_path / parent / "model[2]"
    convert_checkpoint(source, target)
    assert leaves(OrbaxCheckpoint(target).parameters()) == leaves(OrbaxCheckpoint(stored).parameters())
    convert_checkpoint(target, tmp_path / parent / "back")
    wanted = contents(source)
    wanted.pop(".git/HEAD")
    assert contents(tmp_path / parent / "back") == wanted
    convert_checkpoint(source, target, overwrite=True)
    assert OrbaxCheckpoint(target).verify() == []
    assert {path.name for path in (tmp_path / parent).iterdir()} == {"model[2]", "back"}


def break_manifest(folder: Path) -> None:
    (folder / "manifest.ocdbt").unlink()


def break_metadata(folder: Path) -> None:
    (folder / "_METADATA").write_text("{}")


@pytest.mark.parametrize("damage", [break_manifest, break_metadata])
def test_what_orbax_says_to_have_written_is_read_before_it_counts(damage, source, stored, tmp_path, monkeypatch):
    good = Path(shutil.copytree(stored, tmp_path / "good"))
    before = contents(good)
    true = ocp.PyTreeCheckpointer.save

    def save(self, directory, *given, **options):
        true(self, directory, *given, **options)
        damage(Path(directory))

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", save)
    for target, overwrite in ((tmp_path / "new", False), (good, True)):
        with pytest.raises(CheckpointError, match="Orbax cannot read it"):
            convert_checkpoint(source, target, overwrite=overwrite)
    assert contents(good) == before and list(tmp_path.iterdir()) == [good]


def test_other_bytes_than_those_written_are_found(source, tmp_path, monkeypatch):
    true = ocp.PyTreeCheckpointer.save

    def save(self, directory, args, **options):
        changed = jax.tree.map(lambda array: np.roll(array, 1, 0), args.item)
        true(self, directory, args=ocp.args.PyTreeSave(changed, save_args=args.save_args), **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", save)
    with pytest.raises(CheckpointError, match="Orbax reads other bytes than it wrote"):
        convert_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../out.json", "/tmp/out.json", "a/../../b", ""])
def test_a_file_that_travels_along_stays_inside(name, live, tmp_path):
    params, memory, _ = live
    with pytest.raises(CheckpointError, match="is not a file inside the checkpoint"):
        orbax_writer.save(params, tmp_path / "out", small_config(), tables=memory.tables, files={name: b"{}"})
    assert list(tmp_path.iterdir()) == []
