"""A cache snapshot as a file: a safetensors file that says what it belongs to and carries a checksum of all it holds.

    tensors       layers.N.main, layers.N.index_keys of each Full layer, as the cache stores them
    __metadata__  kind, config, model, numerics, lengths, sha256 (of the other metadata, names, dtypes, shapes and data)

`config` and `model` are SHA-256 of the config and of the parameters' fingerprint: entries of one model mean nothing to
another. The file appears whole or not at all, and is read only if every check passes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped, UInt32

from dsv41_jax import atomic
from dsv41_jax.config import Config
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.engine.tables import EngramLookup
from dsv41_jax.files.safetensors import DTYPES, read_header
from dsv41_jax.nn.transformer import Transformer
from dsv41_jax.numerics import Numerics

KIND = "dsv41-jax cache snapshot 1"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Identity = Mapping[str, str]


class SnapshotError(ValueError):
    """A snapshot file cannot be used here; one line that says why."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")


@jax.jit
def _digest(leaf: Shaped[Array, "*shape"]) -> UInt32[Array, ""]:
    """A sum over all bytes in which each place has an odd weight of its own: one changed byte changes it."""
    data = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(leaf, jnp.uint8)
    place = jnp.zeros(data.shape, jnp.uint32)
    for axis, size in enumerate(data.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, data.shape, axis)
    weight = (place * jnp.uint32(2654435769)) ^ (place >> 15)
    return jnp.sum(data.astype(jnp.uint32) * (weight | jnp.uint32(1)), dtype=jnp.uint32)


def fingerprint(params: Transformer, engram: EngramLookup | None) -> str:
    """SHA-256 over a digest of every parameter, the token map and the Engram rows: a different checkpoint of the same
    config has another one. Of tables with more than 65,536 rows so many are read, evenly spaced."""
    sums = hashlib.sha256()
    for path, leaf in sorted(nnx.to_flat_state(nnx.state(params)), key=lambda item: ".".join(map(str, item[0]))):
        sums.update(f"{'.'.join(map(str, path))} {leaf.shape} {leaf.dtype} {int(_digest(leaf[...]))}\n".encode())
    for rows in () if engram is None else engram.sample(1 << 16):
        sums.update(rows.tobytes())
    return sums.hexdigest()


def identity(cfg: Config, numerics: Numerics, model: str) -> Identity:
    """What a snapshot must agree in with the model that reads it; `model` is its fingerprint."""
    settings = {name: value for name, value in vars(cfg).items() if name != "json_text"}
    config = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return {"kind": KIND, "config": config, "model": model, "numerics": numerics.name}


def _named(cfg: Config, snapshot: Snapshot) -> list[tuple[str, np.ndarray]]:
    parts = zip(cfg.kv_source_layer_ids, snapshot.entries, strict=True)
    return [
        (f"layers.{layer}.{kind}", np.ascontiguousarray(rows))
        for layer, pair in parts
        for kind, rows in zip(("main", "index_keys"), pair, strict=True)
    ]


def _checksum(meta: Identity, tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    tensors = list(tensors)
    about = {name: [_NAMES[rows.dtype], list(rows.shape)] for name, rows in tensors}
    sums = hashlib.sha256(json.dumps([dict(meta), about], sort_keys=True).encode())
    for _, rows in sorted(tensors, key=lambda item: item[0]):
        sums.update(np.ascontiguousarray(rows).view(np.uint8))
    return sums.hexdigest()


def write(path: Path, snapshot: Snapshot, cfg: Config, about: Identity) -> None:
    """Export; `path` is the complete old file or the complete new one at every moment."""
    tensors = _named(cfg, snapshot)
    meta = {**about, "lengths": json.dumps(snapshot.length.tolist())}
    header: dict[str, object] = {"__metadata__": meta | {"sha256": _checksum(meta, tensors)}}
    start = 0
    for name, rows in tensors:
        header[name] = {"dtype": _NAMES[rows.dtype], "shape": rows.shape, "data_offsets": [start, start + rows.nbytes]}
        start += rows.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic.file(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, rows in tensors:
            stream.write(rows.reshape(-1).view(np.uint8))


def read(path: Path, cfg: Config, about: Identity) -> Snapshot:
    """Import. Raises SnapshotError unless the file is whole and belongs to this model, config and numerics."""
    infos, problems = read_header(path)
    if problems:
        raise SnapshotError(path, problems[0])
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        meta = json.loads(stream.read(size)).get("__metadata__")
    if not isinstance(meta, dict) or meta.get("kind") != about["kind"]:
        raise SnapshotError(path, f"is no {about['kind']!r}")
    wanted = [f"layers.{layer}.{kind}" for layer in cfg.kv_source_layer_ids for kind in ("main", "index_keys")]
    for key, value in about.items():
        if meta.get(key) != value:
            raise SnapshotError(path, f"belongs to another {key}: {meta.get(key)}, here {value}")
    if sorted(infos) != sorted(wanted):
        raise SnapshotError(path, f"holds {', '.join(sorted(infos))}, expected {', '.join(sorted(wanted))}")
    arrays = {}
    for name, info in infos.items():
        flat = np.fromfile(path, np.uint8, info.stop - info.start, offset=info.start)
        arrays[name] = flat.view(DTYPES[info.dtype]).reshape(info.shape)
    found = meta.pop("sha256", None)
    if found != (right := _checksum(meta, arrays.items())):
        raise SnapshotError(path, f"is damaged: its content has SHA-256 {right}, the header says {found}")
    pairs = tuple((arrays[main], arrays[keys]) for main, keys in zip(wanted[::2], wanted[1::2], strict=True))
    return Snapshot(np.array(json.loads(meta["lengths"]), np.int32), pairs)
