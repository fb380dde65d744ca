"""Attention of every layer: one latent a token is key and value of all heads (paper 2.3).

    q_r = rmsnorm(x Wq_a);  q = rope(q_r Wq_b)            N heads of H channels
    kv  = fp8(rope(rmsnorm(x Wkv)))                       this layer's window row
    o   = softmax over {window rows} + {selected main entries} + {sink},  K = V
    y   = (rope^-1(o), each of G head groups through its own block of Wo_a) Wo_b

The four modes differ only in where the selected entries come from:

    window    there are none
    full      this layer compresses its own input to main entries and index keys, and selects among them
    reindex   selects anew among the entries of the latest full layer below
    reuse     takes the entries and the selection that stand
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int32, Shaped

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.cache import LayerCache, Span, push_ring, stored, window_ids, write_entries
from dsv41_jax.nn.compressor import Compressor
from dsv41_jax.nn.indexer import Indexer
from dsv41_jax.nn.linear import QuantizedLinear, parameter
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.nn.rope import layer_frequencies, rotate
from dsv41_jax.numerics import Numerics
from pallas_kernels.block_linear import block_diagonal
from pallas_kernels.formats import cast
from pallas_kernels.sparse_attention import sparse_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """What source layers hand to the layers above: of each the latest."""

    main: Shaped[Array, "B S main_row"] | None = None
    index_keys: Shaped[Array, "B S index_row"] | None = None
    selected: Int32[Array, "B T C"] | None = None
    blocks: Int32[Array, "B T K"] | None = None


class AttentionOutput(NamedTuple):
    """The sublayer's output, what it and the layers below share, its new cache, and taps."""

    y: Float[Array, "B T D"]
    shared: Shared
    cache: LayerCache
    taps: dict[str, Array]


