"""Where names lead: to the hub, to the bundled checkpoint, and never out of a checkpoint's directory."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.utils as hub
import pytest
from conftest import GOLDEN
from test_inventory import expected, full, write_shard  # noqa: F401  (the fixture `full` asks for `expected`)
from test_safetensors import FILE, decode, write_shards

from dsv41_jax import Checkpoint, CheckpointError
from dsv41_jax.files.checkpoint import open_checkpoint
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


def published(directory: Path, monkeypatch) -> list[dict]:
    """`directory` as a repository of the hub; what is asked of it. The headers come by the format's definition."""
    asked = []

    def snapshot_download(repository, *, revision, allow_patterns):
        asked.append({"repository": repository, "revision": revision, "patterns": allow_patterns})
        cache = directory / "cache/snapshots/0123abc"
        cache.mkdir(parents=True)
        for file in directory.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, cache)
        return str(cache)

    def get_safetensors_metadata(repository, *, revision):
        asked.append({"repository": repository, "revision": revision})
        files = {}
        for file in directory.glob("*.safetensors"):
            raw = file.read_bytes()
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            metadata = header.pop("__metadata__", {})
            tensors = {
                name: hub.TensorInfo(entry["dtype"], entry["shape"], tuple(entry["data_offsets"]))
                for name, entry in header.items()
            }
            files[file.name] = hub.SafetensorsFileMetadata(metadata=metadata, tensors=tensors)
        return SimpleNamespace(files_metadata=files)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", get_safetensors_metadata)
    return asked


def test_headers_alone_are_read_at_the_hub_and_no_weights_are_downloaded(directory, monkeypatch):  # 510 GB
    asked = published(directory, monkeypatch)
    stored = open_checkpoint(f"{HUB}@main", headers_only=True)
    assert asked == [
        {"repository": HUB[5:], "revision": "main", "patterns": ["*.json"]},
        {"repository": HUB[5:], "revision": "0123abc"},  # the commit that the config is of
    ]
    assert stored.verify() == [] and stored.held() == Checkpoint(directory).held()
    assert list(stored.check()) == list(Checkpoint(directory).check())
    assert [path.name for path in stored.path.iterdir()] == ["config.json"]


def test_shards_at_the_hub_are_checked_as_those_of_a_directory(directory, monkeypatch):
    bundled = decode((directory / FILE).read_bytes())
    halves = [{n: t for n, t in bundled.items() if (n < "layers.4") == first} for first in (True, False)]
    halves[0]["ghost.weight"] = ("F32", [1], b"abcd")
    halves[1]["norm.weight"] = ("F32", [96], bytes(384))
    write_shards(directory, *halves, damage=lambda index: index["weight_map"].update({"lost": "model-3.safetensors"}))
    published(directory, monkeypatch)
    problems = open_checkpoint(HUB, headers_only=True).verify()
    own = Checkpoint(directory).verify()
    lost = [problem for problem in problems if problem.startswith("model-3")]
    assert lost == ["model-3.safetensors: its header was not read at the hub"]
    assert set(problems) - set(lost) == {problem for problem in own if not problem.startswith("model-3")}
    assert {"ghost.weight: unexpected", "norm.weight: dtype F32, expected BF16"} <= set(problems)


def test_hostile_headers_of_the_hub_are_problems(directory, monkeypatch):
    published(directory, monkeypatch)
    held = {"norm.weight": SimpleNamespace(dtype=[], shape=None, data_offsets=(3, "x"))}
    files = SimpleNamespace(files_metadata={FILE: SimpleNamespace(tensors=held)})
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda *_, **__: files)
    assert Checkpoint(HUB, headers_only=True).problems == [f"norm.weight: malformed header entry in {FILE}"]


@pytest.mark.parametrize("error", [OSError("no route\nto host"), KeyError("x"), RuntimeError("not a safetensors repo")])
def test_headers_that_cannot_be_had_are_one_line(error, directory, monkeypatch):
    def fail(*_, **__):
        raise error

    published(directory, monkeypatch)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", fail)
    with pytest.raises(CheckpointError, match=r"headers cannot be read \(") as caught:
        open_checkpoint(HUB, headers_only=True)
    assert "\n" not in str(caught.value)


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
