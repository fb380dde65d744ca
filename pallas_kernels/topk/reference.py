"""The C best of a row, with every tie decided, whole or tile by tile: a running best and a sort in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

DEAD = jnp.iinfo(jnp.int32).max
Best = tuple[Float32[Array, "*lead C"], Int32[Array, "*lead C"]]


def start(lead: tuple[int, ...], count: int) -> Best:
    return jnp.full((*lead, count), -jnp.inf), jnp.full((*lead, count), DEAD, jnp.int32)


def merge(kept: Best, scores: Float32[Array, "*lead S"], ids: Int32[Array, "*lead S"]) -> Best:
    # NaN must lose and -0 must tie with +0; lax.top_k ranks NaN first and +0 above -0.
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, 0.0, scores))
    every = jnp.concatenate([kept[0], ranked], axis=-1)
    # Of equals top_k takes the earlier place, and what was kept has the lower ids: the lower id wins across tiles too.
    best, place = jax.lax.top_k(every, kept[0].shape[-1])
    return best, jnp.take_along_axis(jnp.concatenate([kept[1], ids], axis=-1), place, axis=-1)


def finish(kept: Best) -> Int32[Array, "*lead C"]:
    ids = jnp.sort(jnp.where(kept[0] > -jnp.inf, kept[1], DEAD), axis=-1)
    return jnp.where(ids == DEAD, -1, ids)


def topk(
    scores: Float[Array, "*lead S"], count: int, lengths: Int32[Array, "*lead"] | None = None
) -> Int32[Array, "*lead {count}"]:
    scores = scores.astype(jnp.float32)
    ids = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
    if lengths is not None:
        scores = jnp.where(ids < lengths[..., None], scores, -jnp.inf)
    return finish(merge(start(scores.shape[:-1], count), scores, ids))
