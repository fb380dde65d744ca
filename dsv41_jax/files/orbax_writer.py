"""Writing a model to Orbax (`orbax` has the layout): part by part, and readable only once it is complete."""

from __future__ import annotations

import glob
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from dsv41_jax import atomic
from dsv41_jax.config import Config
from dsv41_jax.engine.tables import DeviceTable, Table
from dsv41_jax.files.directory import BLOCK_BYTES, ROOT, CheckpointError, Progress, inside
from dsv41_jax.files.expected import ParameterPath, differences, expected_tables, flat_parameters, kinds
from dsv41_jax.files.inventory import shard_of
from dsv41_jax.files.orbax import (
    PARAMETERS,
    TABLES,
    Manifest,
    OrbaxCheckpoint,
    StoredFile,
    StoredParameter,
    nested,
    open_checkpointer,
    restore_part,
    sha256_of,
)
from dsv41_jax.nn.transformer import Transformer, abstract_parameters
from dsv41_jax.sharding import dotted

PART_BYTES, CHUNK_BYTES = 1 << 30, 64 << 20
Value = Callable[[ParameterPath], jax.Array | np.ndarray]


def _parts(sizes: Mapping[ParameterPath, int], cfg: Config) -> dict[str, list[ParameterPath]]:
    """The parameters of each part: of one released shard and up to 1 GiB in all, or a single larger one."""
    parts: dict[str, list[ParameterPath]] = {}
    room: dict[int, list[int]] = {}
    for path, size in sizes.items():
        shard = shard_of(dotted(path), cfg)
        left = room.setdefault(shard, [])
        part = next((k for k, free in enumerate(left) if size <= free), len(left))
        if part == len(left):
            left.append(PART_BYTES)
        left[part] -= size
        parts.setdefault(f"{shard:03d}.{part}", []).append(path)
    return parts


@contextmanager
def _plain(folder: Path) -> Iterator[Path]:
    """A path to `folder` that is no pattern: Orbax finds its own files by a glob over the whole path, and does without
    what it does not find."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as links:
        link = Path(links) / "parent"
        link.symlink_to(folder.parent)
        yield link / folder.name


def _checksum(array: jax.Array | np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


class Writer:
    """Fills an empty directory; nothing of it can be read before `seal`."""

    def __init__(self, directory: Path, cfg: Config, on_progress: Progress | None = None):
        self.directory, self.cfg, self.on_progress = directory, cfg, on_progress
        self._entries: dict[str, StoredParameter] = {}
        self._sums: dict[str, str] = {}
        self._done, self._total = 0, 0

    def expect(self, nbytes: int) -> None:
        """How many bytes of weights will come, for `on_progress`."""
        self._total = nbytes

    def _advance(self, nbytes: int, name: str) -> None:
        self._done += nbytes
        if self.on_progress is not None:
            self.on_progress(self._done, self._total, name)

    def parameters(self, leaves: Mapping[ParameterPath, nnx.Variable], value: Value) -> None:
        """The parameters, part by part; `leaves` have their shapes and dtypes, `value(path)` gives the array."""
        sizes = {path: leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items()}
        for part, paths in _parts(sizes, self.cfg).items():
            arrays = {dotted(path): value(path) for path in paths}
            for name, array in arrays.items():
                self._entries[name] = StoredParameter(part, array.dtype.name, array.shape)
            tree = nested(arrays)
            save_args = jax.tree.map(
                lambda array: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if array.ndim == 3 else ()),
                tree,
            )
            sums = {name: _checksum(array) for name, array in arrays.items()}
            folder = self.directory / PARAMETERS / part
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open_checkpointer() as checkpointer, _plain(folder.absolute()) as target:
                checkpointer.save(target, args=ocp.args.PyTreeSave(tree, save_args=save_args))
            del arrays, tree
            self._read_back(part, sums)
            self._hash(folder)
            self._advance(sum(sizes[path] for path in paths), f"{dotted(paths[0])} ...")

    def _read_back(self, part: str, sums: Mapping[str, int]) -> None:
        """Raise CheckpointError unless Orbax reads what it has said to have written."""
        found = restore_part(self.directory, part, list(sums))
        wrong = [name for name, array in found.items() if _checksum(array) != sums[name]]
        if wrong:
            raise CheckpointError(self.directory, [f"{name}: Orbax reads other bytes than it wrote" for name in wrong])

    def file(self, name: str, content: Iterable[bytes], *, weights: bool = False) -> None:
        """A file by its name relative to the directory; `weights`: its bytes count as progress."""
        target, digest = inside(self.directory, name), hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as stream:
            for block in content:
                stream.write(block)
                digest.update(block)
                if weights:
                    self._advance(len(block), target.name)
        self._sums[name] = digest.hexdigest()

    def _hash(self, folder: Path) -> None:
        """Take the sums of what Orbax wrote while the system still has it in memory."""
        files = (path.relative_to(self.directory).as_posix() for path in folder.rglob("*") if path.is_file())
        self._sums |= sha256_of(self.directory, sorted(files))

    def seal(self) -> None:
        """The manifest, of everything that was written. Raises CheckpointError when it cannot be read as a whole."""
        sizes = {name: (self.directory / name).stat().st_size for name in self._sums}
        files = {name: StoredFile(sizes[name], digest) for name, digest in self._sums.items()}
        Manifest(files, self._entries).write(self.directory)
        OrbaxCheckpoint(self.directory).check()


def require_replaceable(path: Path) -> None:
    """Raise FileExistsError for a directory that an overwrite would destroy: one that is neither empty nor a
    checkpoint."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    weights = ROOT in names or any(name.endswith(".safetensors") for name in names)
    if names and not ("config.json" in names and weights):
        raise FileExistsError(f"{path}: is not a checkpoint; only a checkpoint is overwritten")


