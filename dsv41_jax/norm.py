"""Root-mean-square norm: x * rsqrt(mean(x^2) + eps) * weight, in float32, rounded once (config rms_norm_eps)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv41_jax.linear import parameter
from dsv41_jax.quant import Numerics
from pallas_kernels.formats import cast


def rmsnorm(
    x: Float[Array, "*lead K"], weight: Float[Array, " K"], *, eps: float, dtype: DTypeLike
) -> Float[Array, "*lead K"]:
    """Normalize the last axis. eps has no default: 1e-20 in the text model, 1e-6 in the vision tower."""
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return cast(weight.astype(jnp.float32) * normed, dtype)


class RMSNorm(nnx.Module):
    def __init__(self, width: int, eps: float, axis: str = "width"):
        self.weight = parameter((width,), jnp.bfloat16, (axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead K"], num: Numerics) -> Float[Array, "*lead K"]:
        return rmsnorm(x, self.weight[...], eps=self.eps, dtype=num.dtype)
