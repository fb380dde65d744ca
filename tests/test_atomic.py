"""Files and directories appear whole or not at all: raised through, killed, written by two at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41_jax import atomic

WRITER = """
import sys
from pathlib import Path
sys.path.append(sys.argv[3])  # the file by itself: importing the package takes seconds
import atomic
target, kind = Path(sys.argv[1]), sys.argv[2]
context = atomic.file(target) if kind == "file" else atomic.directory(target, overwrite=True)
with context as out:
    if kind == "file":
        out.write(b"half"); out.flush()
    else:
        (out / "a").write_bytes(b"half")
    print("inside", flush=True)
    sys.stdin.readline()
"""


def start(target: Path, kind: str) -> subprocess.Popen:
    """A process inside the body of a write, waiting for a line."""
    command = [sys.executable, "-c", WRITER, str(target), kind, str(Path(atomic.__file__).parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "inside\n"
    return process


def finish(process: subprocess.Popen) -> None:
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0


def content(path: Path) -> bytes | dict[str, bytes]:
    return path.read_bytes() if path.is_file() else {f.name: f.read_bytes() for f in path.iterdir()}


def old(path: Path, kind: str) -> bytes | dict[str, bytes]:
    """Give `path` an earlier content."""
    if kind == "file":
        path.write_bytes(b"old")
    else:
        path.mkdir()
        (path / "z").write_bytes(b"old")
    return content(path)


def rewrite(path: Path, kind: str) -> None:
    with atomic.file(path) if kind == "file" else atomic.directory(path, overwrite=True) as out:
        out.write(b"new") if kind == "file" else (out / "a").write_bytes(b"new")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_killed_write_leaves_the_old_and_a_partial_that_the_next_write_removes(kind, tmp_path):
    target = tmp_path / "x.out"
    before = old(target, kind)
    bystander = tmp_path / ".x.out.more.0a.partial"  # of another target, x.out.more
    bystander.touch()
    process = start(target, kind)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert content(target) == before
    (left,) = atomic.partials(target)
    assert left.name.startswith(".x.out.") and content(left) in (b"half", {"a": b"half"})
    rewrite(target, kind)
    assert content(target) == (b"new" if kind == "file" else {"a": b"new"})
    assert set(tmp_path.iterdir()) == {target, bystander}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_write_leaves_the_partial_of_a_live_writer_alone(kind, tmp_path):
    target = tmp_path / "x"
    process = start(target, kind)
    rewrite(target, kind)
    assert len(atomic.partials(target)) == 1
    assert content(target) == (b"new" if kind == "file" else {"a": b"new"})
    finish(process)
    assert content(target) == (b"half" if kind == "file" else {"a": b"half"})
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("present", [False, True])
def test_a_body_that_raises_leaves_what_was_there(kind, present, tmp_path):
    target = tmp_path / "x"
    before = old(target, kind) if present else None

    def interrupted():
        with atomic.file(target) if kind == "file" else atomic.directory(target, overwrite=True) as out:
            out.write(b"half") if kind == "file" else (out / "a").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (content(target) if target.exists() else None) == before
    assert list(tmp_path.iterdir()) == ([target] if present else [])


def test_the_target_is_never_absent_while_a_directory_is_replaced(tmp_path, monkeypatch):
    target, seen = tmp_path / "x", []
    old(target, "directory")
    for name in ("rename", "replace"):  # the exchange must not be two renames with nothing in between
        monkeypatch.setattr(os, name, lambda *_: seen.append("rename"))
    rewrite(target, "directory")
    assert content(target) == {"a": b"new"}
    assert seen == []


def test_an_existing_directory_is_refused_before_anything_is_written(tmp_path):
    target = tmp_path / "x"
    old(target, "directory")
    with pytest.raises(FileExistsError, match="overwrite"), atomic.directory(target):
        raise AssertionError
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(FileExistsError, match="file: exists"), atomic.directory(file, overwrite=True):
        raise AssertionError
    assert set(tmp_path.iterdir()) == {target, file}


def test_a_directory_that_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "x"

    def overtaken():
        with atomic.directory(target) as out:
            (out / "a").write_bytes(b"new")
            old(target, "directory")

    with pytest.raises(OSError, match="not empty"):
        overtaken()
    assert content(target) == {"z": b"old"}
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_a_link_and_modes_follow_the_umask(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    rewrite(link, "file")
    assert link.is_symlink() and real.read_bytes() == b"new"
    mask = os.umask(0)
    os.umask(mask)
    assert real.stat().st_mode & 0o777 == 0o666 & ~mask
