"""The lightning indexer and its two-level selection (paper 2.3.2; architecture 5).

    key_j     = fp4(rope(rmsnorm(latent_j Wk), position j * ratio))             Full layers, published
    query_t   = fp4(rope(q_r Wq_b, t))                                          I heads
    weight_t  = x Wproj * J^-0.5 * I^-0.5
    score     = sum_i weight[t, i] relu(query[t, i] . key[j])                   -inf unless (t + 1) // ratio > j
    selected  = the C highest, the lower entry winning ties

The candidate source also keeps the blocks of entries with the best visible score, the newest block always among them;
index sources above it score only the entries of those blocks: by mask while the pool would hold every entry, else by
gathering the pool's keys, so that their cost does not grow with the context. Both give the same ids. Scores exist a
tile at a time: the selection keeps a running best, exact whatever the tile.
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
from pallas_kernels.topk import finish, merge, start, topk

TILE = 2048  # entries scored at a time; a working set, not a limit


def visible_entries(span: Span, ratio: int) -> Int32[Array, "B T"]:
    """Entries whose group is complete at each query: (t + 1) // ratio."""
    return (span.positions + 1) // ratio


def mask_scores(
    scores: Float32[Array, "B T S"], entries: Int32[Array, "B #T S"], visible: Int32[Array, "B T"]
) -> Float32[Array, "B T S"]:
    """-inf for entries (ids, -1: none) that the query does not see, and for NaN: neither is ever selected."""
    seen = (entries >= 0) & (entries < visible[..., None])
    return jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)


def block_scores(
    scores: Float32[Array, "B T S"], number: Int32[Array, "B T K"], visible: Int32[Array, "B T"], size: int
) -> Float32[Array, "B T K"]:
    """Best masked score of each block of `size` entries; +inf for the one that holds the newest visible entry."""
    best = scores.reshape(*number.shape, size).max(axis=-1)
    newest = (visible - 1) // size  # -1 where nothing is visible: pins no block
    return jnp.where(number == newest[..., None], jnp.inf, best)


def candidate_blocks(
    scores: Float32[Array, "B T S"], visible: Int32[Array, "B T"], *, blocks: int, size: int, backend: str = "xla"
) -> Int32[Array, "B T K"]:
    """The `blocks` best blocks of `size` entries per query by their best score; the newest visible entry's is pinned.

    `scores` are masked. Ids ascend, -1 fills: a block without a visible entry is never a candidate.
    """
    short = -scores.shape[-1] % size
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)
    count = padded.shape[-1] // size
    number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*scores.shape[:2], count))
    return topk(block_scores(padded, number, visible, size), blocks, backend=backend)


def pool_entries(blocks: Int32[Array, "B T K"], size: int) -> Int32[Array, "B T P"]:
    """Entry ids of candidate blocks, ascending; -1 for those of missing blocks."""
    entries = blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.where(blocks[..., None] < 0, -1, entries).reshape(*blocks.shape[:2], -1)


def entries_in_tiles(blocks: Int32[Array, "B T K"], size: int, tile: int) -> Int32[Array, "B T P"]:
    """`pool_entries`, filled with -1 to whole tiles."""
    entries = pool_entries(blocks, size)
    return jnp.pad(entries, ((0, 0), (0, 0), (0, -entries.shape[-1] % tile)), constant_values=-1)


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
        # Ids carry no gradient; without one to follow, the loop may end where the tokens do.
        query, heads, keys = jax.lax.stop_gradient((query, heads, keys))
        return self.select(query, heads, keys, blocks, visible, num)

    def select(
        self,
        query: Float[Array, "B T I J"],
        heads: Float[Array, "B T I"],
        keys: Shaped[Array, "B S row"],
        blocks: Int32[Array, "B T K"] | None,
        visible: Int32[Array, "B T"],
        num: Numerics,
    ) -> tuple[Int32[Array, "B T C"], Int32[Array, "B T K"] | None]:
        """Score tile by tile, keeping only a running best: memory does not grow with the entries, and time grows with
        those that some query sees, not with the cache's capacity."""
        cfg, plan = self.cfg, self.plan
        lead, size, count = query.shape[:2], cfg.candidate_block_size, keys.shape[1]
        pooled = plan.obeys_candidates and count > cfg.candidate_pool
        total = cfg.candidate_pool if pooled else count
        tile = size * max(1, min(TILE, total) // size)
        tiles = -(-total // tile)
        pool = entries_in_tiles(blocks, size, tile) if pooled else None
        member = pool_mask(blocks, size, tiles * tile) if plan.obeys_candidates and not pooled else None

        def score(i: Int32[Array, ""] | int) -> tuple[Float32[Array, "B T tile"], Int32[Array, "B T tile"]]:
            if pool is not None:
                entries = jax.lax.dynamic_slice_in_dim(pool, i * tile, tile, axis=2)
                found = jax.vmap(lambda k, e: k[e])(keys, jnp.clip(entries, 0, count - 1))
            else:
                row = i * tile + jnp.arange(tile, dtype=jnp.int32)
                found = keys[:, jnp.minimum(row, count - 1)][:, None]
                entries = jnp.broadcast_to(jnp.where(row < count, row, -1), (*lead, tile))
            scores = index_scores(query, num.index.unpack(found, num.dtype), heads, backend=num.backend)
            scores = mask_scores(scores, entries, visible)
            if member is not None:
                scores = jnp.where(jax.lax.dynamic_slice_in_dim(member, i * tile, tile, axis=2), scores, -jnp.inf)
            return scores, entries

        def add(i: Int32[Array, ""] | int, kept: tuple) -> tuple:
            scores, entries = score(i)
            best = merge(kept[0], scores, entries, backend=num.backend)
            if not plan.publishes_candidates:
                return best, kept[1]
            number = jnp.broadcast_to(
                i * (tile // size) + jnp.arange(tile // size, dtype=jnp.int32), (*lead, tile // size)
            )
            return best, merge(kept[1], block_scores(scores, number, visible, size), number, backend=num.backend)

        wanted = min(cfg.candidate_topk_blocks, -(-count // size)) if plan.publishes_candidates else 0
        kept = (start(lead, cfg.index_topk), start(lead, wanted))
        if tiles == 1:
            kept = add(0, kept)
        else:
            seen = tiles if pooled else jnp.minimum(tiles, -(-visible.max() // tile))
            kept = jax.lax.fori_loop(0, seen, add, kept)
        return finish(kept[0]), finish(kept[1]) if plan.publishes_candidates else blocks