class Attention(nnx.Module):
    """Projections of every layer; `compressor` and `indexer` only where the layer owns entries or a selection."""

    def __init__(self, cfg: Config, plan: LayerPlan):
        heads = cfg.expanded_heads
        self.attn_sink = parameter((cfg.num_attention_heads,), jnp.float32, ("heads",))
        self.wq_a = QuantizedLinear(cfg.q_lora_rank, cfg.hidden_size, ("rank", "width"))
        self.q_norm = RMSNorm(cfg.q_lora_rank, "rank")
        self.wq_b = QuantizedLinear(heads, cfg.q_lora_rank, ("heads", "rank"))
        self.wkv = QuantizedLinear(cfg.head_dim, cfg.hidden_size, ("latent", "width"))
        self.kv_norm = RMSNorm(cfg.head_dim, "latent")
        self.wo_a = QuantizedLinear(cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups, ("groups", "heads"))
        self.wo_b = QuantizedLinear(cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank, ("width", "groups"))
        self.compressor = Compressor(cfg, plan.ratio) if plan.owns_kv else None
        self.indexer = Indexer(cfg, plan) if plan.owns_indexer else None

    def compress(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        span: Span,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> tuple[LayerCache, dict[str, Array]]:
        """Full mode: append the entries and index keys of the groups that this call finishes (a replay: none)."""
        ratio, eps = plan.ratio, cfg.rms_norm_eps
        latent, finished, cache = self.compressor(x, cache, span, ratio=ratio, eps=eps, numerics=numerics)
        if span.replay:
            return cache, {}
        first = span.start // ratio
        positions = (first[:, None] + jnp.arange(latent.shape[1], dtype=jnp.int32)) * ratio
        freqs = layer_frequencies(cfg, ratio)
        entries = stored(latent, None, positions, freqs, numerics.main, eps=eps, numerics=numerics)
        keys = self.indexer.keys(latent, positions, plan=plan, cfg=cfg, numerics=numerics)
        cache = replace(
            cache,
            main=write_entries(cache.main, entries, first, finished),
            index_keys=write_entries(cache.index_keys, keys, first, finished),
        )
        dtype = numerics.dtype
        taps = {"main_kv": numerics.main.unpack(entries, dtype), "index_keys": numerics.index.unpack(keys, dtype)}
        return cache, taps | {"latent": latent}

    def queries(
        self,
        x: Float[Array, "B T D"],
        positions: Int32[Array, "B T"],
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> tuple[Float[Array, "B T Q"], Float[Array, "B T N H"]]:
        """(the query residual, which is the indexer's input too; the rotated queries)."""
        q_r = self.q_norm(self.wq_a(x, numerics), cfg.rms_norm_eps, numerics)
        q = rearrange(self.wq_b(q_r, numerics), "b t (n h) -> b t n h", n=cfg.num_attention_heads)
        return q_r, rotate(q, positions, layer_frequencies(cfg, plan.ratio))

    def window_kv(
        self,
        x: Float[Array, "B T D"],
        positions: Int32[Array, "B T"],
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> Shaped[Array, "B T row"]:
        """This layer's own latent of each token, rotated, as the window cache keeps it."""
        kv, freqs, eps = self.wkv(x, numerics), layer_frequencies(cfg, plan.ratio), cfg.rms_norm_eps
        return stored(kv, self.kv_norm.weight[...], positions, freqs, numerics.window, eps=eps, numerics=numerics)

    def read(
        self,
        q: Float[Array, "B T N H"],
        window: Shaped[Array, "B X window_row"],
        window_ids: Int32[Array, "B T W"],
        shared: Shared,
        positions: Int32[Array, "B T"],
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> Float[Array, "B T N H"]:
        """Attend to the window, and in a layer that reads main entries to the selected ones; then rotate the result
        back by the query's angle: values carry their rotation."""
        reads = plan.kv_source is not None
        o, _ = sparse_attention(
            q,
            window,
            window_ids,
            shared.main if reads else window[:, :0],
            shared.selected if reads else jnp.zeros((*q.shape[:2], 0), jnp.int32),
            self.attn_sink[...],
            scale=cfg.head_dim**-0.5,
            unpack_window=numerics.window.unpack,
            unpack_main=numerics.main.unpack,
            backend=numerics.backend,
        )
        return rotate(cast(o, numerics.dtype), positions, layer_frequencies(cfg, plan.ratio), inverse=True)

    def project_out(self, o: Float[Array, "B T N H"], *, cfg: Config, numerics: Numerics) -> Float[Array, "B T D"]:
        """The block-diagonal Wo_a, whose input the released program does not quantize, then Wo_b."""
        grouped = rearrange(o, "b t (g n) h -> b t g (n h)", g=cfg.o_groups)
        low = block_diagonal(grouped, self.wo_a.weight[...], self.wo_a.scale[...], backend=numerics.backend)
        return self.wo_b(rearrange(low, "b t g o -> b t (g o)"), numerics)

    @jax.named_scope("attn")
    def __call__(
        self,
        x: Float[Array, "B T D"],
        shared: Shared,
        cache: LayerCache,
        span: Span,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> AttentionOutput:
        """x is the normed input; `plan` says in which of the four modes it is read."""
        how: dict[str, Any] = {"plan": plan, "cfg": cfg, "numerics": numerics}
        q_r, q = self.queries(x, span.positions, **how)
        kv = self.window_kv(x, span.positions, **how)
        window = jnp.concatenate([cache.window, kv], axis=1)
        ids = window_ids(span, cfg.sliding_window, cache.window.shape[1])
        cache, taps = replace(cache, window=push_ring(cache.window, kv, span)), dict[str, Array]()

        if plan.owns_kv:
            cache, taps = self.compress(x, cache, span, **how)
            shared = replace(shared, main=cache.main, index_keys=cache.index_keys)
        if plan.owns_indexer:
            selected, blocks = self.indexer(x, q_r, shared.index_keys, shared.blocks, span, **how)
            shared = replace(shared, selected=selected, blocks=blocks)
            taps["index_topk"] = selected
            if plan.publishes_candidates:
                taps["candidate_blocks"] = blocks

        o = self.read(q, window, ids, shared, span.positions, **how)
        y = self.project_out(o, cfg=cfg, numerics=numerics)
        return AttentionOutput(y, shared, cache, taps | {"attn_out": y})
