"""A dense FP8 layer in plain jnp: dequantize the matrix, multiply, round once.

y = x W^T        W[i, j] = weight[i, j] * scale[i // 32, j // 32]

`block_diagonal`: row block g of W multiplies group g of x alone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.formats import cast, dequantize_fp8


def block_linear(
    x: Float[Array, "*lead K"], weight: Float[Array, "N K"], scale: Shaped[Array, "n k"]
) -> Float[Array, "*lead N"]:
    return _product(x, dequantize_fp8(weight, scale, x.dtype))


def block_diagonal(
    x: Float[Array, "*lead G K"], weight: Float[Array, "GN K"], scale: Shaped[Array, "n k"]
) -> Float[Array, "*lead G N"]:
    groups = x.shape[-2]
    blocks = dequantize_fp8(weight, scale, x.dtype).reshape(groups, -1, x.shape[-1])
    return jnp.stack([_product(x[..., g, :], blocks[g]) for g in range(groups)], axis=-2)


def _product(x: Array, dense: Array) -> Array:
    y = jnp.einsum("...k,nk->...n", x, dense, precision="highest", preferred_element_type=jnp.float32)
    return cast(y, x.dtype)
