"""The released checkpoint: a reader of safetensors files, and their check against a config.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data. The
safetensors package cannot hand E4M3, E8M0 or packed FP4 to JAX, so headers are parsed and bytes mapped here. What a
checkpoint must hold follows from the parameter tree of `model.Transformer`: a parameter's path is its name; the E
experts of a layer are stored one by one. Engram tables are no parameters: `engram` says where they can lie.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from dsv41_jax.config import Config
from dsv41_jax.engine.tables import Table
from dsv41_jax.nn.transformer import Transformer, abstract_parameters

DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
_STORED_AS = {jnp.dtype(jnp.uint8): "I8"} | {  # packed FP4 travels as I8
    DTYPES[name]: name for name in ("F8_E4M3", "F8_E8M0", "BF16", "F32")
}
Progress = Callable[[int, int, str], None]


class CheckpointError(ValueError):
    """A checkpoint cannot be used; one line that lists every problem found."""

    def __init__(self, where: Path | str, problems: list[str]):
        self.problems = tuple(problems)
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{where}: {len(problems)} {noun}: {'; '.join(problems)}")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `start` and `stop` are byte positions in `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"names {', '.join(repeated)} more than once")
    return dict(pairs)


def _entry(file: Path, name: str, entry: Any, data: int, size: int) -> TensorInfo | str:
    """A header entry checked against the file, or what is wrong with it."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        return f"{name}: malformed header entry in {file.name}"
    if dtype not in DTYPES:
        return f"{name}: unknown dtype {dtype}"
    if not start <= stop <= size - data:
        return f"{name}: offsets {start}..{stop} lie outside the {size - data} data bytes of {file.name}"
    if stop - start != prod(shape) * DTYPES[dtype].itemsize:
        needed = prod(shape) * DTYPES[dtype].itemsize
        return f"{name}: {stop - start} bytes for {dtype} {list(shape)}, which takes {needed}"
    return TensorInfo(dtype, shape, file, data + start, data + stop)


def read_header(file: Path, *, headers_only: bool = False) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of one safetensors file, and every problem of its header. Reads no data; with `headers_only` the file
    need not hold any."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= size - 8:
                return {}, [f"{file.name}: truncated or no safetensors file (header of {length} bytes, file of {size})"]
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
    except OSError as error:
        return {}, [f"{file.name}: cannot be read ({error.strerror})"]
    except (ValueError, RecursionError) as error:
        return {}, [f"{file.name}: unreadable header ({error})"]
    if not isinstance(header, dict):
        return {}, [f"{file.name}: unreadable header (not a JSON object)"]
    header.pop("__metadata__", None)
    held = 1 << 62 if headers_only else size
    checked = {name: _entry(file, name, entry, 8 + length, held) for name, entry in header.items()}
    problems = [entry for entry in checked.values() if isinstance(entry, str)]
    tensors = {name: entry for name, entry in checked.items() if isinstance(entry, TensorInfo)}
    end, last = 8 + length, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start < end:
            problems.append(f"{name}: bytes overlap those of {last} in {file.name}")
        elif info.start > end and len(tensors) == len(header):
            problems.append(f"{name}: {info.start - end} bytes before it in {file.name} belong to no tensor")
        if info.stop > end:
            end, last = info.stop, name
    if not problems and end < size and not headers_only:
        problems.append(f"{file.name}: {size - end} bytes at the end belong to no tensor")
    return tensors, problems


@dataclass(frozen=True)
class Expected:
    """A tensor that a config asks for: stored `dtype` and `shape`, the parameter it fills, which expert of it."""

    dtype: str
    shape: tuple[int, ...]
    path: tuple[Any, ...] | None
    expert: int | None = None


def table_names(layer: int) -> tuple[str, str]:
    """The two tensors of a layer's Engram table."""
    return f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"


