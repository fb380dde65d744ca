"""What the warpgroups of a program of the site's kernel share: arrays, buffers, and which strips are theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.program import ROW, repeat
from pallas_kernels.mhc.mixes import Sizes
from pallas_kernels.references import Ref

ROWS = 64  # of a tensor core's tile


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Sizes for calls of up to `limit` tokens, of which there are at least 64. Shared memory holds `stages` strips of
    the streams and y, `fn_stages` of fn, and the ring. `registers` of a thread: the four warpgroups share 512."""

    limit: int
    columns: int = 32
    slices: int = 8
    teams: int = 16
    stages: int = 5
    fn_stages: int = 3
    lag: int = 2
    registers: tuple[int, int, int, int] = (40, 232, 112, 128)  # load, mix, collapse, finish

    granule: ClassVar[int] = 8  # what the tokens are a multiple of: rows of a tile in shared memory

    @property
    def step(self) -> int:
        """What the width is a multiple of."""
        return self.columns * self.slices


class Arrays(NamedTuple):
    """Device memory: what comes in, what goes out, and `parts` [rows, slices, RECORD], the sums over parts of rows."""

    x: Ref
    y: Ref
    post: Ref
    comb: Ref
    mix: Ref
    norm: Ref
    fn: Ref
    scale: Ref
    base: Ref
    new: Ref
    read: Ref
    pre_out: Ref
    post_out: Ref
    comb_out: Ref
    parts: Ref


class Buffers(NamedTuple):
    """Shared memory. `strips` [stages, M + 1, 64, columns]: the streams, then y. Barriers, in the order in which a
    strip passes them: `full` and `fn_full` loaded, `mixed`, `taken` into the ring; `free`, `empty` and `fn_empty` used
    up. `done` stands for the counters in interpret mode."""

    strips: Ref
    fn: Ref
    ring: Ref
    full: Ref
    fn_full: Ref
    mixed: Ref
    taken: Ref
    free: Ref
    empty: Ref
    fn_empty: Ref
    done: Ref


@dataclass(frozen=True, kw_only=True)
class Team:
    """What the warpgroups of a program share. Item k of a team is its k-th block of 64 rows; a program's steps are the
    strips of its items, one after the other."""

    arrays: Arrays
    buffers: Buffers
    counters: Ref
    tile: Tile
    sizes: Sizes
    teams: int
    team: Any
    part: Any
    strips: int
    blocks: int
    interpret: bool

    @property
    def items(self) -> Any:
        """How many items a team has: at least one, there are no more teams than blocks."""
        return lax.div(self.blocks - 1 - self.team, self.teams) + 1

    @property
    def steps(self) -> Any:
        """How many strips a program has."""
        return self.items * self.strips

    @property
    def every(self) -> range:
        """The streams."""
        return range(self.arrays.x.shape[1])

    @property
    def ring(self) -> int:
        """Places in the ring."""
        return self.strips + self.tile.lag

    def block(self, k: Any) -> Any:
        """Which block of rows item k is."""
        return self.team + k * self.teams

    def rows(self, k: Any) -> Any:
        """Its rows; of a ragged block the last ones."""
        return pl.ds(lax.min(self.block(k) * ROWS, self.arrays.x.shape[0] - ROWS), ROWS)

    def columns(self, strip: Any) -> Any:
        """The columns of one of the program's strips."""
        return pl.ds((strip * self.tile.slices + self.part) * self.tile.columns, self.tile.columns)

    def part_of(self, k: Any, part: Any, n: int) -> Any:
        """Number n of what a program left of an item. A ragged block's records stand past the last row's."""
        return self.arrays.parts.at[pl.ds(self.block(k) * ROWS, ROWS), part, n]

    def get(self, ref: Any, layout: Any = ROW) -> jax.Array:
        """One number a row (or a column) from device memory."""
        return ref[...] if self.interpret else plgpu.load(ref, layout=layout, optimized=False)

    def strip(self, ref: Any) -> jax.Array:
        """A strip from shared memory, in the layout of the tensor core's left operand."""
        return ref[...] if self.interpret else plgpu.load(ref, layout=plgpu.Layout.WGMMA)

    def each_item(self, item: Callable[[Any], None]) -> None:
        """item(k) for the items in turn."""
        repeat(self.items, item)

    def drain(self, barriers: Any, count: int) -> None:
        """Wait for the last arrivals, which nobody else waits for."""
        first = lax.max(self.steps - count, 0)
        repeat(self.steps, lambda n: plgpu.barrier_wait(barriers.at[lax.rem(n, count)]), first)
