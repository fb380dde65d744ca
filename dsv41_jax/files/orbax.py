"""A model in Orbax: a directory that is read whole or refused, and restored straight into any sharding.

    config.json, tokenizer.json, ...    the files beside the weights, as they were
    orbax/parameters/SSS.K/             Orbax checkpoints of parameters: released shard SSS, part K of at most 1 GiB
    orbax/engram/NAME                   an Engram table's bytes: no device holds it, lookups map it
    orbax/headers/FILE                  headers of the safetensors files that it was made from (`convert`)
    orbax/MANIFEST                      dtype, shape and part of every parameter; size and SHA-256 of every file

Parameters are what the tree holds, under its names: E4M3, E8M0 and packed FP4 as such, the experts of a matrix stacked
and stored in a chunk each, so that a device reads only its own. Reading holds one part on the host beyond what it
restores. The manifest is written last (`saving`) and ends in its own SHA-256: Orbax by itself casts, pads and reads
damaged bytes in silence.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsv41_jax.config import Config
from dsv41_jax.engine.tables import Table
from dsv41_jax.files.safetensors import (
    Checkpoint,
    CheckpointError,
    Progress,
    TensorInfo,
    locate,
    table_names,
)
from dsv41_jax.nn.transformer import Transformer, abstract_parameters
from dsv41_jax.sharding import placements

ROOT, MANIFEST, FORMAT = "orbax", "orbax/MANIFEST", 1
BLOCK_BYTES = 4 << 20
ParameterPath = tuple[Any, ...]
Placement = Mesh | Mapping[ParameterPath, NamedSharding] | None


def is_orbax(path: str | Path) -> bool:
    """Whether a directory is of this layout, complete or not."""
    return (Path(path) / ROOT).is_dir()


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


def flat_parameters(params: Transformer) -> dict[ParameterPath, Any]:
    """The variables of a tree by path."""
    return dict(nnx.to_flat_state(nnx.state(params)))


def dotted(path: ParameterPath) -> str:
    """A parameter's name: its path, and its tensor's name unless it is a stack of experts."""
    return ".".join(map(str, path))


def tables_of(cfg: Config) -> dict[str, tuple[str, tuple[int, int]]]:
    """Stored dtype and shape of each tensor of the Engram tables."""
    found = {}
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        weight, scale = table_names(layer)
        found[weight] = ("F8_E4M3", (rows, cfg.engram_head_dim))
        found[scale] = ("F8_E8M0", (rows, cfg.engram_head_dim // 32))
    return found


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"layers.3.norm": x} as {"layers": {"3": {"norm": x}}}: the tree that Orbax sees."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = value
    return tree


def open_checkpointer() -> ocp.PyTreeCheckpointer:
    """Orbax as this layout uses it."""
    return ocp.PyTreeCheckpointer(use_compression=False)  # quantized weights hardly compress


def sha256_of(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of files by name."""

    def of(name: str) -> str:
        digest = hashlib.sha256()
        for block in blocks(directory / name):
            digest.update(block)
        return digest.hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(of, names), strict=True))


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        body, _, digest = (directory / MANIFEST).read_bytes().rpartition(b"\n")
    except OSError as error:
        raise CheckpointError(directory, [f"{MANIFEST}: cannot be read ({error.strerror}); incomplete?"]) from None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(directory, [f"{MANIFEST}: its SHA-256 is another than it says"])
    manifest = json.loads(body)
    if manifest["format"] != FORMAT:
        raise CheckpointError(directory, [f"{MANIFEST}: format {manifest['format']} is not {FORMAT}"])
    return manifest


