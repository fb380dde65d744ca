"""Shapes of the indexer, and what it must give: the released rounding in NumPy, and ids that a sort chooses.

A dot is known up to the error of its float32 sum (nothing where, as with FP4 keys, the terms are few bits of one
scale), so its bfloat16 is one of at most two values, and so is each hit; a score must lie between the sums of the
smaller and of the larger hits, each give or take the error of a float32 sum of 32 terms, rounded to bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import oracle64
from pallas_kernels.case import Case
from pallas_kernels.indexer import decode, kernel, prefill, reference
from pallas_kernels.oracle64 import bfloat16
from pallas_kernels.quantize import pack_mxfp4, round_mxfp4

HEADS, WIDTH, ROUNDING, PART = 32, 128, 2.0**-24, 1 << 16
CHECKED = 8  # queries of a call
TINY = kernel.Tile(few=decode.Tile(span=128, queries=2), many=prefill.Tile(span=256))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Queries of some sequences and the entries of each; `packed` FP4 keys or bfloat16 ones; each query's own `pool`
    of so many blocks, or 0; whether all queries see all entries, `full`, or the last ones of some."""

    batch: int = 1
    tokens: int = 1
    entries: int
    packed: bool = True
    pool: int = 0
    full: bool = False

    @property
    def scored(self) -> int:
        """Entries that a query may see."""
        return 8 * self.pool or self.entries


