"""Root-mean-square norm in float32, rounded once: x * rsqrt(mean(x^2) + eps) * weight."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.formats import cast


def rmsnorm(
    x: Float[Array, "*lead K"], weight: Float[Array, " K"], *, eps: float, dtype: DTypeLike
) -> Float[Array, "*lead K"]:
    """Normalize the last axis. eps has no default: 1e-20 in the text model, 1e-6 in the vision tower."""
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return cast(weight.astype(jnp.float32) * normed, dtype)
