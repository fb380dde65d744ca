"""The load: parameters streamed from safetensors files into their places, each byte read at most once.

Every header and every placement is checked before anything is allocated. Then, a parameter at a time and within it a
shard of this process at a time: the shard's byte ranges are read into a fresh buffer (the experts of a stacked matrix
one by one), which goes to each device that holds that shard and is freed. Beyond the parameters themselves the host
holds one shard of one parameter, and a copy of it while a device takes it.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import UInt8

from dsv41_jax.config import Config
from dsv41_jax.engine.tables import DeviceTable, Table, check_placement
from dsv41_jax.files.directory import CheckpointError, Progress
from dsv41_jax.files.expected import DTYPES, Expected, by_parameter, table_names
from dsv41_jax.nn.transformer import Transformer, abstract_parameters
from dsv41_jax.sharding import automatic, dotted, placements, sharded_rows

Loaded = MutableMapping[str, Any]  # by name, arrays of devices or of the host
Index = tuple[slice, ...]
Place = tuple[tuple[int, ...], np.dtype, NamedSharding | str]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies: `start` and `stop` are byte positions in `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    def mapped(self) -> np.ndarray:
        """A read-only view of the mapped file, in the tensor's own dtype (ml_dtypes for BF16, E4M3, E8M0)."""
        dtype, nbytes = DTYPES[self.dtype], self.stop - self.start
        if not nbytes:
            return np.empty(self.shape, dtype)
        return np.memmap(self.file, np.uint8, "r", self.start, (nbytes,)).view(dtype).reshape(self.shape)


@runtime_checkable
class Source(Protocol):
    """Tensors in files, and the config that says which there must be."""

    path: Path
    config: Config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Those that lie as plain bytes: of the Orbax layout the Engram tables alone."""

    def check(self, params: Transformer | None = None) -> dict[str, Expected]:
        """What the config expects, or one CheckpointError that lists every deviation."""


def byte_ranges(shape: Sequence[int], index: Index, itemsize: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the contiguous runs, in order, that a slice of a row-major array is made of."""
    spans = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
    inner = len(shape)  # the axes from here on are taken whole
    while inner and len(spans[inner - 1]) == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    length = math.prod(len(span) for span in spans[outer:]) * itemsize
    first = sum(span.start * stride for span, stride in zip(spans[outer:], strides[outer:], strict=True))
    for at in product(*spans[:outer]):
        if length:
            yield first + sum(i * stride for i, stride in zip(at, strides[:outer], strict=True)), length


class Reader:
    """The open files of a checkpoint, read by position: not mapped, so that file pages are nobody's memory."""

    def __init__(self, checkpoint: Source):
        self.checkpoint = checkpoint
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
            self._stack.callback(os.close, self._files[file])
        return self._files[file]

    def _fill(self, name: str, info: TensorInfo, start: int, target: memoryview) -> None:
        descriptor = self._descriptor(info.file)
        while target:
            count = os.preadv(descriptor, [target[: 1 << 30]], start)
            if count == 0:
                raise CheckpointError(self.checkpoint.path, [f"{name}: {info.file.name} ends before its data"])
            target, start = target[count:], start + count

    def read(self, name: str, index: Index, into: UInt8[np.ndarray, " nbytes"]) -> None:
        """The bytes of a slice of a tensor, into a buffer of just their number. Raises CheckpointError when the file
        ends early or a scale is NaN."""
        info, target, at = self.checkpoint.tensors[name], memoryview(into), 0
        for offset, length in byte_ranges(info.shape, index, DTYPES[info.dtype].itemsize):
            self._fill(name, info, info.start + offset, target[at : at + length])
            at += length
        if info.dtype == "F8_E8M0" and not name.endswith(".embed.scale") and (into == 255).any():
            raise CheckpointError(self.checkpoint.path, [f"{name}: holds E8M0 byte 255, which is NaN"])

    def read_parameter(self, names: Sequence[str], index: Index, into: UInt8[np.ndarray, " nbytes"]) -> None:
        """As `read`, of a parameter that is one tensor, or a stack of the tensors `names`."""
        if len(index) == len(self.checkpoint.tensors[names[0]].shape):
            self.read(names[0], index, into)
            return
        chosen = names[index[0]]
        for name, piece in zip(chosen, into.reshape(len(chosen), -1), strict=True):
            self.read(name, index[1:], piece)


def _extent(index: Index, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True))


