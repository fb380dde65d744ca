"""What the programs of the Hopper kernel share: tile, sources of rows, the schedule, references."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import lax
from jaxtyping import Array

from pallas_kernels.references import Ref
from pallas_kernels.sparse_attention.row_ptx import KEYS, Format
from pallas_kernels.target import multiprocessors

LISTS = 8  # ids of so many blocks in shared memory
AHEAD = LISTS - 2  # steps between the copy of a block's ids and the fetch of its rows


@dataclass(frozen=True)
class Tile:
    """How many programs stay resident, and the registers of a thread: two consumer and two producer warpgroups share
    the 65,536 of an SM, so consumer + producer <= 256."""

    programs: int = multiprocessors("sm_90")
    consumer_registers: int = 200
    producer_registers: int = 56


H200 = Tile()


@dataclass(frozen=True)
class Source:
    """One set of rows: how they are stored, how many a batch entry has, and how many ids of it a query has."""

    fmt: Format
    count: int
    ids: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the programs share. An item is one of the `splits` equal parts of a query's keys; program p has the items
    p, p + programs, ...; the blocks of all its items are its steps 0, 1, ..."""

    sources: tuple[Source, ...]
    queries: int
    splits: int
    queries_per_entry: int
    scale: float
    interpret: bool
    tile: Tile

    @property
    def blocks(self) -> int:
        """Of an item."""
        return sum(source.ids for source in self.sources) // KEYS // self.splits

    @property
    def programs(self) -> int:
        """How many there are."""
        return min(self.tile.programs, self.queries * self.splits)

    @property
    def down(self) -> int:
        """Rows are 2**-down of their values."""
        return 0 if self.interpret else self.sources[0].fmt.down


class Arrays(NamedTuple):
    """Device memory: q, the sinks, the rows and ids of each source; o, and its lse, or with splits the accumulators,
    and their maxima and totals."""

    q: Ref
    sink: Ref
    tables: tuple[Ref, ...]
    ids: tuple[Ref, ...]
    o: Ref
    stats: tuple[Ref, ...]


class Buffers(NamedTuple):
    """Shared memory. `k` holds the half blocks of a pair (`slot_of`), `ids` the ids of blocks, in a ring; `p` and
    `stats` what one consumer tells the other about its block. Barriers: `*_full` says that something has arrived,
    `k_free` that a half block has been read."""

    q: Ref
    k: Ref
    ids: Ref
    p: Ref
    stats: Ref
    q_full: Ref
    ids_full: Ref
    k_full: Ref
    k_free: Ref
    p_full: Ref


@dataclass(frozen=True)
class Program:
    """One of the programs that stay resident: which one, its work, and what it may touch."""

    work: Work
    arrays: Arrays
    buffers: Buffers
    number: Array

    def items(self) -> Array:
        """How many items it has."""
        work = self.work
        return lax.div(work.queries * work.splits - 1 - self.number, work.programs) + 1

    def item(self, j: Array) -> tuple[Array, Array]:
        """(query, split) of its item j."""
        number = self.number + j * self.work.programs
        return lax.div(number, self.work.splits), lax.rem(number, self.work.splits)

    def step(self, s: Array) -> tuple[Array, Array]:
        """(query, first key) of its step s."""
        blocks = self.work.blocks
        query, split = self.item(lax.div(s, blocks))
        return query, (split * blocks + lax.rem(s, blocks)) * KEYS


def slot_of(k: Array | int, half: Array | int) -> Array | int:
    """Where among the half blocks in shared memory a half of an item's block k is."""
    return 2 * (k % 2 if isinstance(k, int) else lax.rem(k, 2)) + half
