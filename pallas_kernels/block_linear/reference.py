"""A dense FP8 layer in plain jnp: dequantize the matrix, multiply, round once.

y = x W^T        W[i, j] = weight[i, j] * scale[i // 32, j // 32]
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.formats import cast, dequantize_fp8


def block_linear(
    x: Float[Array, "*lead K"], weight: Float[Array, "N K"], scale: Shaped[Array, "n k"]
) -> Float[Array, "*lead N"]:
    dense = dequantize_fp8(weight, scale, x.dtype)
    y = jnp.einsum("...k,nk->...n", x, dense, precision="highest", preferred_element_type=jnp.float32)
    return cast(y, x.dtype)
