"""Mixture of experts (paper 2.1).

    s      = sqrt(softplus(x Wg^T))                                   float32, E experts
    chosen = the A best of s + bias                                   bias_vl inside image spans
    p_a    = s_a / (sum of the chosen s + 1e-20) * routed_scaling_factor
    y      = sum_a expert_a(x; p_a) + shared(x)                       summed in float32

The bias selects and never weighs. Every expert, the shared one too, is a SwiGLU whose gate is clamped above and whose
up projection is clamped on both sides.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.linear import QuantizedLinear, parameter, product_f32
from dsv41_jax.numerics import Numerics
from pallas_kernels.formats import GROUP, cast
from pallas_kernels.grouped_matmul import experts, swiglu


def route(
    logits: Float32[Array, "T E"], bias: Float32[Array, "#T E"], *, per_token: int, scale: float
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """Expert ids, ascending, and their weights. Equal scores: the lower expert wins."""
    scores = jnp.sqrt(jax.nn.softplus(logits))
    _, ids = jax.lax.top_k(scores + bias, per_token)
    ids = jnp.sort(ids, axis=-1)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    return ids, chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scale


class Gate(nnx.Module):
    """The router. The axis of its scores has a name of its own: it stays whole where experts are split."""

    def __init__(self, cfg: Config, experts: int):
        self.weight = parameter((experts, cfg.hidden_size), jnp.bfloat16, ("routes", "width"))
        self.bias = parameter((experts,), jnp.float32, ("routes",))
        self.bias_vl = parameter((experts,), jnp.float32, ("routes",)) if cfg.has_vision else None


class ExpertWeights(nnx.Module):
    """One matrix of all E experts: packed E2M1 [E, out, in / 2] and E8M0 scales [E, out, in / 32]."""

    def __init__(self, count: int, out: int, inner: int, axes: tuple[str, str]):
        self.weight = parameter((count, out, inner // 2), jnp.uint8, ("experts", *axes))
        self.scale = parameter((count, out, inner // GROUP), jnp.float8_e8m0fnu, ("experts", *axes))

    def pair(self) -> tuple[Array, Array]:
        return self.weight[...], self.scale[...]


class Experts(nnx.Module):
    """The routed experts of a layer, each matrix of all of them stacked."""

    def __init__(self, cfg: Config, count: int):
        hidden, width = cfg.moe_intermediate_size, cfg.hidden_size
        self.w1 = ExpertWeights(count, hidden, width, ("hidden", "width"))
        self.w2 = ExpertWeights(count, width, hidden, ("width", "hidden"))
        self.w3 = ExpertWeights(count, hidden, width, ("hidden", "width"))


class SharedExpert(nnx.Module):
    """The expert that every token passes through, in FP8."""

    def __init__(self, cfg: Config):
        hidden, width = cfg.moe_intermediate_size, cfg.hidden_size
        self.w1 = QuantizedLinear(hidden, width, ("hidden", "width"))
        self.w2 = QuantizedLinear(width, hidden, ("width", "hidden"))
        self.w3 = QuantizedLinear(hidden, width, ("hidden", "width"))

    @jax.named_scope("shared_experts")
    def __call__(self, x: Float[Array, "*lead D"], *, limit: float, numerics: Numerics) -> Float[Array, "*lead D"]:
        gate, up = (w(x, numerics).astype(jnp.float32) for w in (self.w1, self.w3))
        return self.w2(cast(swiglu(gate, up, limit), numerics.dtype), numerics)


class MoE(nnx.Module):
    """A router over `count` experts, those experts, and the shared one."""

    def __init__(self, cfg: Config, count: int):
        self.gate = Gate(cfg, count)
        self.experts = Experts(cfg, count)
        self.shared_experts = SharedExpert(cfg)

    @jax.named_scope("ffn")
    def __call__(
        self,
        x: Float[Array, "B T D"],
        image: Bool[Array, "B T"] | None,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """(output, taps). `image` marks positions inside image spans (None: there are none)."""
        flat = rearrange(x, "b t d -> (b t) d")
        bias = self.gate.bias[...][None]
        if image is not None and self.gate.bias_vl is not None:
            bias = jnp.where(rearrange(image, "b t -> (b t) 1"), self.gate.bias_vl[...], bias)
        with jax.named_scope("gate"):
            logits = product_f32(flat, self.gate.weight[...])
            ids, weights = route(logits, bias, per_token=plan.experts_per_token, scale=cfg.routed_scaling_factor)
        with jax.named_scope("experts"):
            routed = experts(
                flat,
                ids,
                weights,
                self.experts.w1.pair(),
                self.experts.w2.pair(),
                self.experts.w3.pair(),
                limit=cfg.swiglu_limit,
                round_input=numerics.activation,
                backend=numerics.backend,
            )
        shared = self.shared_experts(flat, limit=cfg.swiglu_limit, numerics=numerics)
        y, ids, weights = (
            rearrange(v, "(b t) c -> b t c", b=x.shape[0])
            for v in (cast(routed + shared.astype(jnp.float32), numerics.dtype), ids, weights)
        )
        return y, {"ffn_out": y, "moe_experts": ids, "moe_weights": weights}
