"""The DSpark drafter: window-only blocks that guess a block of tokens at once (DSpark, arXiv 2607.05147).

    features  the mean over streams of what the target layers' attention sites read, side by side; one per token seen
    main_x    rmsnorm(features Wmain); every stage writes its ring from it, at the token's own position
    block     embed(the next token, then noise), positions start + 1 .. start + K after the last main_x at `start`;
              each of them sees the ring's last W positions and the whole block, which never enters the ring
    base      head(rmsnorm(collapsed streams))
    chain     logits_i = base_i + head_m(embed_m(token_i)); token_0 is the next token, token_{i+1} drawn from logits_i
    trust     confidence_i = [collapsed streams (not normed), embed_m(token_i)] . proj, a logit

The lm head and the embedding are the backbone's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Shaped

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.block import Block, Streams, collapse, to_streams
from dsv41_jax.nn.cache import HostOrDevice, Span, push_ring
from dsv41_jax.nn.linear import Linear, QuantizedLinear, product_f32
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.numerics import Numerics
from pallas_kernels.formats import cast

Choose = Callable[[Float32[Array, "B V"], int], Int32[Array, " B"]]


class MarkovHead(nnx.Module):
    """What the previous token adds to the logits, at low rank."""

    def __init__(self, cfg: Config):
        self.embed = Linear(cfg.vocab_size, cfg.dspark_markov_rank, ("vocab", "rank"))
        self.head = Linear(cfg.vocab_size, cfg.dspark_markov_rank, ("vocab", "rank"))


class ConfidenceHead(nnx.Module):
    """The logit of trust in a guess."""

    def __init__(self, cfg: Config):
        self.proj = Linear(1, cfg.hidden_size + cfg.dspark_markov_rank, ("heads", "width"))


def block_ids(positions: Int32[Array, "B K"], window: int, ring: int) -> Int32[Array, "B K seen"]:
    """Rows of [a ring of `ring` rows, the block's rows] that each position of a block sees: the W positions before
    the block (-1 before the start) and all of the block."""
    before = positions[:, :1] - jnp.arange(window, 0, -1, dtype=jnp.int32)
    own = jnp.broadcast_to(ring + jnp.arange(positions.shape[1], dtype=jnp.int32), positions.shape)
    ids = jnp.concatenate([jnp.where(before < 0, -1, before % ring), own], axis=-1)
    return jnp.broadcast_to(ids[:, None], (*positions.shape, ids.shape[-1]))


class DraftStage(Block):
    """A window-only block with experts of its own; the first stage fuses the input, the last one has the heads."""

    def __init__(self, cfg: Config, plan: LayerPlan):
        super().__init__(cfg, plan)
        if plan == cfg.draft_stages[0]:
            features = len(cfg.dspark_target_layer_ids) * cfg.hidden_size
            self.main_proj = QuantizedLinear(cfg.hidden_size, features, ("width", "hidden"))
            self.main_norm = RMSNorm(cfg.hidden_size)
        if plan == cfg.draft_stages[-1]:
            self.norm = RMSNorm(cfg.hidden_size)
            self.markov_head = MarkovHead(cfg)
            self.confidence_head = ConfidenceHead(cfg)

    def draft(
        self,
        streams: Streams,
        ring: Shaped[Array, "B R row"],
        positions: Int32[Array, "B K"],
        *,
        plan: LayerPlan,
        cfg: Config,
        numerics: Numerics,
    ) -> Streams:
        """The streams of the block's positions, which all see each other and the ring before them."""
        how: dict[str, Any] = {"plan": plan, "cfg": cfg, "numerics": numerics}
        site = self.attention_site(streams.x, cfg=cfg, numerics=numerics)
        read = self.attention_input(streams, cfg=cfg, numerics=numerics)
        with jax.named_scope("attn"):
            ids = block_ids(positions, cfg.sliding_window, ring.shape[1])
            _, q = self.attn.queries(read, positions, **how)
            seen = jnp.concatenate([ring, self.attn.window_kv(read, positions, **how)], axis=1)
            o = self.attn.read(q, seen, ids, Shared(), positions, **how)
            y = self.attn.project_out(o, cfg=cfg, numerics=numerics)
        return self.finish(streams.x, y, site, None, **how)[0]


@jax.named_scope("mtp")
def write_draft_rings(
    stages: Sequence[DraftStage],
    features: Float[Array, "B T K"],
    rings: Sequence[Shaped[Array, "B R row"]],
    span: Span,
    *,
    cfg: Config,
    numerics: Numerics,
) -> tuple[Shaped[Array, "B R row"], ...]:
    """The rings after the backbone has seen these tokens: each stage's latent of main_x, not through attn_norm."""
    main = stages[0].main_norm(stages[0].main_proj(features, numerics), cfg.rms_norm_eps, numerics)
    return tuple(
        push_ring(ring, stage.attn.window_kv(main, span.positions, plan=plan, cfg=cfg, numerics=numerics), span)
        for plan, stage, ring in zip(cfg.draft_stages, stages, rings, strict=True)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """A block of guesses behind a token: ids, the logits they were drawn from, and confidence logits."""

    ids: Int32[Array, "B K"]
    logits: Float32[Array, "B K V"]
    confidence: Float32[Array, "B K"]


@jax.named_scope("mtp")
def draft(
    stages: Sequence[DraftStage],
    embed: Float[Array, "V D"],
    head: Float[Array, "V D"],
    rings: Sequence[Shaped[Array, "B R row"]],
    length: Int32[HostOrDevice, " B"],
    token: Int32[Array, " B"],
    choose: Choose,
    *,
    cfg: Config,
    numerics: Numerics,
) -> Drafts:
    """Guess the block after `token`, which stands at position `length` and is not in any cache yet.

    `choose(logits, i)` draws guess i. Pure; nothing is written, so guesses that fail leave no trace here.
    """
    batch, block = token.shape[0], cfg.dspark_block_size
    noise = jnp.full((batch, block - 1), cfg.dspark_noise_token_id, jnp.int32)
    h = cast(embed[jnp.concatenate([token[:, None], noise], axis=1)], numerics.dtype)
    streams = to_streams(h, cfg.hc_mult)
    positions = jnp.asarray(length)[:, None] + jnp.arange(block, dtype=jnp.int32)
    for plan, stage, ring in zip(cfg.draft_stages, stages, rings, strict=True):
        with jax.named_scope(f"stages.{plan.id - cfg.num_hidden_layers}"):
            streams = stage.draft(streams, ring, positions, plan=plan, cfg=cfg, numerics=numerics)

    last = stages[-1]
    hidden = collapse(streams, numerics)
    base = product_f32(last.norm(hidden, cfg.rms_norm_eps, numerics), head)
    ids, logits, confidence = [token], [], []
    for i in range(block):
        previous = cast(last.markov_head.embed.weight[...][ids[-1]], numerics.dtype)
        logits.append(base[:, i] + product_f32(previous, last.markov_head.head.weight[...]))
        read = jnp.concatenate([hidden[:, i], previous], axis=-1)
        confidence.append(product_f32(read, last.confidence_head.proj.weight[...])[:, 0])
        ids.append(choose(logits[-1], i))
    return Drafts(*(jnp.stack(parts, axis=1) for parts in (ids[1:], logits, confidence)))
