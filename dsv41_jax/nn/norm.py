"""The norm as a module: the weight of `pallas_kernels.norm.rmsnorm`."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv41_jax.nn.linear import parameter
from dsv41_jax.numerics import Numerics
from pallas_kernels.norm import rmsnorm


class RMSNorm(nnx.Module):
    """`weight` [K]; eps comes with the call: config key `rms_norm_eps`, and 1e-6 in the vision tower."""

    def __init__(self, width: int, axis: str = "width"):
        self.weight = parameter((width,), jnp.bfloat16, (axis,))

    def __call__(self, x: Float[Array, "*lead K"], eps: float, numerics: Numerics) -> Float[Array, "*lead K"]:
        return rmsnorm(x, self.weight[...], eps=eps, dtype=numerics.dtype)
