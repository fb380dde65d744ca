"""One layer on M residual streams: Engram, then the attention site, then the expert site (paper 2.4.1).

a site:  (pre, post, comb) = coefficients(X)          from X before the sublayer
         y = sublayer(rmsnorm(sum_m mix[m] X[m]))     mix is the PREVIOUS site's pre
         X = post * y + comb applied to X;  mix = pre
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.attention import Attention, Shared
from dsv41_jax.nn.cache import LayerCache, Span
from dsv41_jax.nn.engram import Engram, EngramRows
from dsv41_jax.nn.linear import parameter
from dsv41_jax.nn.moe import MoE
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.numerics import Numerics
from pallas_kernels import mhc
from pallas_kernels.formats import cast


class Streams(NamedTuple):
    """The M residual streams, and the mix with which the next site reads them."""

    x: Float[Array, "B T M D"]
    mix: Float32[Array, "B T M"]


class Coefficients(NamedTuple):
    """What one site does to the streams: `pre` reads them for the next site, `post` and `comb` update them."""

    pre: Float32[Array, "B T M"]
    post: Float32[Array, "B T M"]
    comb: Float32[Array, "B T M M"]


class LayerOutput(NamedTuple):
    """A layer's streams, what it and the layers below share, its new cache, and taps."""

    streams: Streams
    shared: Shared
    cache: LayerCache
    taps: dict[str, Array]


class Split(nnx.Variable):
    """A weight as kernels read it, derived from the parameter beside it."""


def to_streams(h: Float[Array, "B T D"], count: int) -> Streams:
    """What enters the first block: h in each of the M streams, and the mix that reads stream 0."""
    x = jnp.broadcast_to(h[:, :, None], (*h.shape[:2], count, h.shape[2]))
    return Streams(x, jnp.zeros((*h.shape[:2], count), jnp.float32).at[..., 0].set(1.0))


@jax.named_scope("collapse")
def collapse(streams: Streams, numerics: Numerics) -> Float[Array, "B T D"]:
    """What a sublayer, or the head, reads of the streams, before its norm."""
    return cast(mhc.collapse(*streams), numerics.dtype)


def hyper_connection(cfg: Config) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """`fn`, `base` and `scale` of one site; they stay float32 whatever the activations are."""
    count = cfg.hc_mult * (cfg.hc_mult + 2)
    fn = parameter((count, cfg.hc_mult * cfg.hidden_size), jnp.float32, ("coefficients", "hidden"))
    base = parameter((count,), jnp.float32, ("coefficients",))
    return fn, base, parameter((3,), jnp.float32, (None,))


class Block(nnx.Module):
    """The parameters of a layer whose plan is `plan`."""

    def __init__(self, cfg: Config, plan: LayerPlan):
        self.engram = Engram(cfg) if plan.engram_slot is not None else None
        self.attn_norm = RMSNorm(cfg.hidden_size)
        self.attn = Attention(cfg, plan)
        self.ffn_norm = RMSNorm(cfg.hidden_size)
        self.ffn = MoE(cfg, plan.experts)
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = hyper_connection(cfg)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = hyper_connection(cfg)
        self.hc_attn_split: Split | None = nnx.data(None)  # of fn, where `split_for_kernels` made them
        self.hc_ffn_split: Split | None = nnx.data(None)

    def _hyper(self, cfg: Config, numerics: Numerics) -> dict[str, Any]:
        sizes = {"iterations": cfg.hc_sinkhorn_iters, "eps": cfg.rms_norm_eps, "hc_eps": cfg.hc_eps}
        return sizes | {"backend": numerics.backend}

    def attention_input(self, streams: Streams, *, cfg: Config, numerics: Numerics) -> Float[Array, "B T D"]:
        """What the attention site reads of the streams."""
        return self.attn_norm(collapse(streams, numerics), cfg.rms_norm_eps, numerics)

    @jax.named_scope("hc_attn")
    def attention_site(self, x: Float[Array, "B T M D"], *, cfg: Config, numerics: Numerics) -> Coefficients:
        """The attention site's coefficients, from the streams before it."""
        fn = (self.hc_attn_split or self.hc_attn_fn)[...]
        hyper = self._hyper(cfg, numerics)
        return Coefficients(*mhc.coefficients(x, fn, self.hc_attn_scale[...], self.hc_attn_base[...], **hyper))

    def finish(
        self,
        x: Float[Array, "B T M D"],
        y: Float[Array, "B T D"],
        site: Coefficients,
        image: Bool[Array, "B T"] | None,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> tuple[Streams, dict[str, Array]]:
        """(streams, taps) behind the attention's output y: its update, then the expert site."""
        with jax.named_scope("hc_ffn"):
            fn = (self.hc_ffn_split or self.hc_ffn_fn)[...]
            weights = (self.ffn_norm.weight[...], fn, self.hc_ffn_scale[...], self.hc_ffn_base[...])
            hyper = self._hyper(cfg, numerics)
            x, read, pre, post, comb = mhc.site(x, y, site.post, site.comb, site.pre, *weights, **hyper)
        y, taps = self.ffn(read, image, plan=plan, cfg=cfg, numerics=numerics)
        with jax.named_scope("hc_ffn"):
            x = cast(mhc.update(x, y, post, comb), numerics.dtype)
        return Streams(x, pre), taps | {"pre_mix": pre, "out": x}

    def __call__(
        self,
        streams: Streams,
        shared: Shared,
        cache: LayerCache,
        span: Span,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
        engram: EngramRows | None = None,
        image: Bool[Array, "B T"] | None = None,
    ) -> LayerOutput:
        """One layer of the forward pass. `engram` is what was looked up; None: nothing, or it is in X already."""
        how: dict[str, Any] = {"cfg": cfg, "numerics": numerics}
        taps: dict[str, Array] = {}
        if engram is not None:
            x, taps = self.engram(streams.x, engram, image, eps=cfg.rms_norm_eps, numerics=numerics)
            streams = streams._replace(x=x)
        if plan.draft_feature:
            taps["draft_feature"] = cast(jnp.mean(streams.x.astype(jnp.float32), axis=-2), numerics.dtype)
        site = self.attention_site(streams.x, **how)
        read = self.attention_input(streams, **how)
        y, shared, cache, seen = self.attn(read, shared, cache, span, plan=plan, **how)
        streams, done = self.finish(streams.x, y, site, image, plan=plan, **how)
        return LayerOutput(streams, shared, cache, taps | {"attn_in": read} | seen | done)

    def store(
        self,
        streams: Streams,
        cache: LayerCache,
        span: Span,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
        engram: EngramRows | None = None,
        image: Bool[Array, "B T"] | None = None,
    ) -> tuple[Streams, LayerCache]:
        """Only what a Full layer leaves for the layers above: (streams with its Engram, cache with new entries)."""
        if engram is not None:
            x, _ = self.engram(streams.x, engram, image, eps=cfg.rms_norm_eps, numerics=numerics)
            streams = streams._replace(x=x)
        read = self.attention_input(streams, cfg=cfg, numerics=numerics)
        with jax.named_scope("attn"):
            cache, _ = self.attn.compress(read, cache, span, plan=plan, cfg=cfg, numerics=numerics)
        return streams, cache
