"""Layouts and loops of the programs of a Mosaic GPU kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

# One number for each row, or for each column, of a tensor core's accumulator.
ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def swizzled(columns: int = 64, dtype: DTypeLike = jnp.bfloat16) -> tuple[Any, ...]:
    """Shared memory as the tensor core and the copy engine want it: 8 rows of `columns`, at most 128 bytes."""
    tiling: Any = plgpu.TilingTransform  # abstract, as its annotations have it
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(columns * jnp.dtype(dtype).itemsize)


def repeat(count: Any, body: Callable[[Any], None], first: Any = 0) -> None:
    """body(first), ..., body(count - 1), one after the other."""

    def one(i: jax.Array, _: Any) -> int:
        body(i)
        return 0

    lax.fori_loop(first, count, one, 0)
