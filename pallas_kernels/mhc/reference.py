"""Single-pass manifold-constrained hyper-connections in plain jnp, float32 throughout.

z    = flat(X);  m = (z fn^T) * rsqrt(mean(z^2) + eps)                   2M + M*M numbers a site
pre  = sigmoid(m_pre * scale[0] + base_pre) + hc_eps                     collapses X for the NEXT site
post = 2 sigmoid(m_post * scale[1] + base_post)
comb = Sinkhorn(m_comb * scale[2] + base_comb)                           comb[source stream, target stream]
X'_j = post_j y + sum_i comb[i, j] X_i

`site` is what stands between two sublayers, with the roundings of the model: X' and what the next sublayer reads are
rounded to X's dtype, and everything after reads the rounded values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.formats import cast
from pallas_kernels.norm import rmsnorm


def sinkhorn(logits: Float32[Array, "*lead M M"], *, iterations: int, eps: float) -> Float32[Array, "*lead M M"]:
    comb = jax.nn.softmax(logits, axis=-1) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)

    def normalize(_: Array, comb: Array) -> Array:
        comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        return comb / (comb.sum(axis=-2, keepdims=True) + eps)

    # A loop and not an unrolled chain: it compiles in a third of the time.
    return jax.lax.fori_loop(0, iterations - 1, normalize, comb)


def split_coefficients(
    mixes: Float32[Array, "*lead coefficients"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    streams: int,
    iterations: int,
    hc_eps: float,
) -> tuple[Float32[Array, "*lead M"], Float32[Array, "*lead M"], Float32[Array, "*lead M M"]]:
    m = streams
    pre = jax.nn.sigmoid(mixes[..., :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * jax.nn.sigmoid(mixes[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (mixes[..., 2 * m :] * scale[2] + base[2 * m :]).reshape(*mixes.shape[:-1], m, m)
    return pre, post, sinkhorn(logits, iterations=iterations, eps=hc_eps)


def coefficients(
    x: Float[Array, "*lead M D"],
    fn: Float32[Array, "coefficients hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[Float32[Array, "*lead M"], Float32[Array, "*lead M"], Float32[Array, "*lead M M"]]:
    streams = x.shape[-2]
    z = x.astype(jnp.float32).reshape(*x.shape[:-2], -1)
    mixes = jnp.einsum("...k,ck->...c", z, fn, precision="highest")
    mixes = mixes * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)
    return split_coefficients(mixes, scale, base, streams=streams, iterations=iterations, hc_eps=hc_eps)


def collapse(x: Float[Array, "*lead M D"], pre: Float32[Array, "*lead M"]) -> Float32[Array, "*lead D"]:
    return jnp.sum(pre[..., None] * x.astype(jnp.float32), axis=-2)


def update(
    x: Float[Array, "*lead M D"],
    y: Float[Array, "*lead D"],
    post: Float32[Array, "*lead M"],
    comb: Float32[Array, "*lead M M"],
) -> Float32[Array, "*lead M D"]:
    mixed = jnp.sum(comb[..., None] * x.astype(jnp.float32)[..., None, :], axis=-3)
    return post[..., None] * y.astype(jnp.float32)[..., None, :] + mixed


def site(
    x: Float[Array, "*lead M D"],
    y: Float[Array, "*lead D"],
    post: Float32[Array, "*lead M"],
    comb: Float32[Array, "*lead M M"],
    mix: Float32[Array, "*lead M"],
    norm: Float[Array, " D"],
    fn: Float32[Array, "coefficients hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[
    Float[Array, "*lead M D"],
    Float[Array, "*lead D"],
    Float32[Array, "*lead M"],
    Float32[Array, "*lead M"],
    Float32[Array, "*lead M M"],
]:
    new = cast(update(x, y, post, comb), x.dtype)
    read = rmsnorm(cast(collapse(new, mix), x.dtype), norm, eps=eps, dtype=x.dtype)
    return new, read, *coefficients(new, fn, scale, base, iterations=iterations, eps=eps, hc_eps=hc_eps)
