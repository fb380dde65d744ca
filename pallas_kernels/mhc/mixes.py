"""From the sums over a row to its coefficients: the arithmetic that both of the site's kernels share.

A row's sums are its 2M + M*M products with fn and its sum of squares. Each number is an array of one value a token, so
that no reduction crosses threads: the Sinkhorn chain of 40 sums is what takes time.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

RECORD = 32  # floats of a partial sum: 2M + M*M products, X'^2, collapse^2, padding
SQUARE, READ_SQUARE = RECORD - 2, RECORD - 1  # where the two sums of squares stand
Matrix = list[list[jax.Array]]
Reciprocal = Callable[[jax.Array], jax.Array]


class Sizes(NamedTuple):
    """hc_sinkhorn_iters, rms_norm_eps and hc_eps of the config."""

    iterations: int
    eps: float
    hc_eps: float


def wanted(streams: int) -> list[int]:
    """Which numbers of a record `mixes` takes, in order."""
    return [*range(streams * (streams + 2)), SQUARE]


def sinkhorn(logits: Matrix, iterations: int, eps: float, reciprocal: Reciprocal) -> Matrix:
    """The reference's iterations, each of the M*M numbers an array of its own."""
    every = range(len(logits))

    def total(values: list[jax.Array]) -> jax.Array:  # by pairs: a shorter chain
        return values[0] if len(values) == 1 else total(values[::2]) + total(values[1::2])

    def inverses(values: list[jax.Array]) -> list[jax.Array]:  # of two from one reciprocal: it is the slow operation
        pairs = [(a, b, reciprocal(a * b)) for a, b in zip(values[::2], values[1::2], strict=True)]
        return [value for a, b, r in pairs for value in (r * b, r * a)]

    def rows(c: Matrix, eps: float) -> Matrix:
        inverse = inverses([total(row) + eps for row in c])
        return [[v * r for v in row] for row, r in zip(c, inverse, strict=True)]

    def columns(c: Matrix) -> Matrix:
        inverse = inverses([total([row[j] for row in c]) + eps for j in every])
        return [[v * r for v, r in zip(row, inverse, strict=True)] for row in c]

    # comb = softmax(logits) + eps
    tops = [reduce(jnp.maximum, row) for row in logits]
    exps = [[jnp.exp(v - top) for v in row] for row, top in zip(logits, tops, strict=True)]
    comb = [[v + eps for v in row] for row in rows(exps, 0.0)]
    # comb = comb / (comb.sum(-2) + eps), then rows and columns in turn
    comb = columns(comb)
    return lax.fori_loop(0, iterations - 1, lambda _, c: columns(rows(c, eps)), comb)


def mixes(
    number: Sequence[jax.Array],
    scale: Any,
    base: Any,
    *,
    streams: int,
    width: int,
    sizes: Sizes,
    reciprocal: Reciprocal,
) -> tuple[list[jax.Array], list[jax.Array], Matrix]:
    """(pre, post, comb) of tokens from the numbers that `wanted` names; scale and base are lists, or references, read
    where they are needed."""
    count = streams * (streams + 2)
    # m = (z fn^T) * rsqrt(mean(z^2) + eps)
    inverse = lax.rsqrt(number[-1] / (streams * width) + sizes.eps)
    group = [0] * streams + [1] * streams + [2] * streams**2
    logit = [number[n] * inverse * scale[group[n]] + base[n] for n in range(count)]
    # pre = sigmoid(m_pre * scale[0] + base_pre) + hc_eps; post = 2 sigmoid(m_post * scale[1] + base_post)
    pre = [jax.nn.sigmoid(v) + sizes.hc_eps for v in logit[:streams]]
    post = [2.0 * jax.nn.sigmoid(v) for v in logit[streams : 2 * streams]]
    # comb = Sinkhorn(m_comb * scale[2] + base_comb)
    square = [logit[start : start + streams] for start in range(2 * streams, count, streams)]
    return pre, post, sinkhorn(square, sizes.iterations, sizes.hc_eps, reciprocal)
