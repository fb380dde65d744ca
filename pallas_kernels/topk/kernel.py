"""Selection from rows of scores: their maxima in one launch, then `selection`, which says why and how.

**Why.** Rows whose maxima nobody has written are read once for them; rows of few entries need none. **Numerics.**
Maxima of what is live, NaN as -inf. **Tiling.** A program takes `span` entries of one row; past its length, nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from pallas_kernels.target import choose_tile
from pallas_kernels.topk.selection import FACTOR, TILES, Tile, depth, refine


def _maxima(x_ref, length_ref, fine_ref, coarse_ref, *, size: int, span: int) -> None:
    first = pl.program_id(1) * span

    @pl.when(first < length_ref[0])
    def _():
        at = lax.broadcasted_iota(jnp.int32, (span,), 0)
        live = first + at < jnp.minimum(length_ref[0], size)
        low = jnp.asarray(-jnp.inf, x_ref.dtype)
        x = plt.load(x_ref.at[...], mask=live, other=low)
        fine = jnp.max(jnp.where(x != x, low, x).reshape(-1, FACTOR), axis=1)
        coarse = jnp.max(fine.reshape(-1, FACTOR), axis=1)
        for ref, value, chunk in ((fine_ref, fine, FACTOR), (coarse_ref, coarse, FACTOR**2)):
            number = first // chunk + lax.broadcasted_iota(jnp.int32, value.shape, 0)
            plt.store(ref.at[...], value, mask=number < size // chunk)


def maxima(
    x: Float[Array, "R S"], lengths: Int32[Array, " R"], *, tile: Tile, interpret: bool = False
) -> tuple[Float[Array, "R S//8"], Float[Array, "R S//64"]]:
    """Maxima of chunks of 8 and of 64 of the first `lengths` entries; chunks past them are left as they are."""
    rows, size = x.shape
    span = tile.span
    outs = [pl.BlockSpec((None, span // n), lambda r, j: (r, j)) for n in (8, 64)]
    return pl.pallas_call(
        functools.partial(_maxima, size=size, span=span),
        grid=(rows, pl.cdiv(size, span)),
        in_specs=[pl.BlockSpec((None, span), lambda r, j: (r, j)), pl.BlockSpec((1,), lambda r, j: (r,))],
        out_specs=outs,
        out_shape=[jax.ShapeDtypeStruct((rows, size // n), x.dtype) for n in (8, 64)],
        compiler_params=plt.CompilerParams(num_warps=tile.span_warps, num_stages=1),
        interpret=interpret,
        name="topk_maxima",
    )(x, lengths)


def topk(
    scores: Float[Array, "*lead S"],
    count: int,
    lengths: Int32[Array, "*lead"] | None = None,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Int32[Array, "*lead {count}"]:
    """The kernels behind the public function; entries at and past `lengths` are not read."""
    tile = tile or choose_tile(TILES)
    *lead, size = scores.shape
    rows = int(np.prod(lead))
    levels = depth(size, count)
    short = -size % FACTOR**levels
    if short:  # whole chunks: a copy that rows of a multiple of 64 do not pay
        scores = jnp.pad(scores, [(0, 0)] * len(lead) + [(0, short)], constant_values=-jnp.inf)
    x = scores.reshape(rows, size + short)
    length = jnp.full((rows,), size, jnp.int32) if lengths is None else lengths.reshape(rows)
    every = (x,) if levels == 0 else (x, *maxima(x, length, tile=tile, interpret=interpret)[:levels])
    return refine(every, length, count=count, tile=tile, interpret=interpret).reshape(*lead, count)
