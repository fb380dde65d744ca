"""Whether a kernel's outputs are right, and the same bits on every run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case


def poison(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """A buffer of NaN, or of -1 (255) where there is none: no kernel writes either by accident."""
    value = jnp.nan if jnp.issubdtype(shape.dtype, jnp.inexact) else -1
    return jnp.full(shape.shape, value, jnp.int32 if value == -1 else shape.dtype).astype(shape.dtype)


@jax.jit
def identical(a: Any, b: Any) -> jax.Array:
    """Whether two trees of arrays have the same bits, NaN included."""

    def bits(x: jax.Array) -> jax.Array:
        return x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return jnp.stack([(bits(x) == bits(y)).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]).all()


def check(case: Case, inputs: tuple[Any, ...], repeats: int = 20) -> dict[str, Any]:
    """Problems of one run over poisoned outputs, and whether `repeats` more give the same bits."""
    shapes = jax.eval_shape(case.kernel, *inputs)
    # Donated and unused, the poison is where outputs are written; freed, it is where the kernel's scratch comes from.
    run = jax.jit(lambda _, *args: case.kernel(*args), donate_argnums=0, keep_unused=True)

    def once() -> Any:
        for _ in range(3):
            jax.block_until_ready(jax.tree.map(poison, shapes))
        return run(jax.tree.map(poison, shapes), *inputs)

    first = once()
    problems = case.problems(inputs, jax.device_get(first))
    same = all(bool(identical(first, once())) for _ in range(repeats)) if case.repeatable else None
    return {"problems": problems, "repeats_identical": same}
