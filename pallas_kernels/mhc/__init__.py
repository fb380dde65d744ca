"""Single-pass hyper-connections: coefficients, collapse and residual update of one site (paper 2.4.1)."""

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels import require_xla
from pallas_kernels.mhc import reference

__all__ = ["coefficients", "collapse", "update"]


def coefficients(
    x: Float[Array, "*lead M D"],
    fn: Float32[Array, "coefficients hidden"],
    scale: Float32[Array, "3"],
    base: Float32[Array, " coefficients"],
    *,
    iterations: int,
    eps: float,
    hc_eps: float,
    backend: str = "xla",
) -> tuple[Float32[jax.Array, "*lead M"], Float32[jax.Array, "*lead M"], Float32[jax.Array, "*lead M M"]]:
    """(pre, post, comb) of a site from the residual streams X before it; `reference.py` has the equations.

    `fn` is [2M + M*M, M*D]. `pre` collapses the streams for the next site, `post` and `comb` update this one's.
    Everything is float32, whatever X is. Source: paper 2.4.1; config keys hc_mult, hc_sinkhorn_iters, hc_eps.
    """
    require_xla("mhc.coefficients", backend)
    return reference.coefficients(x, fn, scale, base, iterations=iterations, eps=eps, hc_eps=hc_eps)


def collapse(
    x: Float[Array, "*lead M D"], pre: Float32[Array, "*lead M"], *, backend: str = "xla"
) -> Float32[jax.Array, "*lead D"]:
    """sum_m pre[m] X[m], in float32: what a sublayer reads, before its norm."""
    require_xla("mhc.collapse", backend)
    return reference.collapse(x, pre)


def update(
    x: Float[Array, "*lead M D"],
    y: Float[Array, "*lead D"],
    post: Float32[Array, "*lead M"],
    comb: Float32[Array, "*lead M M"],
    *,
    backend: str = "xla",
) -> Float32[jax.Array, "*lead M D"]:
    """X'_j = post_j y + sum_i comb[i, j] X_i, in float32. comb's FIRST index is the source stream."""
    require_xla("mhc.update", backend)
    return reference.update(x, y, post, comb)