class OrbaxCheckpoint(Checkpoint):
    """An open directory of this layout. Its `tensors` are the Engram tables; parameters come through `restore`.

    Opening checks that every file is there with its size, and the contents of those beside the weights. `restore` and
    `tables` check the contents of what they read first; `checksums=False` trusts those. Raises CheckpointError with one
    line that names every file that is damaged, missing or too many.
    """

    def __init__(self, path: str | Path, *, checksums: bool = True):
        directory = locate(path)
        manifest = _read_manifest(directory)
        self.files: dict[str, dict[str, Any]] = manifest["files"]
        self.entries: dict[str, dict[str, Any]] = manifest["parameters"]
        self.path, self._verified = directory, set[str]()
        self._check_files()
        heavy = ("orbax/parameters/", "orbax/engram/")
        self._verify(name for name in self.files if not name.startswith(heavy))
        if not checksums:
            self._verified = set(self.files)
        super().__init__(directory)

    def _check_files(self) -> None:
        problems = []
        for name, entry in self.files.items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size != entry["bytes"]:
                problems.append(f"{name}: missing" if size is None else f"{name}: {size} bytes, not {entry['bytes']}")
        present = (path.relative_to(self.path).as_posix() for path in (self.path / ROOT).rglob("*") if path.is_file())
        problems += [f"{name}: unexpected" for name in present if name not in self.files and name != MANIFEST]
        if problems:
            raise CheckpointError(self.path, problems)

    def _verify(self, names: Iterable[str]) -> None:
        """Compare contents with the manifest, once a file."""
        todo = [name for name in names if name not in self._verified]
        try:
            found = sha256_of(self.path, todo)
        except OSError as error:
            raise CheckpointError(self.path, [f"{error.filename}: cannot be read ({error.strerror})"]) from None
        problems = [f"{name}: damaged (SHA-256 differs)" for name in todo if found[name] != self.files[name]["sha256"]]
        if problems:
            raise CheckpointError(self.path, problems)
        self._verified.update(todo)

    def _headers(self) -> tuple[dict[str, TensorInfo], list[str]]:
        tensors, problems = {}, []
        for name, (dtype, shape) in tables_of(self.config).items():
            file, size = f"orbax/engram/{name}", shape[0] * shape[1]
            held = self.files.get(file, {"bytes": None})["bytes"]
            if held != size:
                problems.append(f"{file}: {held} bytes, the config's table takes {size}")
            tensors[name] = TensorInfo(dtype, shape, self.path / file, 0, size)
        if problems:
            raise CheckpointError(self.path, problems)
        return tensors, problems

    def beside(self) -> list[str]:
        """The files that travel along: config.json, tokenizer.json and others."""
        return [name for name in self.files if not name.startswith(f"{ROOT}/")]

    def headers(self) -> list[str]:
        """Kept headers of safetensors files."""
        return [name for name in self.files if name.startswith("orbax/headers/")]

    def tables(self) -> tuple[Table, ...]:
        """The Engram tables, checked and memory-mapped."""
        self._verify(name for name in self.files if name.startswith("orbax/engram/"))
        return super().tables()

    def deviations(self, expected: object = None) -> list[str]:
        """Everything in which the stored parameters differ from the config's tree."""
        return self._differences(flat_parameters(abstract_parameters(self.config)))

    def _differences(self, leaves: Mapping[ParameterPath, Any]) -> list[str]:
        wanted = {dotted(path): leaf for path, leaf in leaves.items()}
        problems = [f"{name}: unexpected" for name in self.entries if name not in wanted]
        for name, leaf in wanted.items():
            entry = self.entries.get(name)
            if entry is None:
                problems.append(f"{name}: missing")
            elif (entry["dtype"], tuple(entry["shape"])) != (leaf.dtype.name, leaf.shape):
                stored = f"{entry['dtype']} {entry['shape']}"
                problems.append(f"{name}: stored as {stored}, to be restored as {leaf.dtype.name} {list(leaf.shape)}")
        return problems

    def parts(self, shardings: Mapping[str, NamedSharding] | None = None) -> Iterator[dict[str, Any]]:
        """The parameters by name, part by part: on the host, or each in its sharding."""
        names: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            names.setdefault(entry["part"], []).append(name)
        for part, members in names.items():
            folder = f"orbax/parameters/{part}"
            self._verify(name for name in self.files if name.startswith(f"{folder}/"))
            yield self._restore_part(folder, members, shardings)

    def _restore_part(
        self, folder: str, members: Sequence[str], shardings: Mapping[str, NamedSharding] | None
    ) -> dict[str, Any]:
        restore_args = {
            name: ocp.RestoreArgs(restore_type=np.ndarray)
            if shardings is None
            else ocp.ArrayRestoreArgs(sharding=shardings[name])
            for name in members
        }
        try:
            with open_checkpointer() as checkpointer:
                path = (self.path / folder).absolute()
                tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=nested(restore_args)))
            arrays = {name: functools.reduce(operator.getitem, name.split("."), tree) for name in members}
        except (ValueError, OSError, KeyError) as error:
            said = " ".join(str(error).split())
            raise CheckpointError(self.path, [f"{folder}: Orbax cannot read it ({said})"]) from None
        for name, array in arrays.items():
            held, entry = (array.dtype.name, list(array.shape)), self.entries[name]
            if held != (entry["dtype"], entry["shape"]):
                raise CheckpointError(self.path, [f"{name}: Orbax holds {held}, {MANIFEST} says {entry}"])
        return arrays

    def restore(
        self, placement: Placement = None, *, template: Transformer | None = None, on_progress: Progress | None = None
    ) -> Transformer:
        """The parameter tree, each parameter straight into its sharding; without `placement` on the default device.

        `placement` is a mesh (`sharding.placements` decides) or a sharding for every path. `template`, by default the
        tree of the directory's config, gives the shapes and dtypes to restore: nothing is cast, cut or padded.
        `on_progress(done, total, name)` counts parameters. Raises CheckpointError for damage and for what differs from
        the template, ValueError for a parameter without a sharding.
        """
        graph, state = nnx.split(abstract_parameters(self.config) if template is None else template)
        flat = dict(nnx.to_flat_state(state))
        if problems := self._differences(flat):
            raise CheckpointError(self.path, problems)
        where = placements(nnx.merge(graph, state), placement) if isinstance(placement, Mesh) else placement
        if where is not None and (lost := [dotted(path) for path in flat if path not in where]):
            raise ValueError(f"placement: no sharding for {', '.join(lost)}")
        self._verify(name for name in self.files if name.startswith("orbax/engram/"))
        paths, done = {dotted(path): path for path in flat}, 0
        for arrays in self.parts(None if where is None else {dotted(path): where[path] for path in flat}):
            for name, array in arrays.items():
                done += 1
                flat[paths[name]] = flat[paths[name]].replace(jax.device_put(array) if where is None else array)
                if on_progress is not None:
                    on_progress(done, len(flat), name)
        return nnx.merge(graph, nnx.from_flat_state(flat))