def expected_tensors(cfg: Config, params: Transformer | None = None) -> dict[str, Expected]:
    """Name, dtype and shape of every tensor of a checkpoint with this config, by its parameter tree."""
    tree = abstract_parameters(cfg) if params is None else params
    expected = {}
    for path, leaf in nnx.to_flat_state(nnx.state(tree)):
        dtype, shape = _STORED_AS[leaf.dtype], leaf.shape
        if "experts" not in path:
            expected[".".join(map(str, path))] = Expected(dtype, shape, path)
            continue
        at = path.index("experts") + 1
        for expert in range(shape[0]):
            name = ".".join(map(str, (*path[:at], expert, *path[at:])))
            expected[name] = Expected(dtype, shape[1:], path, expert)
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        weight, scale = table_names(layer)
        expected[weight] = Expected("F8_E4M3", (rows, cfg.engram_head_dim), None)
        expected[scale] = Expected("F8_E8M0", (rows, cfg.engram_head_dim // 32), None)
    return expected


class Checkpoint:
    """An open checkpoint directory: `config.json`, and tensors in one file or in shards named by an index.

    >>> checkpoint = Checkpoint("tiny")
    >>> checkpoint.tensors["layers.0.ffn.experts.0.w1.weight"].dtype, checkpoint.read("head.weight").shape
    ('I8', (288, 96))
    """

    def __init__(self, path: str | Path, *, headers_only: bool = False):
        self.path = locate(path)
        self._headers_only = headers_only  # the files may end behind their headers
        self.config = Config.from_pretrained(self.path)
        self.placed: dict[str, str] = {}  # the shard of each tensor, where an index gives it
        self.unread: set[str] = set()  # tensors that an index places where they cannot be read
        self.tensors, self.problems = self._headers()
        self._maps: dict[Path, np.memmap] = {}

    def _headers(self) -> tuple[dict[str, TensorInfo], list[str]]:
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if not index.exists():
            if not single.exists():
                return {}, [f"neither {single.name} nor {index.name} is there"]
            return read_header(single, headers_only=self._headers_only)
        try:
            document = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
            placed = dict(document["weight_map"])
            files = sorted(set(placed.values()))
            bad = [file for file in files if not isinstance(file, str) or Path(file).name != file]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {}, [f"{index.name}: unreadable index ({error})"]
        if bad:
            return {}, [f"{index.name}: shard {bad[0]!r} is not the name of a file beside it"]
        self.placed = placed
        return self._shards(files, document.get("metadata") or {})

    def _shards(self, files: list[str], metadata: Any) -> tuple[dict[str, TensorInfo], list[str]]:
        placed = self.placed
        tensors: dict[str, TensorInfo] = {}
        problems = []
        for file in files:
            found, wrong = read_header(self.path / file, headers_only=self._headers_only)
            problems += wrong
            if wrong and not found:
                self.unread |= {name for name, where in placed.items() if where == file}
            owners = {placed.get(name) for name in found}
            if len(owners) == 1 and owners.isdisjoint({file, None}):
                problems.append(f"{file}: holds the tensors of {owners.pop()}")
                self.unread |= {name for name, where in placed.items() if where == file}
                continue
            for name, info in found.items():
                if placed.get(name) != file:
                    problems.append(f"{name}: stands in {file}, which the index does not say")
                else:
                    tensors[name] = info
            if not wrong:
                lost = [name for name, where in placed.items() if where == file and name not in found]
                problems += [f"{name}: is not in {file}, where the index places it" for name in lost]
                self.unread.update(lost)
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        held = sum(info.stop - info.start for info in tensors.values())
        if total is not None and not problems and total != held:
            problems.append(f"index total_size {total} is not {held}, the bytes of its tensors")
        return tensors, problems

    def deviations(self, expected: dict[str, Expected] | None = None) -> list[str]:
        """Everything in which the headers differ from what the config asks for: missing, unexpected, of another shape
        or dtype, damaged."""
        expected = expected_tensors(self.config) if expected is None else expected
        problems = list(self.problems)
        if problems and not self.tensors:
            return problems
        damaged = {problem.split(":")[0] for problem in problems} | self.unread
        for name, wanted in expected.items():
            info = self.tensors.get(name)
            if info is None:
                problems += [] if name in damaged else [f"{name}: missing"]
            elif info.dtype != wanted.dtype:
                problems.append(f"{name}: dtype {info.dtype}, expected {wanted.dtype}")
            elif info.shape != wanted.shape:
                scale = name.endswith(".scale")
                belongs = f" (its weight: {list(expected[name[:-5] + 'weight'].shape)})" if scale else ""
                problems.append(f"{name}: shape {list(info.shape)}, expected {list(wanted.shape)}{belongs}")
        return problems + [f"{name}: unexpected" for name in self.tensors if name not in expected]

    def check(self, params: Transformer | None = None) -> dict[str, Expected]:
        """What the config expects, or one CheckpointError that lists every deviation. Reads headers only."""
        expected = expected_tensors(self.config, params)
        problems = self.deviations(expected)
        if problems:
            raise CheckpointError(self.path, problems)
        return expected

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the mapped file, in its own dtype (ml_dtypes for BF16, E4M3, E8M0)."""
        info = self.tensors[name]
        if info.start == info.stop:
            return np.empty(info.shape, DTYPES[info.dtype])
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, np.uint8, "r")
        return self._maps[info.file][info.start : info.stop].view(DTYPES[info.dtype]).reshape(info.shape)

    def tables(self) -> tuple[Table, ...]:
        """The Engram tables, memory-mapped: a lookup touches only the pages of its rows."""
        names = (table_names(layer) for layer in self.config.engram_layer_ids)
        return tuple(
            Table(self.read(weight).view(np.uint8), self.read(scale).view(np.uint8)) for weight, scale in names
        )


def locate(path: str | Path) -> Path:
    """The directory of a checkpoint: itself, that of the bundled one, `tiny`, or for `hf://owner/name[@revision]` the
    hub's cache, downloaded as far as it is not there. Raises CheckpointError."""
    if isinstance(path, str) and path.startswith("hf:"):
        return _download(path)
    directory = Path(__file__).parent.parent / "data" / "tiny" if path == "tiny" else Path(path)
    if not directory.is_dir():
        raise CheckpointError(directory, ["is not a directory (nor the bundled checkpoint's name, 'tiny')"])
    return directory


def _download(name: str) -> Path:
    """A snapshot of a Hugging Face repository: its JSON and safetensors files."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if found is None:
        raise CheckpointError(name, ["is not of the form hf://owner/name or hf://owner/name@revision"])
    try:
        from huggingface_hub import snapshot_download  # only these names need its imports

        directory = snapshot_download(found[1], revision=found[2], allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:  # the library raises its own, those of its HTTP client and of the system
        raise CheckpointError(name, [f"cannot be downloaded ({type(error).__name__}: {_line(error)})"]) from None
    return Path(directory)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
