"""The lightning indexer and its two-level selection (paper 2.3.2; architecture 5).

    key_j     = fp4(rope(rmsnorm(latent_j Wk), position j * ratio))             Full layers, published
    query_t   = fp4(rope(q_r Wq_b, t))                                          I heads
    weight_t  = x Wproj * J^-0.5 * I^-0.5
    score     = sum_i weight[t, i] relu(query[t, i] . key[j])                   -inf unless (t + 1) // ratio > j
    selected  = the C highest, the lower entry winning ties

The candidate source also keeps the blocks of entries with the best visible score, the newest block always among them;
index sources above it score only the entries of those blocks: by mask while the pool would hold every entry, else by
gathering the pool's keys, so that their cost does not grow with the context. Both give the same ids.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from dsv41_jax.cache import Span
from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.linear import Linear, QuantizedLinear
from dsv41_jax.norm import RMSNorm
from dsv41_jax.quant import Numerics
from dsv41_jax.rope import layer_frequencies, rotate
from pallas_kernels.formats import cast
from pallas_kernels.indexer import index_scores
from pallas_kernels.topk import topk


def visible_entries(span: Span, ratio: int) -> Int32[Array, "B T"]:
    """Entries whose group is complete at each query: (t + 1) // ratio."""
    return (span.positions + 1) // ratio


def mask_scores(
    scores: Float32[Array, "B T S"], entries: Int32[Array, "B #T S"], visible: Int32[Array, "B T"]
) -> Float32[Array, "B T S"]:
    """-inf for entries (ids, -1: none) that the query does not see, and for NaN: neither is ever selected."""
    seen = (entries >= 0) & (entries < visible[..., None])
    return jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)


def candidate_blocks(
    scores: Float32[Array, "B T S"], visible: Int32[Array, "B T"], *, blocks: int, size: int, backend: str = "xla"
) -> Int32[Array, "B T K"]:
    """The `blocks` best blocks of `size` entries per query by their best score; the newest visible entry's is pinned.

    `scores` are masked. Ids ascend, -1 fills: a block without a visible entry is never a candidate.
    """
    short = -scores.shape[-1] % size
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)
    best = padded.reshape(*scores.shape[:2], -1, size).max(axis=-1)
    newest = (visible - 1) // size  # -1 where nothing is visible: pins no block
    number = jnp.arange(best.shape[-1], dtype=jnp.int32)
    return topk(jnp.where(number == newest[..., None], jnp.inf, best), blocks, backend=backend)


def pool_entries(blocks: Int32[Array, "B T K"], size: int) -> Int32[Array, "B T P"]:
    """Entry ids of candidate blocks, ascending; -1 for those of missing blocks."""
    entries = blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(blocks[..., None] < 0, -1, entries).reshape(*blocks.shape[:2], -1)


def pool_mask(blocks: Int32[Array, "B T K"], size: int, entries: int) -> Bool[Array, "B T S"]:
    """Which of `entries` entries belong to candidate blocks."""
    count = -(-entries // size)
    slot = jnp.where(blocks < 0, count, blocks)
    mark = jax.vmap(jax.vmap(lambda s: jnp.zeros(count + 1, bool).at[s].set(True)))(slot)
    return jnp.repeat(mark[..., :count], size, axis=-1)[..., :entries]


class Indexer(nnx.Module):
    """Queries and head weights of an index source; `wk` and `k_norm` only where the layer owns its keys."""

    def __init__(self, cfg: Config, plan: LayerPlan):
        heads, width = cfg.index_n_heads, cfg.index_head_dim
        self.cfg, self.plan = cfg, plan
        self.wq_b = QuantizedLinear(heads * width, cfg.q_lora_rank, ("index", "rank"))
        self.weights_proj = Linear(heads, cfg.hidden_size, ("index", "width"))
        self.wk = Linear(width, cfg.head_dim, ("index", "latent")) if plan.owns_kv else None
        self.k_norm = RMSNorm(width, cfg.rms_norm_eps, "index") if plan.owns_kv else None

    def keys(
        self, latent: Float[Array, "B K H"], positions: Int32[Array, "B K"], num: Numerics
    ) -> Shaped[Array, "B K row"]:
        """Index keys of latents (before rope) whose groups start at `positions`, as the cache keeps them."""
        assert self.wk is not None and self.k_norm is not None
        key = rotate(self.k_norm(self.wk(latent, num), num), positions, layer_frequencies(self.cfg, self.plan.ratio))
        return num.index.pack(key)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        q_r: Float[Array, "B T Q"],
        keys: Shaped[Array, "B S row"],
        blocks: Int32[Array, "B T K"] | None,
        span: Span,
        num: Numerics,
    ) -> tuple[Int32[Array, "B T C"], Int32[Array, "B T K"] | None]:
        """(selected entry ids, candidate blocks for the layers above). Ids ascend, -1 fills."""
        cfg, plan = self.cfg, self.plan
        query = self.wq_b(q_r, num).reshape(*q_r.shape[:2], cfg.index_n_heads, cfg.index_head_dim)
        query = num.index(rotate(query, span.positions, layer_frequencies(cfg, plan.ratio)))
        heads = self.weights_proj(x, num).astype(jnp.float32) * (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
        heads = cast(heads, num.dtype)
        visible = visible_entries(span, plan.ratio)
        size, count = cfg.candidate_block_size, keys.shape[1]

        if plan.obeys_candidates and count > cfg.candidate_pool:
            entries = pool_entries(blocks, size)
            gathered = jax.vmap(lambda k, i: k[i])(keys, jnp.clip(entries, 0, count - 1))
            gathered = num.index.unpack(gathered, num.dtype)
            scores = mask_scores(index_scores(query, gathered, heads, backend=num.backend), entries, visible)
            place = topk(scores, cfg.index_topk, backend=num.backend)
            chosen = jnp.take_along_axis(entries, jnp.maximum(place, 0), axis=-1)
            return jnp.where(place < 0, -1, chosen), blocks

        entries = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (keys.shape[0], 1, count))
        every = num.index.unpack(keys, num.dtype)[:, None]
        scores = mask_scores(index_scores(query, every, heads, backend=num.backend), entries, visible)
        if plan.obeys_candidates:
            scores = jnp.where(pool_mask(blocks, size, count), scores, -jnp.inf)
        if plan.publishes_candidates:
            wanted = min(cfg.candidate_topk_blocks, -(-count // size))
            blocks = candidate_blocks(scores, visible, blocks=wanted, size=size, backend=num.backend)
        return topk(scores, cfg.index_topk, backend=num.backend), blocks
