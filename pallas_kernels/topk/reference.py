"""The C best of a row, with every tie decided: a sort in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

DEAD = jnp.iinfo(jnp.int32).max


def topk(scores: Float32[Array, "*lead S"], count: int) -> Int32[Array, "*lead {count}"]:
    width = scores.shape[-1]
    kept = min(count, width)
    # NaN must lose and -0 must tie with +0; lax.top_k ranks NaN first and +0 above -0.
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0.0, scores))
    best, ids = jax.lax.top_k(ranked, kept)
    ids = jnp.sort(jnp.where(best > -jnp.inf, ids, DEAD), axis=-1)
    ids = jnp.where(ids == DEAD, -1, ids)
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, count - kept)], constant_values=-1)
