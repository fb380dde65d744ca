"""The DSpark drafter: window-only blocks that guess a block of tokens at once (DSpark paper; architecture 10).

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

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Shaped

from dsv41_jax.block import Block, expand
from dsv41_jax.cache import Span, push_ring
from dsv41_jax.config import WINDOW, Config, LayerPlan
from dsv41_jax.linear import Linear, QuantizedLinear, product_f32
from dsv41_jax.norm import RMSNorm
from dsv41_jax.quant import Numerics
from pallas_kernels import mhc
from pallas_kernels.formats import cast

Choose = Callable[[Float32[Array, "B V"], int], Int32[Array, " B"]]


class MarkovHead(nnx.Module):
    def __init__(self, cfg: Config):
        self.embed = Linear(cfg.vocab_size, cfg.dspark_markov_rank, ("vocab", "rank"))
        self.head = Linear(cfg.vocab_size, cfg.dspark_markov_rank, ("vocab", "rank"))


class ConfidenceHead(nnx.Module):
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

    def __init__(self, cfg: Config, stage: int):
        plan = LayerPlan(cfg.num_hidden_layers + stage, WINDOW, 0)
        super().__init__(cfg, plan, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok)
        if stage == 0:
            features = len(cfg.dspark_target_layer_ids) * cfg.hidden_size
            self.main_proj = QuantizedLinear(cfg.hidden_size, features, ("width", "hidden"))
            self.main_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if stage == cfg.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            self.markov_head = MarkovHead(cfg)
            self.confidence_head = ConfidenceHead(cfg)

    def draft(
        self,
        x: Float[Array, "B K M D"],
        mix: Float32[Array, "B K M"],
        ring: Shaped[Array, "B R row"],
        positions: Int32[Array, "B K"],
        num: Numerics,
    ) -> tuple[Float[Array, "B K M D"], Float32[Array, "B K M"]]:
        """(streams, next mix) of the block's positions, which all see each other and the ring before them."""
        ids = block_ids(positions, self.cfg.sliding_window, ring.shape[1])

        def attend(y: Array) -> tuple[Array, None]:
            _, q = self.attn.queries(y, positions, num)
            seen = jnp.concatenate([ring, self.attn.window_rows(y, positions, num)], axis=1)
            return self.attn.project_out(self.attn.read(q, seen, ids, None, None, positions, num), num), None

        x, mix, _, _ = self.sites(x, mix, attend, None, num)
        return x, mix


def observe(
    stages: Sequence[DraftStage],
    features: Float[Array, "B T K"],
    rings: Sequence[Shaped[Array, "B R row"]],
    span: Span,
    num: Numerics,
) -> tuple[Shaped[Array, "B R row"], ...]:
    """The rings after the backbone has seen these tokens: each stage's latent of main_x, not through attn_norm."""
    main = stages[0].main_norm(stages[0].main_proj(features, num), num)
    return tuple(
        push_ring(ring, stage.attn.window_rows(main, span.positions, num), span)
        for stage, ring in zip(stages, rings, strict=True)
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """A block of guesses behind a token: ids, the logits they were drawn from, and confidence logits."""

    ids: Int32[Array, "B K"]
    logits: Float32[Array, "B K V"]
    confidence: Float32[Array, "B K"]


def draft(
    stages: Sequence[DraftStage],
    embed: Float[Array, "V D"],
    head: Float[Array, "V D"],
    rings: Sequence[Shaped[Array, "B R row"]],
    length: Int32[Array, " B"],
    token: Int32[Array, " B"],
    choose: Choose,
    cfg: Config,
    num: Numerics,
) -> Drafts:
    """Guess the block after `token`, which stands at position `length` and is not in any cache yet.

    `choose(logits, i)` draws guess i. Pure; nothing is written, so guesses that fail leave no trace here.
    """
    batch, block = token.shape[0], cfg.dspark_block_size
    noise = jnp.full((batch, block - 1), cfg.dspark_noise_token_id, jnp.int32)
    h = cast(embed[jnp.concatenate([token[:, None], noise], axis=1)], num.dtype)
    x, mix = expand(h, cfg.hc_mult)
    positions = length[:, None] + jnp.arange(block, dtype=jnp.int32)
    for stage, ring in zip(stages, rings, strict=True):
        x, mix = stage.draft(x, mix, ring, positions, num)

    last = stages[-1]
    hidden = cast(mhc.collapse(x, mix), num.dtype)
    base = product_f32(last.norm(hidden, num), head)
    ids, logits, confidence = [token], [], []
    for i in range(block):
        memory = cast(last.markov_head.embed.weight[...][ids[-1]], num.dtype)
        logits.append(base[:, i] + product_f32(memory, last.markov_head.head.weight[...]))
        read = jnp.concatenate([hidden[:, i], memory], axis=-1)
        confidence.append(product_f32(read, last.confidence_head.proj.weight[...])[:, 0])
        ids.append(choose(logits[-1], i))
    return Drafts(*(jnp.stack(parts, axis=1) for parts in (ids[1:], logits, confidence)))