def place(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: NamedSharding | None,
    fill: Callable[[Index, np.ndarray], None],
) -> jax.Array:
    """An array whose shards are made one after the other: `fill(index, buffer)` writes the bytes of each distinct shard
    once, and every device that holds it gets it from that buffer. None: the default device."""
    whole = (slice(None),) * len(shape)
    if sharding is None:
        owners: dict[Index, list[Any]] = {whole: [None]}
    else:
        owners = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            cuts = tuple(slice(*cut.indices(size)) for cut, size in zip(index, shape, strict=True))
            owners.setdefault(cuts, []).append(device)
    arrays = []
    for index, devices in owners.items():
        extent = _extent(index, shape)
        buffer = np.empty(math.prod(extent) * np.dtype(dtype).itemsize, np.uint8)
        fill(index, buffer)
        for device in devices:
            arrays.append(jax.device_put(buffer.view(dtype).reshape(extent), device))
            arrays[-1].block_until_ready()
        del buffer
    return arrays[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _once(loaded: Loaded, name: str, kind: Place, make: Callable[[], jax.Array | np.ndarray]) -> Any:
    """What an earlier load made of `name`, or `make()`, kept for a later one. Raises ValueError when it is no array of
    this (shape, dtype, where): the sharding, "device" or "host"."""
    if name not in loaded:
        loaded[name] = make()
    array = loaded[name]
    where = getattr(array, "sharding", "host")
    found = (tuple(array.shape), np.dtype(array.dtype), where if isinstance(where, NamedSharding | str) else "device")
    if found != kind:
        raise ValueError(f"loaded: {name} is {found}, this load makes {kind}")
    return array


def load(
    checkpoint: Source,
    mesh: Mesh | None = None,
    *,
    on_progress: Progress | None = None,
    loaded: Loaded | None = None,
    only: Callable[[str], bool] | None = None,
) -> Transformer:
    """The parameters on a mesh (`sharding`) or on the default device, as stored: what is quantized stays quantized.

    `on_progress(done, total, name)` is called per parameter. `loaded` fills with the parameters by name as they arrive;
    given again after an error or an interrupt, with the same checkpoint and mesh, the load goes on from there. `only`
    chooses parameters by name (`layers.3.ffn.experts.w1.weight`): the others stay abstract, without memory. Raises
    CheckpointError for what is wrong with the files, ValueError for a mesh over which something does not divide; a
    scale that is NaN is found when it is read.
    """
    abstract = abstract_parameters(checkpoint.config)
    where = {} if mesh is None else placements(abstract, mesh)
    expected = checkpoint.check(abstract)
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    wanted = {path: parts for path, parts in by_parameter(expected).items() if only is None or only(dotted(path))}
    kept: Loaded = {} if loaded is None else loaded
    with Reader(checkpoint) as reader:
        for done, (path, parts) in enumerate(wanted.items(), 1):
            name, leaf, sharding = dotted(path), flat[path], where.get(path)
            make = partial(place, leaf.shape, leaf.dtype, sharding, partial(reader.read_parameter, parts))
            flat[path] = leaf.replace(_once(kept, name, (leaf.shape, np.dtype(leaf.dtype), sharding or "device"), make))
            if on_progress is not None:
                on_progress(done, len(wanted), name)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def load_tables(
    checkpoint: Source,
    placement: str = "mmap",
    mesh: Mesh | None = None,
    *,
    on_progress: Progress | None = None,
    loaded: Loaded | None = None,
) -> tuple[Table | DeviceTable, ...]:
    """The Engram tables in one of their places (`engine.tables`): "mmap" reads nothing yet, the others all rows.

    Rows are never cut. A sharded table whose rows do not divide over the devices is padded with rows of zeros, which
    nothing hashes to. `on_progress` and `loaded` as in `load`. Raises ValueError for an unknown place, or "sharded"
    without a mesh.
    """
    check_placement(placement, mesh)
    pairs = [table_names(layer) for layer in checkpoint.config.engram_layer_ids]
    names = [name for pair in pairs for name in pair]
    if placement == "mmap":
        views = {name: checkpoint.tensors[name].mapped().view(np.uint8) for name in names}
        return tuple(Table(views[weight], views[scale]) for weight, scale in pairs)
    where: NamedSharding | str = placement
    if mesh is not None and placement != "host":
        where = sharded_rows(mesh) if placement == "sharded" else NamedSharding(automatic(mesh), PartitionSpec())
    kept: Loaded = {} if loaded is None else loaded
    with Reader(checkpoint) as reader:
        for done, name in enumerate(names, 1):
            _table(reader, name, where, mesh.size if placement == "sharded" else 1, kept)
            if on_progress is not None:
                on_progress(done, len(names), name)
    kind = Table if placement == "host" else DeviceTable
    return tuple(kind(kept[weight], kept[scale]) for weight, scale in pairs)


def _table(reader: Reader, name: str, where: NamedSharding | str, pieces: int, loaded: Loaded) -> None:
    """Put the bytes of a table's `weight` or `scale`, and rows of zeros up to a multiple of `pieces`, into `loaded`."""
    rows, width = reader.checkpoint.tensors[name].shape
    shape = (-(-rows // pieces) * pieces, width)

    def fill(index: Index, buffer: np.ndarray) -> None:
        first, last, _ = index[0].indices(rows)
        live = max(0, last - first) * width
        reader.read(name, (slice(first, max(first, last)), slice(None)), buffer[:live])
        buffer[live:] = 0

    def make() -> Any:
        if where != "host":
            return place(shape, np.uint8, where if isinstance(where, NamedSharding) else None, fill)
        table = np.empty(rows * width, np.uint8)
        fill((slice(None), slice(None)), table)
        return table.reshape(rows, width)

    _once(loaded, name, (shape, np.dtype(np.uint8), where), make)