@partial(jax.jit, static_argnums=1)
def inputs(seed: Any, shape: Shape) -> tuple[jax.Array, ...]:
    """Quantized queries; keys of which one is NaN where rows can say so and some repeat (ties); weights of both signs;
    a query that sees nothing, one that sees all; blocks in ascending order, the last ones missing."""
    batch, tokens, entries, pool = shape.batch, shape.tokens, shape.entries, shape.pool
    keys = jax.random.split(jax.random.key(seed), 5)
    q = round_mxfp4(jax.random.normal(keys[0], (batch, tokens, HEADS, WIDTH))).astype(jnp.bfloat16)
    row = pack_mxfp4(jax.random.normal(keys[1], (batch, entries, WIDTH)))
    row = row.at[:, 3 : entries // 2 : 5].set(row[:, 2:3])
    if not shape.packed:
        row = reference.unpack(row).at[:, 1].set(jnp.nan)
    weights = (jax.random.normal(keys[2], (batch, tokens, HEADS)) / 64).astype(jnp.bfloat16)
    visible = jnp.full((batch, tokens), entries, jnp.int32)
    if not shape.full:
        visible = jax.random.randint(keys[3], (batch, tokens), entries // 2, entries + 1).at[0, 0].set(entries)
        visible = visible.at[-1, -1].set(0) if batch * tokens > 1 else visible
    if not pool:
        return q, row, weights, visible
    chosen = jax.vmap(lambda k: jax.random.permutation(k, -(-entries // 8))[:pool])(
        jax.random.split(keys[4], batch * tokens)
    )
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=-1).at[:, -2:].set(-1)
    return q, row, weights, visible, chosen.reshape(batch, tokens, pool)


def bounds(q: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest score of one query [I, J] against keys [S, J]."""
    parts = [_bounds(q, keys[i : i + PART], weights) for i in range(0, len(keys), PART)]
    return np.concatenate([low for low, _ in parts]), np.concatenate([high for _, high in parts])


def _bounds(q: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    dot = keys @ q.T
    low = high = bfloat16(np.maximum(bfloat16(dot), 0) * weights)
    if not _exact(q, keys):
        error = WIDTH * ROUNDING * (np.abs(keys) @ np.abs(q).T)
        hits = [bfloat16(np.maximum(bfloat16(dot + e), 0) * weights) for e in (-error, error)]
        low, high = np.minimum(*hits), np.maximum(*hits)
    rest = (len(weights) - 1) * ROUNDING * np.maximum(np.abs(low), np.abs(high)).sum(1)
    return bfloat16(low.sum(1) - rest), bfloat16(high.sum(1) + rest)


def _exact(q: np.ndarray, keys: np.ndarray) -> bool:
    """Whether every partial sum of a dot fits 24 bits: multiples of one power of two, below 2**24 of it."""
    step = 2.0 ** (np.log2(_step(q)) + np.log2(_step(keys)))
    return bool(WIDTH * np.abs(q).max() * np.abs(keys).max() < 2.0**24 * step)


def _step(x: np.ndarray) -> float:
    """The largest power of two that divides every one of some bfloat16 values."""
    bits = x.astype(jnp.bfloat16).view(np.uint16).reshape(-1)
    some = np.flatnonzero(np.bincount(bits, minlength=1 << 16)).astype(np.uint16).view(jnp.bfloat16).astype(np.float64)
    mantissa, exponent = np.frexp(some[some != 0])
    whole = (np.abs(mantissa) * 2.0**24).astype(np.int64)
    return float(np.min(2.0 ** (exponent - 24) * (whole & -whole)))


def _rows(given: tuple[Any, ...]):
    """Of a sample of queries: their number, keys, entries and the bounds of their scores in that order."""
    q, keys, weights, visible = (np.asarray(x) for x in given[:4])
    tokens = q.shape[1]
    for r in oracle64.sample(visible.size, CHECKED):
        b, t = divmod(int(r), tokens)
        entries = np.arange(visible[b, t])
        if len(given) > 4:
            blocks = np.asarray(given[4])[b, t]
            entries = (blocks[:, None] * 8 + np.where(blocks[:, None] < 0, -8, np.arange(8))).reshape(-1)
        seen = (entries >= 0) & (entries < visible[b, t])
        low = high = np.full(len(entries), -np.inf)
        if seen.any():
            found = oracle64.cached_rows(keys[b, entries[seen]], WIDTH)
            nan = np.isnan(found).any(1)
            given_bounds = bounds(
                q[b, t].astype(np.float64), np.where(nan[:, None], 0, found), weights[b, t].astype(np.float64)
            )
            low, high = (x.copy() for x in (low, high))
            low[seen], high[seen] = (np.where(nan, -np.inf, x) for x in given_bounds)
        yield r, entries, low, high


def score_problems(given: tuple[Any, ...], output: Any) -> list[str]:
    """Scores out of bounds, and maxima that are not those of the scores."""
    found = []
    scores, fine, coarse = (np.asarray(x).astype(np.float64) for x in output)
    for i, (r, entries, low, high) in enumerate(_rows(given)):
        got = scores[i, : len(entries)]
        got = np.where(np.isnan(got), -np.inf, got)  # it loses as -inf does
        bad = ~((low <= got) & (got <= high))
        if bad.any():
            e = int(np.argmax(bad))
            found.append(f"query {r}: {bad.sum()} scores, entry {entries[e]}: {got[e]} not in [{low[e]}, {high[e]}]")
        whole = np.pad(got, (0, -len(got) % 64), constant_values=-np.inf)
        for level, size in ((fine, 8), (coarse, 64)):
            count = -(-len(got) // size)
            if not np.array_equal(level[i, :count], whole.reshape(-1, size).max(1)[:count]):
                found.append(f"query {r}: maxima of {size}")
    return found


def _impossible(ids: np.ndarray, low: np.ndarray, high: np.ndarray, count: int) -> str:
    """Why no scores between `low` and `high` select these places: ascending, as many as there are, and none left out
    that must be ahead of one chosen."""
    chosen = ids[ids >= 0]
    want = min(count, int((low > -np.inf).sum()))
    if len(chosen) != want or (ids[want:] != -1).any() or (np.diff(chosen) <= 0).any():
        return f"{len(chosen)} ids instead of {want}, or not ascending"
    if len(chosen) and chosen[-1] >= len(low):
        return f"{chosen[-1]} is not one of {len(low)}"
    left = np.setdiff1d(np.flatnonzero(low > -np.inf), chosen)
    if not len(left) or not len(chosen):
        return ""
    worst = chosen[np.lexsort((-chosen, high[chosen]))[0]]
    best = left[np.lexsort((left, -low[left]))[0]]
    if high[worst] > low[best] or (high[worst] == low[best] and worst < best):
        return ""
    return f"chosen {worst} has at most {high[worst]}, {best} left out at least {low[best]}"


def select_problems(given: tuple[Any, ...], output: Any, *, count: int, candidates: int = 0) -> list[str]:
    """Ids that follow from no scores within the bounds; from the only ones, where the bounds meet."""
    found = []
    ids = np.asarray(output[0]).reshape(-1, count)
    for r, entries, low, high in _rows(given):
        place = np.searchsorted(np.where(entries < 0, np.iinfo(np.int64).max, entries), ids[r])
        if why := _impossible(np.where(ids[r] < 0, -1, place), low, high, count):
            found.append(f"query {r}: {why}")
        if candidates:
            blocks = np.asarray(output[1]).reshape(-1, candidates)[r]
            low, high = (
                np.pad(x, (0, -len(x) % 8), constant_values=-np.inf).reshape(-1, 8).max(1) for x in (low, high)
            )
            if len(low):
                low[-1] = high[-1] = np.inf
            if why := _impossible(blocks, low, high, candidates):
                found.append(f"query {r}, blocks: {why}")
    return found


def _tiled_scores(q: jax.Array, keys: jax.Array, weights: jax.Array, visible: jax.Array) -> jax.Array:
    """The reference in tiles: its scores of every head would not fit otherwise."""
    split = keys.reshape(keys.shape[0], -1, reference.TILE, keys.shape[2]).swapaxes(0, 1)
    return jax.lax.map(lambda k: reference.index_scores(q, reference.unpack(k)[:, None], weights), split)


def scores(name: str, shape: Shape, reference: Callable) -> Case:
    """The scores of every query, with their maxima; a few are checked."""
    queries, seen = shape.batch * shape.tokens, shape.scored
    work = queries * seen

    def sampled(*x: jax.Array, tile: kernel.Tile | None = None, interpret: bool = False) -> tuple:
        """Of all scores and maxima those of a few queries: what is checked."""
        levels = kernel.scores(*x, tile=tile, interpret=interpret)
        return tuple(level[jnp.asarray(oracle64.sample(queries, CHECKED))] for level in levels)

    rows = queries * seen if seen < shape.entries else shape.batch * shape.entries
    return Case(
        name=name,
        inputs=lambda seed: inputs(seed, shape),
        kernel=sampled,
        reference=reference,
        problems=score_problems,
        flops=2.0 * work * HEADS * WIDTH,
        nbytes=(68 if shape.packed else 256) * rows + 2.0 * work * 73 / 64,
        repeatable=shape.full,  # what no query sees is left as it was
    )


def select(name: str, shape: Shape, *, count: int, candidates: int = 0) -> Case:
    """Scores and the selection from them."""
    wanted: dict[str, Any] = {"count": count, "candidates": candidates}
    return replace(
        scores(name, shape, partial(reference.select, **wanted, tile=1 << 20)),
        kernel=lambda *x, tile=None, interpret=False: kernel.select(*x, **wanted, tile=tile, interpret=interpret),
        problems=partial(select_problems, **wanted),
        repeatable=True,
    )


SMALL = (
    scores(
        "scores of four queries and two sequences, bf16",
        Shape(batch=2, tokens=4, entries=130, packed=False),
        _tiled_scores,
    ),
    scores("scores of many queries, uneven", Shape(tokens=32, entries=130), _tiled_scores),
    select("select of three queries, with candidates", Shape(tokens=3, entries=200), count=16, candidates=4),
    select("select from pools, a part of a tile", Shape(tokens=3, entries=200, pool=6), count=24),
    select("select from pools, three tiles", Shape(tokens=3, entries=500, pool=48), count=24),
)
_MILLION = 1 << 20
MODEL = (
    scores("prefill 2048 x 65536", Shape(tokens=2048, entries=65536, full=True), _tiled_scores),
    select("select 1 x 1M", Shape(entries=_MILLION, full=True), count=512),
    select("select 1 x 1M with candidates", Shape(entries=_MILLION, full=True), count=512, candidates=2048),
    select("select 16 x 131072", Shape(batch=16, entries=131072, full=True), count=512),
    select("select 64 pools", Shape(tokens=64, entries=_MILLION, pool=2048, full=True), count=512),
)