def _rows(array: jax.Array | np.ndarray) -> Iterator[bytes]:
    """The bytes of a table, some rows at a time."""
    step = max(1, BLOCK_BYTES // array.shape[1])
    for start in range(0, array.shape[0], step):
        yield np.asarray(array[start : start + step]).tobytes()


def save(
    params: Transformer,
    path: str | Path,
    cfg: Config,
    *,
    tables: Sequence[Table | DeviceTable] = (),
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> None:
    """A live model's parameters, sharded or not, and its Engram tables; `files` travel along (tokenizer.json).

    `path` appears whole or not at all; an existing one is refused, or with `overwrite` replaced by the new one in one
    step. Raises CheckpointError when the parameters or tables are not those of the config, FileExistsError.
    """
    if jax.process_count() > 1:
        raise NotImplementedError(f"save: {jax.process_count()} processes; saving is built for one")
    path, leaves = Path(path), flat_parameters(params)
    wanted = {name: tensor.shape for name, tensor in expected_tables(cfg).items()}
    arrays = [array for table in tables for array in (table.weight, table.scale)]
    own = flat_parameters(abstract_parameters(cfg))
    problems = differences(kinds(leaves), kinds(own), ("is", "the config's is"))
    scales = {dotted(path): leaf[...] for path, leaf in leaves.items() if leaf.dtype == jnp.float8_e8m0fnu}
    for name, scale in scales.items():
        if (np.asarray(scale).view(np.uint8) == 255).any():
            problems.append(f"{name}: holds E8M0 byte 255, which is NaN")
    if (given := [tuple(array.shape) for array in arrays]) != (shapes := list(wanted.values())):
        problems.append(f"tables: shapes {given}, the config's are {shapes}")
    if problems:
        raise CheckpointError(path, problems)
    document = json.dumps(cfg.to_dict(), indent=2, ensure_ascii=False).encode()
    require_replaceable(path)
    with atomic.directory(path, overwrite=overwrite) as directory:
        writer = Writer(directory, cfg, on_progress)
        writer.expect(sum(leaf.nbytes for leaf in leaves.values()) + sum(array.nbytes for array in arrays))
        for name, content in ({"config.json": document} | dict(files or {})).items():
            writer.file(name, [content])
        for name, array in zip(wanted, arrays, strict=True):
            writer.file(f"{TABLES}/{name}", _rows(array), weights=True)
        writer.parameters(leaves, lambda path: leaves[path][...])
        writer.seal()
