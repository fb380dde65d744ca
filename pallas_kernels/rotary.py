"""Rotary embedding of adjacent pairs: channels (2i, 2i+1) of the last R turn by position * f_i, in float32."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.formats import cast


def rotate(
    x: Float[Array, "B T *heads H"],
    positions: Int32[Array, "B T"],
    freqs: Float32[np.ndarray, " pairs"] | Float32[Array, " pairs"],
    *,
    inverse: bool = False,
) -> Float[Array, "B T *heads H"]:
    """Rotate the last R channels of x by its positions' angles (back, with `inverse`); x's dtype is kept."""
    rotary = 2 * freqs.shape[0]
    angles = positions.astype(jnp.float32)[..., None] * freqs
    angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), rotary // 2)
    cos, sin = jnp.cos(angles), jnp.sin(-angles if inverse else angles)
    still, turning = x[..., :-rotary], x[..., -rotary:].astype(jnp.float32)
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([still, cast(turned.reshape(*x.shape[:-1], rotary), x.dtype)], axis=-1)
