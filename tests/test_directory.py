"""Where names lead: to the hub, to the bundled checkpoint, and never out of a checkpoint's directory."""

import shutil
from pathlib import Path

import pytest
from conftest import GOLDEN
from test_inventory import expected, full, write_shard  # noqa: F401  (the fixture `full` asks for `expected`)
from test_safetensors import FILE

from dsv41_jax import Checkpoint, CheckpointError
from dsv41_jax.files.directory import inside, is_inside, locate


@pytest.fixture
def directory(tmp_path) -> Path:
    for name in ("config.json", FILE):
        shutil.copy(GOLDEN["tiny-full"] / name, tmp_path)
    return tmp_path


HUB = "hf://deepseek-ai/DeepSeek-V4.1-Flash"


@pytest.mark.parametrize(
    ("name", "revision"), [(HUB, None), (f"{HUB}@main", "main"), (f"{HUB}@refs/pr/1", "refs/pr/1")]
)
def test_hub_name_is_downloaded_as_far_as_it_is_needed(name, revision, directory, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *given, **more: asked.append((given, more)) or str(directory)
    )
    assert Checkpoint(name).path == directory
    patterns = ["*.json", "*.safetensors"]
    assert asked == [((name[5:].split("@")[0],), {"revision": revision, "allow_patterns": patterns})]


@pytest.mark.parametrize("error", [OSError("no route\nto host"), ValueError("Repository Not Found"), RuntimeError("x")])
def test_failed_download_is_one_line(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        locate(HUB)
    wanted = f"{HUB}: 1 problem: cannot be downloaded ({type(error).__name__}: {' '.join(str(error).split())})"
    assert str(caught.value) == wanted


@pytest.mark.parametrize("name", ["hf://", "hf://owner", "hf://a/b/c", "hf:/a/b", "hf://a/b@", "hf://a b/c"])
def test_name_that_is_none_of_the_hub_is_refused_without_asking_it(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match="is not of the form hf://owner/name"):
        locate(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/..", "a/../b", "/a", "//a", "a//b", "./a", "a/", "a\0", "\0"]
)
def test_name_that_leads_out_or_is_no_plain_one_is_refused(name, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="is not a file inside the checkpoint") as caught:
        inside(tmp_path, name)
    assert "\n" not in str(caught.value)
    assert not is_inside(name)


def test_names_and_links_inside_are_followed_and_those_out_of_it_not(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "in").mkdir(parents=True)
    other.mkdir()
    for name, target in (("ok", "in"), ("out", "../other"), ("in/up", "../.."), ("circle", "circle")):
        (home / name).symlink_to(target)
    assert inside(home, "a b/c[1]") == home / "a b/c[1]"  # which is not there
    assert inside(home, "..a") == home / "..a"
    assert inside(home, "ok/x") == home / "ok/x"
    for name in ("out", "out/x", "in/up", "in/up/other", "circle", "circle/x"):
        with pytest.raises(CheckpointError, match="is not a file inside the checkpoint"):
            inside(home, name)
    linked = tmp_path / "linked"
    linked.symlink_to(home)
    assert inside(linked, "ok") == linked / "ok"


def test_links_of_the_hubs_cache_lead_to_its_blobs_and_no_further(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "ok").symlink_to("../../blobs/1")
    (snapshot / "out").symlink_to("../../refs")
    assert inside(snapshot, "ok") == snapshot / "ok"
    with pytest.raises(CheckpointError, match="'out': is not a file inside"):
        inside(snapshot, "out")
