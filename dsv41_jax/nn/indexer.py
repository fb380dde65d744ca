"""The lightning indexer and its two-level selection (paper 2.3.2).

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
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int32, Shaped

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.cache import Span, stored
from dsv41_jax.nn.linear import Linear, QuantizedLinear
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.nn.rope import layer_frequencies, rotate
from dsv41_jax.numerics import Numerics
from pallas_kernels.formats import cast
from pallas_kernels.indexer import select


def visible_entries(span: Span, ratio: int) -> Int32[Array, "B T"]:
    """Entries whose group is complete at each query: (t + 1) // ratio."""
    return (span.positions + 1) // ratio


class Indexer(nnx.Module):
    """Queries and head weights of an index source; `wk` and `k_norm` only where the layer owns its keys."""

    def __init__(self, cfg: Config, plan: LayerPlan):
        heads, width = cfg.index_n_heads, cfg.index_head_dim
        self.wq_b = QuantizedLinear(heads * width, cfg.q_lora_rank, ("index", "rank"))
        self.weights_proj = Linear(heads, cfg.hidden_size, ("index", "width"))
        self.wk = Linear(width, cfg.head_dim, ("index", "latent")) if plan.owns_kv else None
        self.k_norm = RMSNorm(width, "index") if plan.owns_kv else None

    @jax.named_scope("indexer")
    def keys(
        self,
        latent: Float[Array, "B K H"],
        positions: Int32[Array, "B K"],
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> Shaped[Array, "B K row"]:
        """Index keys of latents (before rope) whose groups start at `positions`, as the cache keeps them."""
        key, freqs, eps = self.wk(latent, numerics), layer_frequencies(cfg, plan.ratio), cfg.rms_norm_eps
        return stored(key, self.k_norm.weight[...], positions, freqs, numerics.index, eps=eps, numerics=numerics)

    @jax.named_scope("indexer")
    def __call__(
        self,
        x: Float[Array, "B T D"],
        q_r: Float[Array, "B T Q"],
        keys: Shaped[Array, "B S row"],
        blocks: Int32[Array, "B T K"] | None,
        span: Span,
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> tuple[Int32[Array, "B T C"], Int32[Array, "B T K"] | None]:
        """(selected entry ids, candidate blocks for the layers above). Ids ascend, -1 fills."""
        query = rearrange(self.wq_b(q_r, numerics), "b t (i j) -> b t i j", i=cfg.index_n_heads)
        query = numerics.index(rotate(query, span.positions, layer_frequencies(cfg, plan.ratio)))
        heads = self.weights_proj(x, numerics).astype(jnp.float32) * (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
        heads = cast(heads, numerics.dtype)
        visible = visible_entries(span, plan.ratio)
        # Ids carry no gradient; without one to follow, the selection's loop may end where the tokens do.
        query, heads, keys = jax.lax.stop_gradient((query, heads, keys))
        size = cfg.candidate_block_size
        selected, found = select(
            query,
            keys,
            heads,
            visible,
            blocks if plan.obeys_candidates else None,
            count=cfg.index_topk,
            candidates=min(cfg.candidate_topk_blocks, -(-keys.shape[1] // size)) if plan.publishes_candidates else 0,
            size=size,
            unpack=lambda rows: numerics.index.unpack(rows, numerics.dtype),
            backend=numerics.backend,
        )
        return selected, found if plan.publishes_candidates else blocks
