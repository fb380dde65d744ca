"""One layer on M residual streams: Engram, then the attention site, then the expert site (paper 2.4.1).

a site:  (pre, post, comb) = coefficients(X)          from X before the sublayer
         y = sublayer(rmsnorm(sum_m mix[m] X[m]))     mix is the PREVIOUS site's pre
         X = post * y + comb applied to X;  mix = pre
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32

from dsv41_jax.attention import Attention, Published
from dsv41_jax.cache import LayerCache, Span
from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.engram import Engram, EngramRows
from dsv41_jax.linear import map_parameters, parameter
from dsv41_jax.moe import MoE
from dsv41_jax.norm import RMSNorm
from dsv41_jax.quant import Numerics
from pallas_kernels import mhc
from pallas_kernels.formats import cast

Carried = Any  # what an attention site hands through beside its output


def expand(h: Float[Array, "B T D"], streams: int) -> tuple[Float[Array, "B T M D"], Float32[Array, "B T M"]]:
    """What enters the first block: h in each of the M streams, and the mix that reads stream 0."""
    x = jnp.broadcast_to(h[:, :, None], (*h.shape[:2], streams, h.shape[2]))
    return x, jnp.zeros((*h.shape[:2], streams), jnp.float32).at[..., 0].set(1.0)


def hyper_connection(cfg: Config) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """`fn`, `base` and `scale` of one site; they stay float32 whatever the activations are."""
    count = cfg.hc_mult * (cfg.hc_mult + 2)
    fn = parameter((count, cfg.hc_mult * cfg.hidden_size), jnp.float32, ("coefficients", "hidden"))
    base = parameter((count,), jnp.float32, ("coefficients",))
    return fn, base, parameter((3,), jnp.float32, (None,))


def prepared[Module: nnx.Module](params: Module) -> Module:
    """The parameters as the kernels read them: `fn` of every site split once, not in every step."""

    def value(path: tuple[Any, ...], leaf: Any) -> Array:
        return mhc.split_fn(leaf[...]) if path[-1] in ("hc_attn_fn", "hc_ffn_fn") else leaf[...]

    return map_parameters(value, params)


class Block(nnx.Module):
    """`plan` says what the layer is; `experts` of which `per_token` are active are its routed experts."""

    def __init__(self, cfg: Config, plan: LayerPlan, experts: int, per_token: int):
        self.cfg, self.plan = cfg, plan
        self.engram = Engram(cfg) if plan.engram_slot is not None else None
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.attn = Attention(cfg, plan)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.ffn = MoE(cfg, experts, per_token)
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = hyper_connection(cfg)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = hyper_connection(cfg)

    def hyper(self, site: str, num: Numerics) -> dict[str, Any]:
        """The arguments of `mhc` that belong to this block's `attn` or `ffn` site."""
        cfg = self.cfg
        weights = {part: getattr(self, f"hc_{site}_{part}")[...] for part in ("fn", "scale", "base")}
        sizes = {"iterations": cfg.hc_sinkhorn_iters, "eps": cfg.rms_norm_eps, "hc_eps": cfg.hc_eps}
        return weights | sizes | {"backend": num.backend}

    def attention_input(
        self, x: Float[Array, "B T M D"], mix: Float32[Array, "B T M"], num: Numerics
    ) -> Float[Array, "B T D"]:
        """What the attention site reads of the streams."""
        return self.attn_norm(cast(mhc.collapse(x, mix), num.dtype), num)

    def sites(
        self,
        x: Float[Array, "B T M D"],
        mix: Float32[Array, "B T M"],
        attend: Callable[[Array], tuple[Array, Carried]],
        image: Bool[Array, "B T"] | None,
        num: Numerics,
    ) -> tuple[Float[Array, "B T M D"], Float32[Array, "B T M"], Carried, dict[str, Array]]:
        """(streams, next mix, what `attend` carries, taps): the attention site, then the expert site."""
        pre, post, comb = mhc.coefficients(x, **self.hyper("attn", num))
        seen = self.attention_input(x, mix, num)
        y, carried = attend(seen)

        x, y, next_mix, post, comb = mhc.site(
            x, y, post, comb, pre, self.ffn_norm.weight[...], **self.hyper("ffn", num)
        )
        y, taps = self.ffn(y, image, num)
        x = cast(mhc.update(x, y, post, comb), num.dtype)
        return x, next_mix, carried, taps | {"attn_in": seen, "pre_mix": next_mix, "out": x}

    def __call__(
        self,
        x: Float[Array, "B T M D"],
        mix: Float32[Array, "B T M"],
        published: Published,
        cache: LayerCache,
        span: Span,
        num: Numerics,
        *,
        rows: EngramRows | None = None,
        image: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T M D"], Float32[Array, "B T M"], Published, LayerCache, dict[str, Array]]:
        """(streams, the mix that the next site collapses them with, what stands published, new cache, taps). `rows`
        are what its Engram reads; None: it has none, or the streams hold its memory already."""
        taps: dict[str, Array] = {}
        if self.engram is not None and rows is not None:
            x, taps = self.engram(x, rows, image, num)
        if self.plan.draft_feature:
            taps["draft_feature"] = cast(jnp.mean(x.astype(jnp.float32), axis=-2), num.dtype)

        def attend(y: Array) -> tuple[Array, tuple[Published, LayerCache, dict[str, Array]]]:
            y, stands, kept, seen = self.attn(y, published, cache, span, num)
            return y, (stands, kept, seen)

        x, mix, (published, cache, attn_taps), site_taps = self.sites(x, mix, attend, image, num)
        return x, mix, published, cache, taps | attn_taps | site_taps

    def store(
        self,
        x: Float[Array, "B T M D"],
        mix: Float32[Array, "B T M"],
        cache: LayerCache,
        span: Span,
        num: Numerics,
        *,
        rows: EngramRows | None = None,
        image: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T M D"], LayerCache]:
        """Only what a Full layer leaves for the layers above it: (streams with its memory, cache with new entries)."""
        if self.engram is not None and rows is not None:
            x, _ = self.engram(x, rows, image, num)
        cache, _ = self.attn.compress(self.attention_input(x, mix, num), cache, span, num)
        return x, cache
