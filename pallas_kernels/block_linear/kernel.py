"""A dense FP8 layer in one launch that reads the matrix once, as stored.

**Why.** With few rows of x a layer is the bytes of its matrix. XLA dequantizes it to bfloat16 in memory first, five
times the bytes: 109 us for 1280 -> 32768 with 64 rows on an H200, where the floor is 10.

**Numerics.** E4M3 times a power of two is exact in bfloat16; products and sums are float32, rounded once. With `splits`
the columns are summed in parts, and those in ascending order. E4M3 NaN codes read as 480.

**Tiling.** `hopper.stream`, whose experts are the row blocks of `block_diagonal`, one of a whole matrix: a block of
threads takes 256 rows of the matrix, 128 for each multiplying warpgroup, and all rows of x up to the tile's width. A
matrix of fewer rows than `blocks` x 256 would leave multiprocessors idle, so its columns are split, and XLA adds the
parts. Many rows of x: neighbouring blocks of threads share rows of the matrix and take turns over x.

Backend: Mosaic GPU, for the reasons in `stream`. FP8 operands of `wgmma` are not taken: x would have to be FP8 too, a
scale per 32 columns would leave one instruction to each float32 accumulator, and few rows are bytes anyway.

No gradient: the reference has one.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels import BackendError
from pallas_kernels.hopper.fragments import CHUNK, FP8, ROWS
from pallas_kernels.hopper.stream import Plan, Tile, stream
from pallas_kernels.target import choose_tile, multiprocessors


@dataclass(frozen=True)
class Tiles:
    """`few` serves up to its last width of rows of x, taking the least width that holds them; `many` the rest."""

    few: Tile
    many: Tile


H200 = Tiles(
    few=Tile(widths=(16, 32, 64), chunks=1, stages=4),
    many=Tile(widths=(128,), chunks=1, stages=3),
)
B300 = Tiles(
    few=Tile(widths=(16, 32, 64), chunks=1, stages=4, wgmma=False, blocks=multiprocessors("sm_103")),
    many=Tile(widths=(64,), chunks=1, stages=4, wgmma=False, blocks=multiprocessors("sm_103")),
)


def splits_of(rows: int, columns: int, tile: Tile) -> int:
    """Parts of the columns: as many as give each block of threads at most one item, of two steps at least."""
    steps = columns // (CHUNK * tile.chunks)
    limit = min(tile.blocks // (rows // (2 * ROWS * tile.warpgroups)), steps // 2)
    each = -(-steps // max(limit, 1))
    return -(-steps // each)


def block_linear(
    x: Float[Array, "*lead K"],
    weight: Float[Array, "N K"],
    scale: Shaped[Array, "n k"],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "*lead N"]:
    """See `pallas_kernels.block_linear.block_linear`."""
    return block_diagonal(x[..., None, :], weight, scale, tile=tile, interpret=interpret)[..., 0, :]


@partial(jax.jit, static_argnames=("tile", "interpret"))  # a model traces it once a shape
def block_diagonal(
    x: Float[Array, "*lead G K"],
    weight: Float[Array, "GN K"],
    scale: Shaped[Array, "n k"],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "*lead G N"]:
    """See `pallas_kernels.block_linear.block_diagonal`."""
    *lead, groups, columns = x.shape
    tokens, rows = prod(lead), weight.shape[0] // groups
    tiles = choose_tile({"sm_90": H200, "sm_103": B300})
    tile = tile or (tiles.few if tokens <= tiles.few.widths[-1] else tiles.many)
    _check(x, rows, columns, tile)
    if tokens == 0:
        return jnp.zeros((*lead, groups, rows), x.dtype)
    width = next((w for w in tile.widths if w >= tokens), tile.widths[-1])
    count = -(-tokens // width)
    of_group = jnp.swapaxes(x.reshape(tokens, groups, columns), 0, 1)
    splits = splits_of(groups * rows, columns, tile) if count == 1 else 1
    part = splits * CHUNK * tile.chunks
    flat = jnp.pad(of_group, ((0, 0), (0, count * width - tokens), (0, -columns % part)))
    flat = flat.reshape(groups * count * width, -1)
    number = jnp.arange(groups * count, dtype=jnp.int32)
    live = jnp.minimum(tokens - number % count * width, width)
    plan = Plan(number // count, number * width, live, jnp.full(1, groups * count, jnp.int32))
    codes = jax.lax.bitcast_convert_type(weight, jnp.uint8)
    scales = scale if scale.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scale, jnp.uint8)
    y = stream(
        FP8.permute(flat),
        (codes.reshape(groups, rows, columns), scales.reshape(groups, -1, scales.shape[1])),
        None,
        plan,
        form=FP8,
        tile=replace(tile, widths=(width,)),
        dtype=jnp.bfloat16 if splits == 1 else jnp.float32,
        splits=splits,
        tokens_inner=True,
        interpret=interpret,
    )
    if splits > 1:
        y = y.reshape(splits, -1, rows).sum(axis=0).astype(x.dtype)
    y = y.reshape(groups, -1, rows)[:, :tokens]
    return jnp.swapaxes(y, 0, 1).reshape(*lead, groups, rows)


def _check(x: Array, rows: int, columns: int, tile: Tile) -> None:
    """Raise where the kernel does not fit: its rules, and the value received."""
    span = 2 * ROWS * tile.warpgroups
    if x.dtype != jnp.bfloat16:
        raise BackendError(f"backend 'pallas': block_linear takes bfloat16 x, not {x.dtype}")
    if rows % span or columns % (CHUNK * tile.chunks):
        rule = f"is not in multiples of {span} x {CHUNK * tile.chunks}"
        raise BackendError(f"backend 'pallas': block_linear: a matrix of {rows} x {columns} {rule}")
