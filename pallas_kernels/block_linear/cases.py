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
from pallas_kernels.grouped_matmul.stream import Tile

CHECKED = 64  # rows of x of a large case
TOLERANCE = 2.0**-8  # of a row's norm: rounding to bfloat16 is at most half of it


def _case(name: str, tokens: int, columns: int, rows: int, tile: Tile | None = None, groups: int = 0) -> Case:
    """x [tokens, columns], a matrix of `rows` x `columns`; or x [tokens, groups, columns], so many such matrices."""
    middle, blocks = 124 - columns.bit_length() // 2, max(groups, 1)
    function = "block_diagonal" if groups else "block_linear"

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (tokens, *[groups] * bool(groups), columns), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (blocks * rows, columns), jnp.bfloat16).astype(jnp.float8_e4m3fn)
        scale = jax.random.randint(keys[2], (blocks * -(-rows // 32), -(-columns // 32)), middle, middle + 4)
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
        name,
        lambda seed: draw(jax.random.key(seed)),
        partial(getattr(kernel, function), tile=tile),
        getattr(reference, function),
        problems,
        2.0 * tokens * blocks * rows * columns,
        nbytes,
    )


_TINY = Tile((8, 16), warpgroups=1, chunks=1, stages=2, blocks=2)
SMALL = (
    _case("one row", 1, 128, 128, _TINY),
    _case("columns split", 5, 512, 128, _TINY),
    _case("columns split unevenly", 5, 640, 128, replace(_TINY, blocks=3)),
    _case("rows past a tile", 37, 256, 256, _TINY),
    _case("row blocks", 5, 256, 128, _TINY, 3),
    _case("row blocks, rows past a tile", 21, 128, 128, _TINY, 2),
)
MODEL = (
    _case("1280 -> 32768, 64 rows", 64, 1280, 32768),
    _case("1280 -> 32768, 1 row", 1, 1280, 32768),
    _case("1280 -> 32768, 256 rows", 256, 1280, 32768),
    _case("5120 -> 1280, 64 rows", 64, 5120, 1280),
    _case("5120 -> 2304, 64 rows", 64, 5120, 2304),
    _case("2304 -> 5120, 64 rows", 64, 2304, 5120),
    _case("8192 -> 5120, 1 row", 1, 8192, 5120),
    _case("1280 -> 32768, 8192 rows", 8192, 1280, 32768),
    _case("8 blocks of 4096 -> 1024, 1 row", 1, 4096, 1024, groups=8),
    _case("8 blocks of 4096 -> 1024, 64 rows", 64, 4096, 1024, groups=8),
)
