"""Files and directories that appear whole or not at all.

What is written stands beside its target as `.NAME.<random>.partial`, is flushed to the disk, and takes the target's
name in one rename. Killed at any moment, the target is the old one or the new one, both complete. Its writer holds a
lock on a partial while it lives; the next write to the same target removes those that nobody holds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def partials(path: Path) -> list[Path]:
    """What unfinished writes to `path` have left, or are writing."""
    return [entry for entry in path.parent.glob(".*.partial") if entry.name.rsplit(".", 2)[0] == f".{path.name}"]


@contextmanager
def file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file `path`, replacing an old one, when the body ends; dropped if it raises."""
    path = path.resolve()
    with _claimed(path, directory=False) as (temporary, handle):
        with os.fdopen(os.dup(handle), "wb") as stream:
            yield stream
        os.fsync(handle)
        os.replace(temporary, path)
        sync(path.parent)


@contextmanager
def directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """An empty directory that becomes `path` when the body ends; removed if the body raises.

    An existing `path` raises FileExistsError, before the body runs; with `overwrite` the two change places in one step
    and the old one is removed. OSError, also before the body, when the file system cannot do that.
    """
    path = path.resolve()
    if path.exists() and not (overwrite and path.is_dir()):
        raise FileExistsError(f"{path}: exists" + ("" if overwrite else "; overwrite=True (--overwrite) replaces it"))
    with _claimed(path, directory=True) as (temporary, _):
        if path.exists():
            _require_exchange(temporary)
        yield temporary
        with ThreadPoolExecutor(16) as pool:  # a journal commits what waits together
            list(pool.map(sync, [temporary, *temporary.rglob("*")]))
        if overwrite and path.exists():
            _exchange(temporary, path)
        else:
            os.rename(temporary, path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _claimed(path: Path, *, directory: bool) -> Iterator[tuple[Path, int]]:
    """(a new partial of `path`, its locked descriptor); what has its name at the end is removed."""
    for entry in partials(path):
        _remove_unheld(entry)
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        if directory:
            temporary.mkdir()
        flags = os.O_RDONLY if directory else os.O_RDWR | os.O_CREAT | os.O_EXCL
        handle = os.open(temporary, flags, 0o666)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():
            break
        os.close(handle)  # another writer took it for abandoned, before the lock
    try:
        yield temporary, handle
    finally:
        os.close(handle)
        _remove(temporary)


def _remove_unheld(entry: Path) -> None:
    try:
        handle = os.open(entry, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(entry)
    except BlockingIOError:
        pass
    finally:
        os.close(handle)


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> None:
    """Two names change places in one step (renameat2 of Linux)."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"replacing a directory in one step is not built for {sys.platform}", str(other))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot replace a directory in one step ({os.strerror(code)})", str(other))


def _require_exchange(folder: Path) -> None:
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    try:
        _exchange(one, other)
    finally:
        one.rmdir()
        other.rmdir()
