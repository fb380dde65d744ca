"""The norm as a module: weight and eps of `pallas_kernels.norm.rmsnorm` (config rms_norm_eps)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv41_jax.nn.linear import parameter
from dsv41_jax.numerics import Numerics
from pallas_kernels.norm import rmsnorm


class RMSNorm(nnx.Module):
    def __init__(self, width: int, eps: float, axis: str = "width"):
        self.weight = parameter((width,), jnp.bfloat16, (axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead K"], num: Numerics) -> Float[Array, "*lead K"]:
        return rmsnorm(x, self.weight[...], eps=self.eps, dtype=num.dtype)
