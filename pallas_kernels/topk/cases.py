"""Shapes of the selection, and the ids that a sort chooses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.oracle64 import sample
from pallas_kernels.topk import kernel, reference, selection

TINY = selection.Tile(span=512)
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan, 3.0e38)


def inputs(seed: int, rows: int, entries: int, dtype: Any, whole: bool) -> tuple[jax.Array, jax.Array]:
    """Normal scores; of the first row two bits a value (ties, zeros of both signs) and special values; a row of equal
    ones; lengths from 0 on unless rows are whole."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (rows, entries))
    x = x.at[0].set(jnp.round(2 * x[0]) / 2).at[-1].set(-1.5)
    lengths = jnp.full((rows,), entries, jnp.int32)
    if not whole:
        x = x.at[0, : len(SPECIAL)].set(jnp.array(SPECIAL))
        lengths = jax.random.randint(keys[1], (rows,), 1, entries + 1).at[:3].set(jnp.array([entries, 0, 3])[:rows])
    return x.astype(dtype), lengths


def best(row: np.ndarray, count: int) -> np.ndarray:
    """The rule by a stable sort: highest first, then the lower id; NaN and -inf never; ids ascend, -1 fills."""
    order = np.argsort(np.where(np.isnan(row) | (row == -np.inf), np.inf, -row), kind="stable")
    live = np.sum(~np.isnan(row) & (row > -np.inf))
    chosen = np.sort(order[: min(count, live)])
    return np.concatenate([chosen, np.full(count - len(chosen), -1)]).astype(np.int32)


def problems(given: tuple[Any, ...], output: Any, *, count: int) -> list[str]:
    """Rows whose ids are not those of a sort."""
    x, lengths = np.asarray(given[0]).astype(np.float64), np.asarray(given[1])
    some = sample(len(x), 16)
    wrong = [r for r in some if not np.array_equal(np.asarray(output)[r], best(x[r, : lengths[r]], count))]
    return [f"rows {wrong} of {len(x)} differ from a sort"] if wrong else []


def case(name: str, *, rows: int, entries: int, count: int, dtype: Any = jnp.float32, whole: bool = True) -> Case:
    """`count` of each row; unless they are `whole`, rows end early and have special values."""
    return Case(
        name=name,
        inputs=lambda seed: inputs(seed, rows, entries, dtype, whole),
        kernel=lambda x, n, tile=None, interpret=False: kernel.topk(x, count, n, tile=tile, interpret=interpret),
        reference=lambda x, n: reference.topk(x, count, n),
        problems=partial(problems, count=count),
        nbytes=1.0 * rows * (entries * jnp.dtype(dtype).itemsize + 4 * count),
    )


SMALL = (
    case("one step, uneven", rows=4, entries=300, count=12, whole=False),
    case("fewer than asked", rows=3, entries=9, count=12, whole=False),
    case("one level of maxima", rows=4, entries=4203, count=12, whole=False),
    case("two levels of maxima, bf16", rows=4, entries=33000, count=12, dtype=jnp.bfloat16, whole=False),
)
MODEL = (
    case("512 of 64 x 131072", rows=64, entries=131072, count=512),
    case("512 of 1 x 1M", rows=1, entries=1 << 20, count=512),
    case("512 of 64 x 16384", rows=64, entries=16384, count=512),
    case("2048 of 8 x 131072", rows=8, entries=131072, count=2048),
    case("2048 of 1 x 1M, bf16", rows=1, entries=1 << 20, count=2048, dtype=jnp.bfloat16),
)
