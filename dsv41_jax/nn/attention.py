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

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32, Shaped

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.cache import LayerCache, Span, cached_rows, push_ring, window_ids, write_entries
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
class Published:
    """What source layers hand to the layers above: the latest of each stands."""

    main: Shaped[Array, "B S main_row"] | None = None
    index_keys: Shaped[Array, "B S index_row"] | None = None
    selected: Int32[Array, "B T C"] | None = None
    blocks: Int32[Array, "B T K"] | None = None


class Attention(nnx.Module):
    def __init__(self, cfg: Config, plan: LayerPlan):
        heads = cfg.expanded_heads
        self.cfg, self.plan = cfg, plan
        self.attn_sink = parameter((cfg.num_attention_heads,), jnp.float32, ("heads",))
        self.wq_a = QuantizedLinear(cfg.q_lora_rank, cfg.hidden_size, ("rank", "width"))
        self.q_norm = RMSNorm(cfg.q_lora_rank, cfg.rms_norm_eps, "rank")
        self.wq_b = QuantizedLinear(heads, cfg.q_lora_rank, ("heads", "rank"))
        self.wkv = QuantizedLinear(cfg.head_dim, cfg.hidden_size, ("latent", "width"))
        self.kv_norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, "latent")
        self.wo_a = QuantizedLinear(cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups, ("groups", "heads"))
        self.wo_b = QuantizedLinear(cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank, ("width", "groups"))
        self.compressor = Compressor(cfg, plan.ratio) if plan.owns_kv else None
        self.indexer = Indexer(cfg, plan) if plan.owns_indexer else None

    def compress(
        self, x: Float[Array, "B T D"], cache: LayerCache, span: Span, num: Numerics
    ) -> tuple[LayerCache, dict[str, Array]]:
        """Full mode: append the entries and index keys of the groups that this call finishes (a replay: none)."""
        assert self.compressor is not None and self.indexer is not None
        latent, finished, cache = self.compressor(x, cache, span, num)
        if span.replay:
            return cache, {}
        ratio = self.plan.ratio
        first = span.start // ratio
        positions = (first[:, None] + jnp.arange(latent.shape[1], dtype=jnp.int32)) * ratio
        entries = cached_rows(latent, None, positions, layer_frequencies(self.cfg, ratio), num.main, num)
        keys = self.indexer.keys(latent, positions, num)
        cache = replace(
            cache,
            main=write_entries(cache.main, entries, first, finished),
            index_keys=write_entries(cache.index_keys, keys, first, finished),
        )
        seen = {"main_kv": num.main.unpack(entries, num.dtype), "index_keys": num.index.unpack(keys, num.dtype)}
        return cache, seen | {"latent": latent}

    def queries(
        self, x: Float[Array, "B T D"], positions: Int32[Array, "B T"], num: Numerics
    ) -> tuple[Float[Array, "B T Q"], Float[Array, "B T N H"]]:
        """(the query residual, which is the indexer's input too; the rotated queries)."""
        q_r = self.q_norm(self.wq_a(x, num), num)
        q = self.wq_b(q_r, num).reshape(*x.shape[:2], self.cfg.num_attention_heads, self.cfg.head_dim)
        return q_r, rotate(q, positions, layer_frequencies(self.cfg, self.plan.ratio))

    def window_rows(
        self, x: Float[Array, "B T D"], positions: Int32[Array, "B T"], num: Numerics
    ) -> Shaped[Array, "B T row"]:
        """This layer's own latent of each token, rotated, as the window cache keeps it."""
        freqs = layer_frequencies(self.cfg, self.plan.ratio)
        return cached_rows(self.wkv(x, num), self.kv_norm, positions, freqs, num.window, num)

    def read(
        self,
        q: Float[Array, "B T N H"],
        window: Shaped[Array, "B X window_row"],
        window_ids: Int32[Array, "B T W"],
        main: Shaped[Array, "B S main_row"] | None,
        main_ids: Int32[Array, "B T C"] | None,
        positions: Int32[Array, "B T"],
        num: Numerics,
    ) -> Float[Array, "B T N H"]:
        """Attend to the named rows, and rotate the result back by the query's angle: values carry their rotation."""
        cfg = self.cfg
        if main is None:
            main, main_ids = window[:, :0], jnp.zeros((*q.shape[:2], 0), jnp.int32)
        sink, scale = self.attn_sink[...], cfg.head_dim**-0.5
        o, _ = sparse_attention(
            q,
            window,
            window_ids,
            main,
            main_ids,
            sink,
            scale=scale,
            unpack_window=num.window.unpack,
            unpack_main=num.main.unpack,
            backend=num.backend,
        )
        return rotate(cast(o, num.dtype), positions, layer_frequencies(cfg, self.plan.ratio), inverse=True)

    def project_out(self, o: Float[Array, "B T N H"], num: Numerics) -> Float[Array, "B T D"]:
        """The block-diagonal Wo_a, whose input the released program does not quantize, then Wo_b."""
        grouped = o.reshape(*o.shape[:2], self.cfg.o_groups, -1)
        low = block_diagonal(grouped, self.wo_a.weight[...], self.wo_a.scale[...], backend=num.backend)
        return self.wo_b(low.reshape(*o.shape[:2], -1), num)

    def __call__(
        self, x: Float[Array, "B T D"], published: Published, cache: LayerCache, span: Span, num: Numerics
    ) -> tuple[Float[Array, "B T D"], Published, LayerCache, dict[str, Array]]:
        """(output, what now stands published, new cache, taps). x is the normed input."""
        taps: dict[str, Array] = {}
        q_r, q = self.queries(x, span.positions, num)
        kv = self.window_rows(x, span.positions, num)
        window = jnp.concatenate([cache.window, kv], axis=1)
        ids = window_ids(span, self.cfg.sliding_window, cache.window.shape[1])
        cache = replace(cache, window=push_ring(cache.window, kv, span))

        if self.compressor is not None:
            cache, taps = self.compress(x, cache, span, num)
            published = replace(published, main=cache.main, index_keys=cache.index_keys)
        if self.indexer is not None:
            selected, blocks = self.indexer(x, q_r, published.index_keys, published.blocks, span, num)
            published = replace(published, selected=selected, blocks=blocks)
            taps["index_topk"] = selected
            if self.plan.publishes_candidates:
                taps["candidate_blocks"] = blocks

        main, chosen = (published.main, published.selected) if self.plan.ratio else (None, None)
        y = self.project_out(self.read(q, window, ids, main, chosen, span.positions, num), num)
        return y, published, cache, taps | {"attn_out": y}
