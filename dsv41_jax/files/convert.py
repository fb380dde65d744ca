"""Checkpoints from the released safetensors layout to Orbax and back, byte for byte, one part at a time.

The headers of the safetensors files travel inside the Orbax directory, so the way back writes the very same files:
header bytes, order and padding included. For a directory that a live model was saved to there are none, and the files
are those that the safetensors package would write: tensors by falling alignment of their dtype, then by name, the
header padded to 8 bytes; one file up to 5 GB, beyond that the released placement with an index.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from dsv41_jax import atomic
from dsv41_jax.files.directory import LAYOUTS, CheckpointError, Progress, blocks, inside, is_orbax, locate
from dsv41_jax.files.expected import (
    Expected,
    ParameterPath,
    by_parameter,
    differences,
    expected_tables,
    flat_parameters,
)
from dsv41_jax.files.inventory import shard_file
from dsv41_jax.files.load import Reader, TensorInfo
from dsv41_jax.files.orbax import HEADERS, MANIFEST, TABLES, OrbaxCheckpoint
from dsv41_jax.files.orbax_writer import Writer, require_replaceable
from dsv41_jax.files.safetensors import Checkpoint, parse_header
from dsv41_jax.nn.transformer import abstract_parameters
from dsv41_jax.sharding import dotted
from dsv41_jax.untrusted import read

SINGLE_FILE_BYTES = 5_000_000_000
# The order of the safetensors package: its own list of dtypes, from the last.
_FALLING = ("I64", "F64", "F32", "I32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "I8", "U8", "BOOL")


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    *,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> None:
    """Write the checkpoint `source` as `target` in the other layout, or in `to`: "orbax" or "safetensors".

    `target` appears whole or not at all; an existing one is refused, or with `overwrite` replaced by the new one in one
    step. `on_progress(done, total, name)` counts bytes. Raises CheckpointError when the source is damaged or
    incomplete, ValueError for a layout that the source has already, FileExistsError.
    """
    here, there = locate(source).resolve(), Path(target).resolve()
    held = LAYOUTS[0] if is_orbax(here) else LAYOUTS[1]
    to = LAYOUTS[1 - LAYOUTS.index(held)] if to is None else to
    if to not in LAYOUTS or to == held:
        raise ValueError(f"to: {to!r} is not {LAYOUTS[1 - LAYOUTS.index(held)]!r}, and {source} is in {held!r}")
    if there == here or here in there.parents or there in here.parents:
        raise ValueError(f"target: {target} and the source {source} are one, or one inside the other")
    if not there.parent.is_dir():
        raise ValueError(f"target: the directory of {target} does not exist")
    require_replaceable(there)
    write = _write_orbax if to == "orbax" else _write_safetensors
    with atomic.directory(there, overwrite=overwrite) as directory:
        write(here, directory, on_progress)


def _beside(directory: Path, weights: set[Path]) -> Iterator[Path]:
    """Files that are no weights, relative to the checkpoint; not those of hidden folders (.git, .cache)."""
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if path.is_file() and path not in weights and not any(part.startswith(".") for part in relative.parts[:-1]):
            yield relative


def _write_orbax(source: Path, directory: Path, on_progress: Progress | None) -> None:
    checkpoint = Checkpoint(source)
    abstract = abstract_parameters(checkpoint.config)
    expected = checkpoint.check(abstract)
    names, leaves = by_parameter(expected), flat_parameters(abstract)
    files = {info.file for info in checkpoint.tensors.values()}
    writer = Writer(directory, checkpoint.config, on_progress)
    writer.expect(sum(tensor.nbytes for tensor in expected.values()))
    for relative in _beside(source, files):
        writer.file(relative.as_posix(), blocks(inside(source, relative.as_posix())))
    for file in sorted(files):
        length = struct.unpack("<Q", next(blocks(file, 0, 8)))[0]
        writer.file(f"{HEADERS}/{file.name}", blocks(file, 0, 8 + length))
    for name in expected_tables(checkpoint.config):
        info = checkpoint.tensors[name]
        writer.file(f"{TABLES}/{name}", blocks(info.file, info.start, info.stop), weights=True)
    with Reader(checkpoint) as reader:

        def value(path: ParameterPath) -> np.ndarray:
            leaf = leaves[path]
            buffer = np.empty(math.prod(leaf.shape) * leaf.dtype.itemsize, np.uint8)
            reader.read_parameter(names[path], (slice(None),) * leaf.ndim, buffer)
            return buffer.view(leaf.dtype).reshape(leaf.shape)

        writer.parameters(leaves, value)
    writer.seal()


def _write_safetensors(source: Path, directory: Path, on_progress: Progress | None) -> None:
    checkpoint = OrbaxCheckpoint(source)
    expected = checkpoint.check()
    headers = {Path(name).name: read(source / name) for name in checkpoint.headers()}
    if not headers:
        headers = canonical_headers(expected, lambda name: shard_file(name, checkpoint.config))
        if len(headers) > 1:
            _write_index(directory, expected, headers)
    tensors = _reserve(directory, headers, expected)
    names = {dotted(path): parts for path, parts in by_parameter(expected).items()}
    done, total = 0, sum(tensor.nbytes for tensor in expected.values())

    def put(name: str, content: Iterable[bytes | memoryview]) -> None:
        nonlocal done
        with tensors[name].file.open("r+b") as stream:
            stream.seek(tensors[name].start)
            for block in content:
                done += stream.write(block)
                if on_progress is not None:
                    on_progress(done, total, name)

    for name, info in checkpoint.tensors.items():
        put(name, blocks(info.file))
    for arrays in checkpoint.parts():
        for parameter, array in arrays.items():
            parts = names[parameter]
            for name, piece in zip(parts, array.view(np.uint8).reshape(len(parts), -1), strict=True):
                put(name, [memoryview(np.ascontiguousarray(piece))])
    for name in sorted(checkpoint.beside(), key=lambda name: name == "config.json"):
        _copy(inside(source, name), inside(directory, name))  # the config last: nothing unfinished can be loaded
    Checkpoint(directory).check()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as stream:
        for block in blocks(source):
            stream.write(block)


def _reserve(directory: Path, headers: dict[str, bytes], expected: dict[str, Expected]) -> dict[str, TensorInfo]:
    """Files of headers and holes, and where each tensor goes. Raises CheckpointError unless that is all there is."""
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        found, problems, _ = parse_header(directory / file, header[8:], None)
        if problems:
            raise CheckpointError(directory, problems)
        with (directory / file).open("xb") as stream:
            stream.write(header)
            stream.truncate(max((info.stop for info in found.values()), default=len(header)))
        tensors |= found
    held = {name: (info.dtype, info.shape) for name, info in tensors.items()}
    wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()}
    if problems := differences(held, wanted, ("kept header", MANIFEST)):
        raise CheckpointError(directory, problems)
    return tensors


def canonical_headers(expected: dict[str, Expected], shard: Callable[[str], str]) -> dict[str, bytes]:
    """The headers, length prefix included, of the file or files that the safetensors package would write: by itself it
    makes a header only together with data that lie in memory."""
    single = sum(tensor.nbytes for tensor in expected.values()) <= SINGLE_FILE_BYTES
    files: dict[str, list[str]] = {}
    for name in sorted(expected, key=lambda name: (_FALLING.index(expected[name].dtype), name)):
        files.setdefault("model.safetensors" if single else shard(name), []).append(name)
    headers = {}
    for file, names in sorted(files.items()):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            tensor = expected[name]
            offsets = [at, at + tensor.nbytes]
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            at += tensor.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
    return headers


def _write_index(directory: Path, expected: dict[str, Expected], headers: dict[str, bytes]) -> None:
    """As Hugging Face's writers do: sorted names, two spaces."""
    placed = {name: file for file, header in headers.items() for name in json.loads(header[8:]) if name in expected}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in expected.values())}, "weight_map": placed}
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
