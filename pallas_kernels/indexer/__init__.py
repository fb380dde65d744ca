"""The lightning indexer's scores (paper 2.3.2)."""

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels import require_xla
from pallas_kernels.indexer import reference

__all__ = ["index_scores"]


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B #T S J"], weights: Float[Array, "B T I"], *, backend: str = "xla"
) -> Float32[jax.Array, "B T S"]:
    """score[t, s] = sum_i weights[t, i] * relu(q[t, i] . key[s]); keys may differ per query (a gathered pool).

    With bfloat16 operands the dot, the weighted hit and the sum are each rounded to bfloat16, as released; the sum
    itself runs in float32. Visibility is the caller's. Source: paper 2.3.2; the released `Indexer`.
    """
    require_xla("index_scores", backend)
    return reference.index_scores(q, keys, weights)
