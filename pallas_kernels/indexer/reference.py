"""Index scores in plain jnp: every query against every key it is given."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.formats import cast


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B #T S J"], weights: Float[Array, "B T I"]
) -> Float32[Array, "B T S"]:
    keys = jnp.broadcast_to(keys, (keys.shape[0], q.shape[1], *keys.shape[2:]))
    dot = jnp.einsum("btij,btsj->btis", q, keys, precision="highest", preferred_element_type=jnp.float32)
    hit = jax.nn.relu(cast(dot, q.dtype).astype(jnp.float32)) * weights.astype(jnp.float32)[..., None]
    total = cast(hit, q.dtype).astype(jnp.float32).sum(axis=2)
    return cast(total, q.dtype).astype(jnp.float32)
