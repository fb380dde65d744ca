"""A model in Orbax: a directory that is read whole or refused, and restored straight into any sharding.

    config.json, tokenizer.json, ...    the files beside the weights, as they were
    orbax/parameters/SSS.K/             Orbax checkpoints of parameters: released shard SSS, part K of at most 1 GiB
    orbax/engram/NAME                   an Engram table's bytes: no device holds it, lookups map it
    orbax/headers/FILE                  headers of the safetensors files that it was made from (`convert`)
    orbax/MANIFEST                      dtype, shape and part of every parameter; size and SHA-256 of every file

Parameters are what the tree holds, under its names: E4M3, E8M0 and packed FP4 as such, the experts of a matrix stacked
and stored in a chunk each, so that a device reads only its own. Reading holds one part on the host beyond what it
restores. The manifest is written last (`orbax_writer`) and ends in its own SHA-256: Orbax by itself casts, pads and
reads damaged bytes in silence.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsv41_jax.config import Config
from dsv41_jax.files.directory import ROOT, CheckpointError, Progress, blocks, inside, locate
from dsv41_jax.files.expected import (
    DTYPES,
    Expected,
    ParameterPath,
    differences,
    expected_tables,
    expected_tensors,
    flat_parameters,
    kinds,
)
from dsv41_jax.files.load import Loaded, TensorInfo, load_tables
from dsv41_jax.nn.transformer import Transformer, abstract_parameters
from dsv41_jax.sharding import dotted, placements
from dsv41_jax.untrusted import read

MANIFEST, PARAMETERS, TABLES, HEADERS = (f"{ROOT}/{name}" for name in ("MANIFEST", "parameters", "engram", "headers"))
FORMAT = 1
Placement = Mesh | Mapping[ParameterPath, NamedSharding] | None


class StoredFile(NamedTuple):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class StoredParameter(NamedTuple):
    """The part that holds a parameter, and what it is there."""

    part: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What a directory holds: its files by their names in it, and its parameters."""

    files: dict[str, StoredFile]
    parameters: dict[str, StoredParameter]

    def write(self, directory: Path) -> None:
        """The file MANIFEST: JSON, then its SHA-256."""
        files = {name: file._asdict() for name, file in self.files.items()}
        parameters = {name: parameter._asdict() for name, parameter in self.parameters.items()}
        body = json.dumps({"format": FORMAT, "parameters": parameters, "files": files}).encode()
        (directory / MANIFEST).write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a directory. Raises CheckpointError when it is missing, damaged or of another format."""
        try:
            body, _, digest = read(directory / MANIFEST).rpartition(b"\n")
        except OSError as error:
            raise CheckpointError(directory, [f"{MANIFEST}: cannot be read ({error.strerror}); incomplete?"]) from None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise CheckpointError(directory, [f"{MANIFEST}: its SHA-256 is another than it says"])
        wrong = "malformed"
        try:
            document = json.loads(body)
            if document["format"] != FORMAT:
                wrong = f"format {document['format']} is not {FORMAT}"
            elif (manifest := cls._parsed(document)) is not None:
                return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise CheckpointError(directory, [f"{MANIFEST}: {wrong}"])

    @classmethod
    def _parsed(cls, document: dict[str, Any]) -> Manifest | None:
        """The manifest of a JSON document, None when a value is of a wrong type; raises what Python does for others."""
        files = {name: StoredFile(**entry) for name, entry in document["files"].items()}
        held = {name: StoredParameter(**entry) for name, entry in document["parameters"].items()}
        parameters = {name: entry._replace(shape=tuple(entry.shape)) for name, entry in held.items()}
        sizes = [n for entry in parameters.values() for n in entry.shape] + [file.bytes for file in files.values()]
        texts = [text for entry in parameters.values() for text in entry[:2]] + [file.sha256 for file in files.values()]
        sound = all(type(n) is int and n >= 0 for n in sizes) and all(type(text) is str for text in texts)
        return cls(files, parameters) if sound else None


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


def restore_part(
    directory: Path, part: str, names: Sequence[str], shardings: Mapping[str, NamedSharding] | None = None
) -> dict[str, jax.Array | np.ndarray]:
    """The parameters of a part by name: on the host, or each in its sharding. Raises CheckpointError."""
    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray)
        if shardings is None
        else ocp.ArrayRestoreArgs(sharding=shardings[name])
        for name in names
    }
    folder = f"{PARAMETERS}/{part}"
    path = (directory / folder).absolute()
    try:
        if not (path / "manifest.ocdbt").is_file():  # without it every array fails by itself, some after the call
            raise FileNotFoundError("manifest.ocdbt is missing")
        with open_checkpointer() as checkpointer:
            tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=nested(restore_args)))
        return {name: functools.reduce(operator.getitem, name.split("."), tree) for name in names}
    except (ValueError, OSError, KeyError) as error:
        said = " ".join(str(error).split())
        raise CheckpointError(directory, [f"{folder}: Orbax cannot read it ({said})"]) from None


def sha256_of(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of files by name."""

    def of(name: str) -> str:
        digest = hashlib.sha256()
        for block in blocks(directory / name):
            digest.update(block)
        return digest.hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(of, names), strict=True))


