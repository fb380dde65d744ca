"""The released checkpoint: a reader of safetensors files, and their check against a config.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data. The
safetensors package writes such files; it cannot hand E4M3, E8M0 or packed FP4 to JAX, and stops at the first fault of a
header, so headers are parsed and bytes mapped here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import TensorSpec, serialize

from dsv41_jax.config import Config
from dsv41_jax.files.directory import CheckpointError, hub_headers, is_hub, is_inside, locate
from dsv41_jax.files.expected import DTYPES, Expected, expected_tensors
from dsv41_jax.files.inventory import misplaced
from dsv41_jax.files.load import TensorInfo, load, load_tables
from dsv41_jax.nn.transformer import Transformer
from dsv41_jax.untrusted import JSON_BYTES, cut, read, regular_size, shown, unique

MOST_AXES = 32  # NumPy has no more


def _entry(file: Path, name: str, entry: Any, data: int, size: int) -> TensorInfo | str:
    """A header entry checked against the file, or what is wrong with it."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = isinstance(dtype, str) and len(shape) <= MOST_AXES
        whole = whole and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        return f"{name}: malformed header entry in {file.name}"
    if dtype not in DTYPES:
        return f"{name}: unknown dtype {cut(str(dtype))}"
    if not start <= stop <= size - data:
        return f"{name}: offsets {start}..{stop} lie outside the {size - data} data bytes of {file.name}"
    if stop - start != prod(shape) * DTYPES[dtype].itemsize:
        needed = prod(shape) * DTYPES[dtype].itemsize
        return f"{name}: {stop - start} bytes for {dtype} {list(shape)}, which takes {needed}"
    return TensorInfo(dtype=dtype, shape=shape, file=file, start=data + start, stop=data + stop)


class Header(NamedTuple):
    """The tensors of one safetensors file, every problem of its header, and its `__metadata__`."""

    tensors: dict[str, TensorInfo]
    problems: list[str]
    metadata: dict[str, Any]


def read_header(file: Path, *, headers_only: bool = False) -> Header:
    """The header of a file. Reads no data; with `headers_only` the file need not hold any."""
    try:
        size = regular_size(file)
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if 8 + JSON_BYTES < 8 + length <= size:
                return Header({}, [f"{file.name}: header of {length} bytes, more than {JSON_BYTES}"], {})
            if not 2 <= length <= size - 8:
                said = f"truncated or no safetensors file (header of {length} bytes, file of {size})"
                return Header({}, [f"{file.name}: {said}"], {})
            return parse_header(file, stream.read(length), None if headers_only else size)
    except OSError as error:
        return Header({}, [f"{file.name}: cannot be read ({error.strerror})"], {})


def parse_header(file: Path, text: bytes, size: int | None) -> Header:
    """The header `text`, behind its 8 bytes of length, of a file of `size` bytes; None: the data are not there yet."""
    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        return Header({}, [f"{file.name}: unreadable header ({error})"], {})
    if not isinstance(header, dict):
        return Header({}, [f"{file.name}: unreadable header (not a JSON object)"], {})
    return check_header(file, header, 8 + len(text), size)


def check_header(file: Path, header: dict[str, Any], data: int, size: int | None) -> Header:
    """The entries of a header, whose data begin at byte `data` of a file of `size` bytes, checked against each other
    and the file."""
    metadata = header.pop("__metadata__", None)
    held = 1 << 62 if size is None else size
    checked = {name: _entry(file, name, entry, data, held) for name, entry in header.items()}
    problems = [entry for entry in checked.values() if isinstance(entry, str)]
    tensors = {name: entry for name, entry in checked.items() if isinstance(entry, TensorInfo)}
    end, last = data, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start < end:
            problems.append(f"{name}: bytes overlap those of {last} in {file.name}")
        elif info.start > end and len(tensors) == len(header):
            problems.append(f"{name}: {info.start - end} bytes before it in {file.name} belong to no tensor")
        if info.stop > end:
            end, last = info.stop, name
    if not problems and size is not None and end < size:
        problems.append(f"{file.name}: {size - end} bytes at the end belong to no tensor")
    return Header(tensors, problems, metadata if isinstance(metadata, dict) else {})


def write_tensors(stream: BinaryIO, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """A whole file, by the safetensors package: in memory, for its `serialize_file` renames a file of its own into
    place. The order of several metadata is arbitrary."""
    held = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = {
        name: TensorSpec(dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in held.items()
    }
    stream.write(serialize(specs, dict(metadata)))


class Checkpoint:
    """An open checkpoint directory: `config.json`, and tensors in one file or in shards named by an index.

    >>> checkpoint = Checkpoint("tiny")
    >>> checkpoint.tensors["layers.0.ffn.experts.0.w1.weight"].dtype, checkpoint.read("head.weight").shape
    ('I8', (288, 96))
    """

    parameters, tables = load, load_tables

    def __init__(self, path: str | Path, *, headers_only: bool = False):
        self.path = locate(path, headers_only=headers_only)
        self._headers_only = headers_only  # the files may end behind their headers
        self._remote = hub_headers(str(path), self.path) if headers_only and is_hub(path) else None
        self.config = Config.from_pretrained(self.path)
        self.placed: dict[str, str] = {}  # the shard of each tensor, where an index gives it
        self.unread: set[str] = set()  # tensors that an index places where they cannot be read
        self.tensors, self.problems = self._headers()

    def _headers(self) -> tuple[dict[str, TensorInfo], list[str]]:
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if not index.exists():
            if not (single.exists() if self._remote is None else single.name in self._remote):
                return {}, [f"neither {single.name} nor {index.name} is there"]
            return self._header(single)[:2]
        try:
            document = json.loads(read(index).decode("utf-8"), object_pairs_hook=unique)
            placed = dict(document["weight_map"])
            files = sorted(set(placed.values()))
            bad = [file for file in files if not isinstance(file, str) or "/" in file or not is_inside(file)]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {}, [f"{index.name}: unreadable index ({error})"]
        if bad:
            return {}, [f"{index.name}: shard {shown(bad[0])} is not the name of a file beside it"]
        self.placed = placed
        return self._shards(files, document.get("metadata") or {})

    def _header(self, file: Path) -> Header:
        if self._remote is None:
            return read_header(file, headers_only=self._headers_only)
        if file.name not in self._remote:
            return Header({}, [f"{file.name}: its header was not read at the hub"], {})
        return check_header(file, dict(self._remote[file.name]), 0, None)

    def _shards(self, files: list[str], metadata: Any) -> tuple[dict[str, TensorInfo], list[str]]:
        placed = self.placed
        tensors: dict[str, TensorInfo] = {}
        problems = []
        for file in files:
            found, wrong, _ = self._header(self.path / file)
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

    def verify(self) -> list[str]:
        """`deviations`, or if there are none the tensors that stand in another shard than in the released placement."""
        return self.deviations() or misplaced(self.placed, self.config)

    def held(self) -> tuple[int, int]:
        """(tensors, their bytes)."""
        return len(self.tensors), sum(info.stop - info.start for info in self.tensors.values())

    def read(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of the mapped file, in its own dtype."""
        return self.tensors[name].mapped()
