"""A checkpoint's directory: where a name leads, which layout lies there, and the reading of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from dsv41_jax.untrusted import few

ROOT = "orbax"  # the folder that only one of the layouts has
LAYOUTS = ("orbax", "safetensors")
BLOCK_BYTES = 4 << 20
Progress = Callable[[int, int, str], None]


class CheckpointError(ValueError):
    """A checkpoint cannot be used; one line of the problems found, the first few of many. `problems` has them all."""

    def __init__(self, where: Path | str, problems: list[str]):
        self.problems = tuple(problems)
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{where}: {len(problems)} {noun}: {few(problems)}")


def locate(path: str | Path, *, headers_only: bool = False) -> Path:
    """The directory of a checkpoint: itself, that of the bundled one, `tiny`, or for `hf://owner/name[@revision]` the
    hub's cache, downloaded as far as it is not there; with `headers_only` no weights are (`hub_headers` reads theirs).
    Raises CheckpointError."""
    if is_hub(path):
        return _download(str(path), ["*.json"] if headers_only else ["*.json", "*.safetensors"])
    directory = Path(__file__).parent.parent / "data" / "tiny" if path == "tiny" else Path(path)
    if not directory.is_dir():
        raise CheckpointError(directory, ["is not a directory (nor the bundled checkpoint's name, 'tiny')"])
    return directory


def is_hub(path: str | Path) -> bool:
    """Whether a name is one of the hub's, well formed or not."""
    return isinstance(path, str) and path.startswith("hf:")


def _repository(name: str) -> tuple[str, str | None]:
    """Owner and name, and the revision if there is one."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if found is None:
        raise CheckpointError(name, ["is not of the form hf://owner/name or hf://owner/name@revision"])
    return found[1], found[2]


@contextmanager
def _asking(name: str, said: str) -> Iterator[None]:
    """Whatever goes wrong at the hub is one line: its library raises its own errors, those of its HTTP client and of
    the system."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise CheckpointError(name, [f"{said} ({type(error).__name__}: {text})"]) from None


def _download(name: str, patterns: list[str]) -> Path:
    """A snapshot of those files of a repository."""
    repository, revision = _repository(name)
    with _asking(name, "cannot be downloaded"):
        from huggingface_hub import snapshot_download  # only these names need its imports

        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))


def hub_headers(name: str, directory: Path) -> dict[str, dict[str, Any]]:
    """The headers of a repository's safetensors files by file, read there without their data: those of the commit that
    `directory` is the snapshot of. Raises CheckpointError."""
    repository, revision = _repository(name)
    commit = directory.name if directory.parent.name == "snapshots" else revision
    with _asking(name, "headers cannot be read"):
        from huggingface_hub import get_safetensors_metadata

        files = get_safetensors_metadata(repository, revision=commit).files_metadata
    return {
        file: {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for tensor, info in held.tensors.items()
        }
        for file, held in files.items()
    }


def is_orbax(path: str | Path) -> bool:
    """Whether a directory is of the Orbax layout, complete or not."""
    return (Path(path) / ROOT).is_dir()


def is_inside(name: str) -> bool:
    """Whether a name that a file gives can be one of a file inside the directory."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and path.as_posix() == name
        and not path.is_absolute()
        and not {"..", "\0"} & {*path.parts, *name}
    )


def inside(directory: Path, name: str) -> Path:
    """The file `name` of a directory. Raises CheckpointError for one that leads out of it, by itself or as a link; in
    the hub's cache files are links to the `blobs` beside the snapshots."""
    home = directory.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        if is_inside(name) and any((directory / name).resolve().is_relative_to(allowed) for allowed in homes):
            return directory / name
    except (OSError, RuntimeError):  # links in a circle
        pass
    raise CheckpointError(directory, [f"{name!r}: is not a file inside the checkpoint"])


def blocks(file: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """The bytes start..stop of a file, 4 MiB at a time. Raises CheckpointError when the file is shorter."""
    with file.open("rb") as stream:
        stream.seek(start)
        while stop is None or start < stop:
            block = stream.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - start))
            if not block and stop is not None:
                raise CheckpointError(file.parent, [f"{file.name}: ends before byte {stop}"])
            if not block:
                return
            start += len(block)
            yield block
