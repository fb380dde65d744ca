"""Named shapes of the dense FP8 layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import oracle64
from pallas_kernels.block_linear import kernel, reference
from pallas_kernels.case import Case
from pallas_kernels.formats import GROUP
from pallas_kernels.hopper.stream import Tile

CHECKED = 64  # rows of x of a large case
TOLERANCE = 2.0**-8  # of a row's norm: rounding to bfloat16 is at most half of it


def case(name: str, *, tokens: int, columns: int, rows: int, groups: int = 0, tile: Tile | None = None) -> Case:
    """x [tokens, columns], a matrix of `rows` x `columns`; or x [tokens, groups, columns], so many such matrices."""
    middle, blocks = 124 - columns.bit_length() // 2, max(groups, 1)
    function = "block_diagonal" if groups else "block_linear"

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (tokens, *[groups] * bool(groups), columns), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (blocks * rows, columns), jnp.bfloat16).astype(jnp.float8_e4m3fn)
        scale = jax.random.randint(keys[2], (blocks * -(-rows // GROUP), -(-columns // GROUP)), middle, middle + 4)
        return x, weight, scale.astype(jnp.uint8)

    def problems(given: tuple[Any, ...], output: Any) -> list[str]:
        x, weight, scale = (np.asarray(v) for v in given)
        some = oracle64.sample(tokens, CHECKED)
        matrices = oracle64.fp8_blocks(weight, scale).reshape(blocks, rows, columns)
        each = x[some].astype(np.float64).reshape(len(some), blocks, columns)
        expected = np.concatenate([each[:, g] @ matrix.T for g, matrix in enumerate(matrices)], axis=1)
        return oracle64.rows_off("y", some, np.asarray(output)[some], expected, TOLERANCE)

    nbytes = blocks * (rows * columns + 2.0 * tokens * (rows + columns))
    return Case(
        name=name,
        inputs=lambda seed: draw(jax.random.key(seed)),
        kernel=partial(getattr(kernel, function), tile=tile),
        reference=getattr(reference, function),
        problems=problems,
        flops=2.0 * tokens * blocks * rows * columns,
        nbytes=nbytes,
    )


_TINY = Tile(widths=(8, 16), warpgroups=1, chunks=1, stages=2, blocks=2)
SMALL = (
    case("one row", tokens=1, columns=128, rows=128, tile=_TINY),
    case("columns split", tokens=5, columns=512, rows=128, tile=_TINY),
    case("columns split unevenly", tokens=5, columns=640, rows=128, tile=replace(_TINY, blocks=3)),
    case("rows past a tile", tokens=37, columns=256, rows=256, tile=_TINY),
    case("row blocks", tokens=5, columns=256, rows=128, groups=3, tile=_TINY),
    case("row blocks, rows past a tile", tokens=21, columns=128, rows=128, groups=2, tile=_TINY),
)
MODEL = (
    case("1280 -> 32768, 64 rows", tokens=64, columns=1280, rows=32768),
    case("1280 -> 32768, 1 row", tokens=1, columns=1280, rows=32768),
    case("1280 -> 32768, 256 rows", tokens=256, columns=1280, rows=32768),
    case("5120 -> 1280, 64 rows", tokens=64, columns=5120, rows=1280),
    case("5120 -> 2304, 64 rows", tokens=64, columns=5120, rows=2304),
    case("2304 -> 5120, 64 rows", tokens=64, columns=2304, rows=5120),
    case("8192 -> 5120, 1 row", tokens=1, columns=8192, rows=5120),
    case("1280 -> 32768, 8192 rows", tokens=8192, columns=1280, rows=32768),
    case("8 blocks of 4096 -> 1024, 1 row", tokens=1, columns=4096, rows=1024, groups=8),
    case("8 blocks of 4096 -> 1024, 64 rows", tokens=64, columns=4096, rows=1024, groups=8),
)
