"""The routed experts as one operation: grouped MXFP4 matmuls with clamped SwiGLU between them (paper 2.1)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.target import use_kernel

__all__ = ["experts", "swiglu"]


def swiglu(gate: Float32[Array, "*s F"], up: Float32[Array, "*s F"], limit: float) -> Float32[Array, "*s F"]:
    """silu(min(gate, limit)) * clip(up, -limit, limit): of routed, shared and draft experts alike."""
    return reference.swiglu(gate, up, limit)


def experts(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T A"],
    weights: Float32[Array, "T A"],
    w1: tuple[Array, Array],
    w2: tuple[Array, Array],
    w3: tuple[Array, Array],
    *,
    limit: float,
    round_input: Callable[[Array], Array],
    backend: str = "xla",
) -> Float32[jax.Array, "T D"]:
    """sum_a w2[e](weights[a] * silu(min(w1[e] x, limit)) * clip(w3[e] x, +-limit)) over e = ids[t, a], float32.

    w1 and w3 are (packed uint8 [E, F, D/2], E8M0 scales [E, F, D/32]), w2 (uint8 [E, D, F/2], [E, D, F/32]). Ids of a
    token differ from each other. `round_input` is the activation quantizer that stands before each matmul; with
    bfloat16 x each matmul's result is rounded to bfloat16, the products between them stay float32, as released. The
    sum over experts runs in ascending position a, so that it does not depend on the other tokens of the batch. The
    kernel takes bfloat16 x, D in multiples of 512, F in multiples of 256, and the weights as they are; it raises on
    others. Source: paper 2.1; config keys expert_dtype, num_experts_per_tok, moe_intermediate_size, swiglu_limit;
    the released `MoE`.
    """
    if use_kernel("grouped_matmul.experts", backend, "mosaic"):
        from pallas_kernels.grouped_matmul import kernel

        return kernel.experts(x, ids, weights, w1, w2, w3, limit=limit, round_input=round_input)
    return reference.experts(x, ids, weights, w1, w2, w3, limit=limit, round_input=round_input)
