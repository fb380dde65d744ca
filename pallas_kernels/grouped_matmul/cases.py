"""Named shapes of the routed experts: the two launches on rows that are sorted already, and the whole operation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import oracle64
from pallas_kernels.case import Case
from pallas_kernels.formats import GROUP, cast, dequantize_fp4
from pallas_kernels.grouped_matmul import kernel, reference
from pallas_kernels.grouped_matmul.groups import plan_of
from pallas_kernels.hopper.fragments import FP4
from pallas_kernels.hopper.stream import Plan, Tile
from pallas_kernels.oracle64 import bfloat16
from pallas_kernels.quantize import round_fp8

LIMIT = 10.0
CHECKED = 4  # tokens or experts of a large case
TOLERANCE = 2.0**-8  # of a row's norm: the output's own rounding is a third of it, rounding points are the oracle's too


def _weight(key: jax.Array, shape: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
    """Random codes [E, R, K / 2], and scales that give sums of unit size."""
    codes, scales = jax.random.split(key)
    middle = 124 - (shape[2].bit_length() - 1) // 2
    spread = jax.random.randint(scales, (*shape[:2], shape[2] // GROUP), middle - 1, middle + 2)
    return jax.random.bits(codes, (*shape[:2], shape[2] // 2), jnp.uint8), spread.astype(jnp.uint8)


def _quantize64(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-4) / 448))
    codes = np.clip(groups / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64)
    return (codes * scale).reshape(x.shape)


def _hidden64(x: np.ndarray, w1: np.ndarray, w3: np.ndarray, weight: Any) -> np.ndarray:
    gate, up = np.minimum(bfloat16(x @ w1.T), LIMIT), np.clip(bfloat16(x @ w3.T), -LIMIT, LIMIT)
    return bfloat16(gate / (1 + np.exp(-gate)) * up * weight)


def _sizes(key: jax.Array, experts: int, busy: int, rows: int) -> jax.Array:
    """`rows` an expert for `busy` of them; or, with all busy, so many rows in all at random."""
    if busy < experts:
        return jnp.zeros(experts, jnp.int32).at[jax.random.permutation(key, experts)[:busy]].set(rows)
    return jnp.sum(jax.random.randint(key, (rows,), 0, experts)[:, None] == jnp.arange(experts), 0, dtype=jnp.int32)


def _grouped(
    name: str, launch: str, *, experts: int, busy: int, rows: int, wide: int, inner: int, tile: Tile | None = None
) -> Case:
    """One launch: "up", with w1 and w3 [E, wide, inner], or "down", with w2."""
    total = rows * busy if busy < experts else rows

    def used() -> Tile:
        return tile or kernel.tile_for(total, experts)

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 5)
        plan = plan_of(_sizes(keys[0], experts, busy, rows), total, used().widths[-1])
        room = total + 7 * min(experts, total) + used().widths[-1]
        x = round_fp8(jax.random.normal(keys[1], (-(-room // 8) * 8, inner), jnp.bfloat16))
        weights = jax.random.uniform(keys[2], x.shape[:1], jnp.float32)
        first, second = (_weight(k, (experts, wide, inner)) for k in keys[3:])
        return (FP4.permute(x), weights, *plan, *first, *(second if launch == "up" else ()))

    def run(x: Any, weights: Any, *rest: Any, tile: Tile | None = None, interpret: bool = False) -> Any:
        plan, pairs = Plan(*rest[:4]), (rest[4:6], rest[6:8])
        if launch == "up":
            return kernel.gate_up(x, weights, plan, *pairs, limit=LIMIT, tile=tile or used(), interpret=interpret)
        return kernel.down(x, plan, pairs[0], tile=tile or used(), interpret=interpret)

    def plain(x: Any, weights: Any, *rest: Any) -> Any:
        plan, pairs = Plan(*rest[:4]), (rest[4:6], rest[6:8])

        def product(e: Any, row: Any, pair: Any) -> Any:
            dense = FP4.permute(dequantize_fp4(pair[0][e], pair[1][e], jnp.bfloat16))
            return cast(jnp.einsum("mk,rk->mr", x[row], dense, preferred_element_type=jnp.float32), jnp.bfloat16)

        def one(out: Any, of: Any) -> tuple[Any, None]:
            e, start, live = of
            number = jnp.arange(used().widths[-1], dtype=jnp.int32)
            row = start + number
            value = product(e, row, pairs[0])
            if launch == "up":
                gate, up = (v.astype(jnp.float32) for v in (value, product(e, row, pairs[1])))
                value = cast(reference.swiglu(gate, up, LIMIT) * weights[row][:, None], jnp.bfloat16)
            return out.at[jnp.where(number < live, row, len(x))].set(value, mode="drop"), None

        return jax.lax.scan(one, jnp.zeros((len(x), wide), jnp.bfloat16), plan[:3])[0]

    def problems(given: tuple[Any, ...], output: Any) -> list[str]:
        x, weights, *rest = given
        expert, start, live, tiles = (np.asarray(v) for v in rest[:4])
        columns = np.asarray(FP4.permute(jnp.arange(inner))).argsort()
        found = []
        for t in oracle64.sample(int(tiles[0]), CHECKED):
            row = slice(int(start[t]), int(start[t] + live[t]))
            rows64 = np.asarray(x[row]).astype(np.float64)[:, columns]
            dense = [oracle64.mxfp4(rest[i][expert[t]], rest[i + 1][expert[t]]) for i in range(4, len(rest), 2)]
            if launch == "up":
                weight = np.asarray(weights[row])[:, None].astype(np.float64)
                expected = _hidden64(rows64, dense[0], dense[1], weight)
            else:
                expected = bfloat16(rows64 @ dense[0].T)
            found += oracle64.rows_off(f"tile {t}", range(len(expected)), output[row], expected, TOLERANCE)
        return found

    matrices = 2 if launch == "up" else 1
    touched = min(busy, total) * matrices * wide * inner * 17 / 32
    nbytes = touched + 2.0 * total * (inner + wide)
    return Case(
        name=name,
        inputs=lambda seed: draw(jax.random.key(seed)),
        kernel=run,
        reference=plain,
        problems=problems,
        flops=2.0 * total * matrices * wide * inner,
        nbytes=nbytes,
    )


def _whole(
    name: str,
    *,
    tokens: int,
    experts: int,
    per_token: int,
    wide: int,
    inner: int,
    idle: int = 0,
    tile: Tile | None = None,
) -> Case:
    """The operation, routing included; the last `idle` experts get no token."""

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 6)
        scores = jax.random.uniform(keys[0], (tokens, experts - idle))
        ids = jnp.sort(jnp.argsort(scores, axis=-1)[:, :per_token].astype(jnp.int32), axis=-1)
        weights = jax.random.uniform(keys[1], (tokens, per_token), jnp.float32)
        x = jax.random.normal(keys[2], (tokens, inner), jnp.bfloat16)
        shapes = (experts, wide, inner), (experts, inner, wide), (experts, wide, inner)
        pairs = (_weight(k, shape) for k, shape in zip(keys[3:], shapes, strict=True))
        return (x, ids, weights, *(array for pair in pairs for array in pair))

    def run(function: Any, x: Any, ids: Any, weights: Any, *w: Any, **options: Any) -> Any:
        pairs = w[:2], w[2:4], w[4:]
        return function(x, ids, weights, *pairs, limit=LIMIT, round_input=round_fp8, **options)

    def problems(given: tuple[Any, ...], output: Any) -> list[str]:
        x, ids, weights, *w = given
        found = []
        for t in oracle64.sample(tokens, CHECKED):
            row = _quantize64(np.asarray(x[t]).astype(np.float64))
            expected: Any = 0
            for e, p in zip(np.asarray(ids[t]), np.asarray(weights[t]).astype(np.float64), strict=True):
                w1, w2, w3 = (oracle64.mxfp4(w[i][e], w[i + 1][e]) for i in (0, 2, 4))
                expected += bfloat16(_quantize64(_hidden64(row, w1, w3, p)) @ w2.T)
            found += oracle64.rows_off("out", [t], output[t], expected[None], TOLERANCE)
        return found

    rows = tokens * per_token
    busy = experts * (1 - (1 - per_token / experts) ** tokens)
    nbytes = busy * 3 * wide * inner * 17 / 32 + 6.0 * tokens * inner
    return Case(
        name=name,
        inputs=lambda seed: draw(jax.random.key(seed)),
        kernel=partial(run, kernel.experts, tile=tile),
        reference=partial(run, reference.experts),
        problems=problems,
        flops=6.0 * rows * wide * inner,
        nbytes=nbytes,
    )


_TINY = Tile(widths=(8,), warpgroups=1, chunks=1, stages=2, blocks=1)
SMALL = (
    _grouped(
        "w1 and w3, an empty and a ragged group",
        "up",
        experts=3,
        busy=2,
        rows=13,
        wide=128,
        inner=512,
        tile=replace(_TINY, widths=(8, 16), chunks=2),
    ),
    _grouped(
        "w2, ragged groups",
        "down",
        experts=3,
        busy=3,
        rows=20,
        wide=256,
        inner=256,
        tile=replace(_TINY, warpgroups=2, blocks=2),
    ),
    _whole("one token", tokens=1, experts=4, per_token=2, wide=128, inner=128, tile=_TINY),
    _whole(
        "groups of one row, idle experts", tokens=4, experts=8, per_token=2, wide=128, inner=256, idle=3, tile=_TINY
    ),
)
_up = partial(_grouped, launch="up", experts=384, wide=2304, inner=5120)
_down = partial(_grouped, launch="down", experts=384, wide=5120, inner=2304)
_experts = partial(_whole, experts=384, per_token=6, wide=2304, inner=5120)
MODEL = (
    _up("w1 and w3, 243 experts x 16 rows", busy=243, rows=16),
    _down("w2, 243 experts x 16 rows", busy=243, rows=16),
    _up("w1 and w3, 65536 rows", busy=384, rows=65536),
    _down("w2, 65536 rows", busy=384, rows=65536),
    _experts("experts, T = 1", tokens=1),
    _experts("experts, T = 64", tokens=64),
    _experts("experts, T = 8192", tokens=8192),
)
