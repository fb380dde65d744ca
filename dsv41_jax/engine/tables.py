"""The Engram tables on the host's side: where they lie, and the lookup of the rows that a call needs.

A table has one of four places, and gives the same rows from each:

    mmap      the checkpoint's file: a lookup touches the pages of its rows
    host      host memory
    device    whole on every device, looked up there by row number
    sharded   its rows split over all devices of a mesh (whole rows, padded with zeros to a multiple of the devices);
              each device answers for its own and the sum over devices is the answer
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Int32, Int64, UInt8

from dsv41_jax.config import Config
from dsv41_jax.engine.ngrams import NONE, hash_rows, layouts, look_back
from dsv41_jax.nn.engram import EngramRows
from pallas_kernels.formats import GROUP

PLACEMENTS = ("mmap", "host", "device", "sharded")


def check_placement(placement: str, mesh: Mesh | None) -> None:
    """Raise ValueError unless tables can be placed so: one of PLACEMENTS, and a mesh for "sharded"."""
    if placement not in PLACEMENTS:
        raise ValueError(f"engram: {placement!r} is not one of {', '.join(map(repr, PLACEMENTS))}")
    if placement == "sharded" and mesh is None:
        raise ValueError("engram: 'sharded' splits the tables over a mesh, and mesh is None")


def _refuse_nan(at: Int[np.ndarray, "*at"], scale: UInt8[np.ndarray, "*at groups"]) -> None:
    bad = (scale == 255).any(axis=-1)
    if bad.any():
        raise ValueError(f"Engram table: row {at[bad][0]} has a scale of E8M0 byte 255, which is NaN")


@dataclass(frozen=True)
class Table:
    """One layer's rows on the host, usually memory-mapped: E4M3 bytes [rows, width] and E8M0 bytes [rows, width/32]."""

    weight: UInt8[np.ndarray, "rows width"]
    scale: UInt8[np.ndarray, "rows groups"]

    def read(self, at: Int64[np.ndarray, "*at"]) -> tuple[UInt8[Array, "*at width"], UInt8[Array, "*at groups"]]:
        """(weight, scale) of the rows `at`. Raises ValueError for one whose scale is NaN."""
        weight, scale = self.weight[at], self.scale[at]
        _refuse_nan(at, scale)
        return jnp.asarray(weight), jnp.asarray(scale)


def rows_of_piece(
    piece: UInt8[Array, "rows width"], at: Int32[Array, "*at"], first: Int32[Array, ""] | int
) -> UInt8[Array, "*at width"]:
    """The rows `at` of a table of which `piece` holds those from number `first` on; zeros for all others."""
    place = at - first
    mine = (place >= 0) & (place < piece.shape[0])
    return jnp.where(mine[..., None], piece[jnp.where(mine, place, 0)], jnp.uint8(0))


@partial(jax.jit, static_argnames="mesh")
def _look_up(
    weight: UInt8[Array, "rows width"], scale: UInt8[Array, "rows groups"], at: Int32[Array, "*at"], mesh: Mesh | None
) -> tuple[UInt8[Array, "*at width"], UInt8[Array, "*at groups"], Bool[Array, ""]]:
    """(weight, scale, whether a scale is NaN); with a mesh, of tables whose rows are split over all its devices."""

    def answer(piece: UInt8[Array, "rows width"], at: Int32[Array, "*at"]) -> UInt8[Array, "*at width"]:
        first = jax.lax.axis_index(mesh.axis_names) * piece.shape[0]
        return jax.lax.psum(rows_of_piece(piece, at, first), mesh.axis_names)

    if mesh is None:
        found = [rows_of_piece(table, at, 0) for table in (weight, scale)]
    else:
        specs = (P(mesh.axis_names), P())
        found = [
            jax.shard_map(answer, mesh=mesh, in_specs=specs, out_specs=P())(table, at) for table in (weight, scale)
        ]
    return found[0], found[1], (found[1] == 255).any()


@dataclass(frozen=True)
class DeviceTable:
    """One layer's rows on devices: whole on each, or split over all of a mesh, then padded with rows of zeros."""

    weight: UInt8[Array, "rows width"]
    scale: UInt8[Array, "rows groups"]

    def read(self, at: Int64[np.ndarray, "*at"]) -> tuple[UInt8[Array, "*at width"], UInt8[Array, "*at groups"]]:
        """As `Table.read`; only row numbers and one flag pass between host and devices."""
        sharding = self.weight.sharding
        split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
        mesh = sharding.mesh if split else None  # type: ignore[attr-defined]
        weight, scale, bad = _look_up(self.weight, self.scale, at.astype(np.int32), mesh)
        if bad:
            _refuse_nan(at, np.asarray(scale))
        return weight, scale