class OrbaxCheckpoint:
    """An open directory of this layout. Its `tensors` are those of the Engram tables.

    Opening checks that every file is there with its size, and the contents of those beside the weights. `parameters`
    and `tensors` check the contents of what they give first; `checksums=False` trusts those. Raises CheckpointError in
    a line that names every file that is damaged, missing or too many.
    """

    tables = load_tables

    def __init__(self, path: str | Path, *, checksums: bool = True):
        self.path = locate(path)
        manifest = Manifest.read(self.path)
        self.files, self.entries = manifest.files, manifest.parameters
        self._verified = set[str]()
        self._check_files()
        heavy = (f"{PARAMETERS}/", f"{TABLES}/")
        self._require(name for name in self.files if not name.startswith(heavy))
        if not checksums:
            self._verified = set(self.files)
        self.config = Config.from_pretrained(self.path)

    def _check_files(self) -> None:
        problems = []
        for part in {entry.part for entry in self.entries.values()}:
            inside(self.path, f"{PARAMETERS}/{part}")
        for name, entry in self.files.items():
            file = inside(self.path, name)
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                problems.append(f"{name}: missing" if size is None else f"{name}: {size} bytes, not {entry.bytes}")
        present = (path.relative_to(self.path).as_posix() for path in (self.path / ROOT).rglob("*") if path.is_file())
        problems += [f"{name}: unexpected" for name in present if name not in self.files and name != MANIFEST]
        if problems:
            raise CheckpointError(self.path, problems)

    def _damaged(self, names: Iterable[str]) -> list[str]:
        """Compare contents with the manifest, once a file."""
        todo = [name for name in names if name not in self._verified]
        try:
            found = sha256_of(self.path, todo)
        except OSError as error:
            return [f"{error.filename}: cannot be read ({error.strerror})"]
        damaged = [name for name in todo if found[name] != self.files[name].sha256]
        self._verified.update(set(todo) - set(damaged))
        return [f"{name}: damaged (SHA-256 differs)" for name in damaged]

    def _require(self, names: Iterable[str]) -> None:
        if problems := self._damaged(names):
            raise CheckpointError(self.path, problems)

    @functools.cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the Engram tables, whose contents are checked when they are first asked for."""
        self._require(f"{TABLES}/{name}" for name in expected_tables(self.config))
        return {
            name: TensorInfo(dtype=t.dtype, shape=t.shape, file=self.path / TABLES / name, start=0, stop=t.nbytes)
            for name, t in expected_tables(self.config).items()
        }

    def beside(self) -> list[str]:
        """The files that travel along: config.json, tokenizer.json and others."""
        return [name for name in self.files if not name.startswith(f"{ROOT}/")]

    def headers(self) -> list[str]:
        """Kept headers of safetensors files."""
        return [name for name in self.files if name.startswith(f"{HEADERS}/")]

    def deviations(self, params: Transformer | None = None) -> list[str]:
        """Everything in which the stored parameters differ from a tree, by default the config's: nothing is cast."""
        held = {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}
        wanted = kinds(flat_parameters(abstract_parameters(self.config) if params is None else params))
        problems = differences(held, wanted, ("stored as", "to be restored as"))
        for name, tensor in expected_tables(self.config).items():
            file = self.files.get(f"{TABLES}/{name}", StoredFile(0, ""))
            if file.bytes != tensor.nbytes:
                problems.append(f"{name}: {file.bytes} bytes, the config's table takes {tensor.nbytes}")
        return problems

    def check(self, params: Transformer | None = None) -> dict[str, Expected]:
        """The tensors that the config expects, or one CheckpointError that lists every deviation."""
        if problems := self.deviations(params):
            raise CheckpointError(self.path, problems)
        return expected_tensors(self.config, params)

    def verify(self) -> list[str]:
        """`deviations`, or if there are none the files whose contents are damaged, or if none are what Orbax cannot
        read: reads everything."""
        if problems := self.deviations() or self._damaged(self.files):
            return problems
        try:
            for _ in self.parts():
                pass
        except CheckpointError as error:
            return list(error.problems)
        return []

    def held(self) -> tuple[int, int]:
        """(parameters and tensors of tables, their bytes)."""
        width = {dtype.name: dtype.itemsize for dtype in DTYPES.values()}
        nbytes = sum(width.get(entry.dtype, 0) * math.prod(entry.shape) for entry in self.entries.values())
        tables = [file.bytes for name, file in self.files.items() if name.startswith(f"{TABLES}/")]
        return len(self.entries) + len(tables), nbytes + sum(tables)

    def parts(
        self, shardings: Mapping[str, NamedSharding] | None = None
    ) -> Iterator[dict[str, jax.Array | np.ndarray]]:
        """The parameters by name, part by part: on the host, or each in its sharding."""
        names: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            names.setdefault(entry.part, []).append(name)
        for part, members in names.items():
            self._require(name for name in self.files if name.startswith(f"{PARAMETERS}/{part}/"))
            arrays = restore_part(self.path, part, members, shardings)
            for name, array in arrays.items():
                held, entry = (array.dtype.name, array.shape), self.entries[name]
                if held != (entry.dtype, entry.shape):
                    raise CheckpointError(self.path, [f"{name}: Orbax holds {held}, {MANIFEST} says {entry[1:]}"])
            yield arrays

    def parameters(
        self,
        placement: Placement = None,
        *,
        template: Transformer | None = None,
        on_progress: Progress | None = None,
        loaded: Loaded | None = None,
    ) -> Transformer:
        """The parameter tree, each parameter straight into its sharding; without `placement` on the default device.

        `placement` is a mesh (`sharding.placements` decides) or a sharding for every path. `template`, by default the
        tree of the directory's config, gives the shapes and dtypes to restore: nothing is cast, cut or padded.
        `on_progress(done, total, name)` counts parameters. Raises CheckpointError for damage and for what differs from
        the template, ValueError for a parameter without a sharding, and for `loaded`: nothing goes on from a part.
        """
        if loaded is not None:
            raise ValueError("loaded: an Orbax checkpoint cannot go on from a part of it; leave `loaded` out")
        template = abstract_parameters(self.config) if template is None else template
        self.check(template)
        where = placements(template, placement) if isinstance(placement, Mesh) else placement
        graph, state = nnx.split(template)
        flat: dict[Any, Any] = dict(nnx.to_flat_state(state))
        if where is not None and (lost := [dotted(path) for path in flat if path not in where]):
            raise ValueError(f"placement: no sharding for {', '.join(lost)}")
        _ = self.tensors  # checks them before anything is restored
        paths, done = {dotted(path): path for path in flat}, 0
        for arrays in self.parts(None if where is None else {dotted(path): where[path] for path in flat}):
            for name, array in arrays.items():
                done += 1
                flat[paths[name]] = flat[paths[name]].replace(jax.device_put(array) if where is None else array)
                if on_progress is not None:
                    on_progress(done, len(flat), name)
        return nnx.merge(graph, nnx.from_flat_state(flat))
