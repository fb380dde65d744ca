"""A cache snapshot as a file: a safetensors file that says what it belongs to and carries a checksum of all it holds.

    tensors       layers.N.main, layers.N.index_keys of each Full layer, as the cache stores them
    __metadata__  `snapshot`, a JSON object: kind, config, model, numerics, lengths, and sha256 of all these and of the
                  tensors' names, dtypes, shapes and data

`config` and `model` are SHA-256 of the config and of the parameters' fingerprint: entries of one model mean nothing to
another. The file appears whole or not at all, and is read only if every check passes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from dsv41_jax import atomic
from dsv41_jax.config import Config
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.engine.tables import EngramLookup
from dsv41_jax.files.expected import DTYPES, flat_parameters
from dsv41_jax.files.safetensors import read_header, write_tensors
from dsv41_jax.nn.transformer import Transformer
from dsv41_jax.numerics import Numerics
from dsv41_jax.sharding import dotted
from dsv41_jax.untrusted import cut, few, shown

KIND = "dsv41-jax cache snapshot 2"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
    leaves = {dotted(path): leaf for path, leaf in flat_parameters(params).items()}
    for name, leaf in sorted(leaves.items()):
        sums.update(f"{name} {leaf.shape} {leaf.dtype} {int(_digest(leaf[...]))}\n".encode())
    for rows in () if engram is None else engram.sample(1 << 16):
        sums.update(rows.tobytes())
    return sums.hexdigest()


def identity(cfg: Config, numerics: Numerics, model: str) -> Identity:
    """What a snapshot must agree in with the model that reads it; `model` is its fingerprint."""
    settings = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.compare}
    config = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return {"kind": KIND, "config": config, "model": model, "numerics": numerics.name}


def _ratios(cfg: Config) -> dict[str, int]:
    """The tensors of a snapshot in order, and how many tokens an entry of each stands for."""
    layers = [(layer, cfg.compress_ratios[layer]) for layer in cfg.kv_source_layer_ids]
    return {f"layers.{layer}.{kind}": ratio for layer, ratio in layers for kind in ("main", "index_keys")}


def _checksum(meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    about = {name: [_DTYPE_NAMES[entries.dtype], list(entries.shape)] for name, entries in tensors.items()}
    sums = hashlib.sha256(json.dumps([dict(meta), about], sort_keys=True).encode())
    for _, entries in sorted(tensors.items()):
        sums.update(np.ascontiguousarray(entries).view(np.uint8))
    return sums.hexdigest()


def write_snapshot(path: Path, snapshot: Snapshot, cfg: Config, about: Identity) -> None:
    """Export; `path` is the complete old file or the complete new one at every moment."""
    entries = [part for pair in snapshot.entries for part in pair]
    tensors = dict(zip(_ratios(cfg), entries, strict=True))
    meta = {**about, "lengths": snapshot.length.tolist()}
    with atomic.file(path) as stream:
        write_tensors(stream, tensors, {"snapshot": json.dumps(meta | {"sha256": _checksum(meta, tensors)})})


def read_snapshot(path: Path, cfg: Config, about: Identity) -> Snapshot:
    """Import. Raises SnapshotError unless the file is whole and belongs to this model, config and numerics."""
    infos, problems, metadata = read_header(path)
    if problems:
        raise SnapshotError(path, problems[0])
    try:
        meta = json.loads(metadata["snapshot"])
    except (KeyError, TypeError, ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict) or meta.get("kind") != about["kind"]:
        raise SnapshotError(path, f"is no {about['kind']!r}")
    ratios = _ratios(cfg)
    wanted = list(ratios)
    for key, value in about.items():
        if meta.get(key) != value:
            raise SnapshotError(path, f"belongs to another {key}: {cut(str(meta.get(key)))}, here {value}")
    if sorted(infos) != sorted(wanted):
        raise SnapshotError(path, f"holds {few(sorted(infos), ', ')}, expected {few(sorted(wanted), ', ')}")
    arrays = {name: np.array(info.mapped()) for name, info in infos.items()}
    found = meta.pop("sha256", None)
    if found != (right := _checksum(meta, arrays)):
        raise SnapshotError(path, f"is damaged: its content has SHA-256 {right}, the header says {cut(str(found))}")
    lengths = meta.get("lengths")
    if not isinstance(lengths, list) or not all(type(n) is int and 0 <= n < 1 << 31 for n in lengths):
        raise SnapshotError(path, f"lengths {shown(lengths)} are not numbers of tokens")
    for name, ratio in ratios.items():
        if arrays[name].shape[:2] != (needed := (len(lengths), max(lengths, default=0) // ratio)):
            held, told = list(arrays[name].shape[:2]), shown(lengths)
            raise SnapshotError(path, f"{name} is {held}, {told} tokens need {list(needed)}")
    pairs = tuple((arrays[main], arrays[keys]) for main, keys in zip(wanted[::2], wanted[1::2], strict=True))
    return Snapshot(np.array(lengths, np.int32), pairs)