class EngramLookup:
    """The host side of Engram: token map, layouts and tables of `layers`, and the lookup that every run makes."""

    def __init__(self, cfg: Config, token_map: Int32[np.ndarray, " V"], tables: tuple[Table | DeviceTable, ...]):
        self.layers = tuple(cfg.engram_layer_ids)
        self.token_map, self.tables, self.layouts = token_map, tables, layouts(cfg)
        self.pad = int(token_map[cfg.engram_pad_token_id])

    @classmethod
    def random(cls, cfg: Config, seed: int = 0) -> "EngramLookup":
        """Tables of random rows on the host, and a token map onto the compressed vocabulary."""
        rng, groups = np.random.default_rng(seed), cfg.engram_head_dim // GROUP
        tables = tuple(
            Table(
                rng.integers(0, 0x60, (layout.rows, cfg.engram_head_dim), np.uint8),
                np.full((layout.rows, groups), 124, np.uint8),
            )
            for layout in layouts(cfg)
        )
        token_map = np.minimum(np.arange(cfg.vocab_size), cfg.engram_compressed_vocab_size - 1).astype(np.int32)
        return cls(cfg, token_map, tables)

    @property
    def on_host(self) -> bool:
        """Whether `read` looks rows up on the host, and so may run in a thread beside a step. Two threads may not start
        programs of a mesh: devices would get them in different orders, and wait for each other."""
        return all(isinstance(table, Table) for table in self.tables)

    def read(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: Int[np.ndarray, " B"],
        start: Int[np.ndarray, " B"],
        history: Int32[np.ndarray, "B ring"],
        image: Bool[np.ndarray, "B T"] | None = None,
    ) -> tuple[tuple[EngramRows, ...], Int32[np.ndarray, "B ring"]]:
        """(rows of each table, the ring of ids after `count` tokens from position `start` on). Positions where `image`
        is set block what follows."""
        ids = self._ids(tokens, image)
        past = np.asarray(start)[:, None] - np.arange(len(self.layouts[0].multipliers) - 1, 0, -1)
        before = np.take_along_axis(history, past % history.shape[1], axis=1)
        back = look_back(ids, np.where(past < 0, NONE, before), self.pad)
        rows = []
        for layout, table in zip(self.layouts, self.tables, strict=True):
            at = hash_rows(back, layout)
            rows.append(EngramRows(*table.read(at), jnp.asarray(at.astype(np.int32))))
        return tuple(rows), self._remember(history, ids, start, count)

    def recall(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: Int[np.ndarray, " B"],
        history: Int32[np.ndarray, "B ring"],
        image: Bool[np.ndarray, "B T"] | None = None,
    ) -> Int32[np.ndarray, "B ring"]:
        """The ring of ids after the first `count` of `tokens`, which start at position 0."""
        return self._remember(history, self._ids(tokens, image), np.zeros(len(tokens), np.int32), count)

    def _ids(self, tokens: Int32[np.ndarray, "B T"], image: Bool[np.ndarray, "B T"] | None) -> Int32[np.ndarray, "B T"]:
        """Compressed ids, NONE at image positions."""
        bad = tokens[(tokens < 0) | (tokens >= len(self.token_map))]
        if bad.size:
            raise ValueError(f"tokens: id {bad[0]} is outside 0..{len(self.token_map) - 1}")
        ids = self.token_map[tokens]
        return ids if image is None else np.where(image, NONE, ids)

    @staticmethod
    def _remember(
        history: Int32[np.ndarray, "B ring"],
        ids: Int32[np.ndarray, "B T"],
        start: Int[np.ndarray, " B"],
        count: Int[np.ndarray, " B"],
    ) -> Int32[np.ndarray, "B ring"]:
        """The ring with the newest of `count` ids from position `start` on."""
        history = history.copy()
        for row, (first, live) in enumerate(zip(start, count, strict=True)):
            newest = np.arange(max(0, live - history.shape[1]), live)
            history[row, (first + newest) % history.shape[1]] = ids[row, newest]
        return history

    def sample(self, count: int) -> list[np.ndarray]:
        """The token map, and up to `count` evenly spaced rows of each table as stored: what tells two memories of one
        config apart, as far as so many rows can."""
        picked = [self.token_map]
        for layout, table in zip(self.layouts, self.tables, strict=True):
            at = np.linspace(0, layout.rows - 1, min(count, layout.rows)).astype(np.int64)
            picked += map(np.asarray, table.read(at))
        return picked
