"""Single-pass hyper-connections: coefficients, collapse and residual update of one site (paper 2.4.1)."""

from functools import partial

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels.mhc import kernel, reference
from pallas_kernels.mhc.kernel import join_fn, split_fn
from pallas_kernels.mhc.mixes import Sizes
from pallas_kernels.target import use_kernel

__all__ = ["coefficients", "collapse", "join_fn", "site", "split_fn", "update"]


def coefficients(
    x: Float[Array, "*lead M D"],
    fn: Float[Array, "rows hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
    backend: str = "xla",
) -> tuple[Float32[jax.Array, "*lead M"], Float32[jax.Array, "*lead M"], Float32[jax.Array, "*lead M M"]]:
    """(pre, post, comb) of a site from the residual streams X before it; `reference.py` has the equations.

    `fn` is float32 [2M + M*M, M*D], or `split_fn` of it, which a kernel makes in each call that it is not given it.
    `pre` collapses the streams for the next site, `post` and `comb` update this one's. Everything is float32, whatever
    X is. The kernel takes bfloat16 streams. Source: paper 2.4.1; config keys hc_mult, hc_sinkhorn_iters, hc_eps.
    """
    sizes = Sizes(iterations, eps, hc_eps)
    if use_kernel("mhc.coefficients", backend):
        return _coefficients(sizes, x, fn, scale, base)
    return reference.coefficients(x, join_fn(fn), scale, base, **sizes._asdict())


def collapse(x: Float[Array, "*lead M D"], pre: Float32[Array, "*lead M"]) -> Float32[jax.Array, "*lead D"]:
    """sum_m pre[m] X[m], in float32: what a sublayer reads, before its norm.

    It has no kernel and no backend: one fusion of XLA, at the byte floor. With a sublayer's update before it, call
    `site`.
    """
    return reference.collapse(x, pre)


def update(
    x: Float[Array, "*lead M D"],
    y: Float[Array, "*lead D"],
    post: Float32[Array, "*lead M"],
    comb: Float32[Array, "*lead M M"],
) -> Float32[jax.Array, "*lead M D"]:
    """X'_j = post_j y + sum_i comb[i, j] X_i, in float32. comb's FIRST index is the source stream.

    It has no kernel and no backend: one fusion of XLA, at the byte floor. With the next sublayer's norm after it, call
    `site`.
    """
    return reference.update(x, y, post, comb)


def site(
    x: Float[Array, "*lead M D"],
    y: Float[Array, "*lead D"],
    post: Float32[Array, "*lead M"],
    comb: Float32[Array, "*lead M M"],
    mix: Float32[Array, "*lead M"],
    norm: Float[Array, " D"],
    fn: Float[Array, "rows hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
    backend: str = "xla",
) -> tuple[
    Float[jax.Array, "*lead M D"],
    Float[jax.Array, "*lead D"],
    Float32[jax.Array, "*lead M"],
    Float32[jax.Array, "*lead M"],
    Float32[jax.Array, "*lead M M"],
]:
    """(X', the next sublayer's input, and its site's pre, post, comb): all that stands between two sublayers.

        X'   = update(X, y, post, comb)                       y, post, comb of the sublayer that just ran
        read = rmsnorm(collapse(X', mix)) * norm              mix is that sublayer's own pre; norm the next one's weight
        (pre, post, comb) = coefficients(X'; fn, scale, base) of the next sublayer's site

    X' and the collapse are rounded to X's dtype before they are read, as in the model, and `site` equals `update`,
    `collapse`, the norm and `coefficients` in turn. Where something changes the streams between two sublayers (Engram),
    it does not apply. The kernel takes bfloat16 streams, y and norm, widths in multiples of 1024, and differentiates
    by recomputing through the reference. Source: paper 2.4.1.
    """
    sizes = Sizes(iterations, eps, hc_eps)
    if use_kernel("mhc.site", backend):
        return _site(sizes, x, y, post, comb, mix, norm, fn, scale, base)
    return reference.site(x, y, post, comb, mix, norm, join_fn(fn), scale, base, **sizes._asdict())


def _recomputed(run, plain):
    """`run(*arrays, **sizes)` with the gradient of `plain`, recomputed from the arrays."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(sizes, *arrays):
        return run(*arrays, **sizes._asdict())

    def backward(sizes, arrays, cotangents):
        def recompute(*arrays):
            *given, fn, scale, base = arrays
            return plain(*given, join_fn(fn), scale, base, **sizes._asdict())

        return jax.vjp(recompute, *arrays)[1](cotangents)

    function.defvjp(lambda sizes, *arrays: (run(*arrays, **sizes._asdict()), arrays), backward)
    return function


_site = _recomputed(kernel.site, reference.site)
_coefficients = _recomputed(kernel.coefficients, reference.coefficients)
