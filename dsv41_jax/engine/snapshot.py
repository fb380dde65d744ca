"""What a prefix leaves for reuse: the global entries of a cache, on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Array

from dsv41_jax.config import Config
from dsv41_jax.nn.cache import Cache, init_cache
from dsv41_jax.numerics import Numerics


@dataclass(frozen=True)
class Snapshot:
    """What a prefix leaves for reuse: (main, index keys) of every Full layer, as stored, for `length` [B] tokens."""

    length: np.ndarray
    entries: tuple[tuple[np.ndarray, np.ndarray], ...]

    @classmethod
    def of(cls, cache: Cache) -> Snapshot:
        """The global entries of a cache alone: 890 bytes a token for the released config packed. Windows, open groups
        and drafters' rings are left out; `Model.restore` rebuilds them from the last W tokens."""
        length = np.array(cache.length)

        def kept(entries: Array, ratio: int) -> np.ndarray:
            host = np.array(entries[:, : length.max() // ratio])
            host[np.arange(host.shape[1]) >= (length // ratio)[:, None]] = 0
            return host

        full = [layer for layer in cache.layers if layer.ratio]
        return cls(length, tuple((kept(f.main, f.ratio), kept(f.index_keys, f.ratio)) for f in full))

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(rows.nbytes for pair in self.entries for rows in pair)

    def cache(self, cfg: Config, length: np.ndarray, capacity: int, numerics: Numerics) -> Cache:
        """A cache with the entries of the first `length` [B] tokens; its windows are still empty, and entries past a
        row's length are dead. Raises ValueError when the snapshot is shorter, or was not taken with this config and
        these numerics."""
        short = np.flatnonzero(length > self.length)
        if length.shape != self.length.shape or short.size:
            raise ValueError(f"snapshot: holds {self.length.tolist()} tokens a row, {length.tolist()} were asked for")
        cache = init_cache(cfg, len(length), capacity, numerics)
        full = [number for number, layer in enumerate(cache.layers) if layer.ratio]
        layers = list(cache.layers)
        if len(self.entries) != len(full):
            raise ValueError(f"snapshot: entries of {len(self.entries)} layers, the config has {len(full)} Full layers")
        for number, pair in zip(full, self.entries, strict=True):
            layer, limit = layers[number], int(length.max()) // layers[number].ratio
            for rows, store in zip(pair, (layer.main, layer.index_keys), strict=True):
                if rows.shape[-1] != store.shape[-1] or rows.dtype != store.dtype:
                    held = f"layer {number} holds rows of {rows.shape[-1]} {rows.dtype}"
                    raise ValueError(f"snapshot: {held}, {numerics.name!r} keeps {store.shape[-1]} {store.dtype}")
            main, keys = (
                store.at[:, :limit].set(rows[:, :limit])
                for rows, store in zip(pair, (layer.main, layer.index_keys), strict=True)
            )
            layers[number] = replace(layer, main=main, index_keys=keys)
        return replace(cache, length=np.asarray(length, np.int32), layers=tuple(layers))
