"""Which drafted tokens stand: greedy, standard rejection and block rejection.

M_b is the target's distribution, M_s the one a draft was drawn from (temperature and Markov bias included), x_i the
drafts, u_i uniform. All three give the target's distribution exactly; greedy gives its arg max.

    greedy    accept while x_i = argmax M_b
    standard  accept while u_i < M_b(x_i) / M_s(x_i); then draw from max(M_b - M_s, 0), normalized
    block     p_0 = 1, p_i = min(p_{i-1} M_b(x_i) / M_s(x_i), 1);  S_i = sum_x max(p_i M_b(x) - M_s(x), 0) behind x_i
              h_i = S_i / (S_i + 1 - p_i) for i < n, h_n = p_n; the LARGEST i with u_i <= h_i is the accepted length;
              then draw from max(p_i M_b - M_s, 0). Never shorter in expectation than standard.

If all n offered drafts stand, one more token comes from M_b itself. Index i of M_b and M_s is the position behind i
accepted drafts. Source of block rejection: Sun et al., arXiv 2403.10444.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key

from dsv41_jax.engine.sampling import draw


def _taken(p: Float32[Array, "B K V"], ids: Int32[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.take_along_axis(p, ids[..., None], axis=-1)[..., 0]


def leading(accept: Array, offered: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """How many of the first `offered` entries are true before the first false one."""
    inside = jnp.arange(accept.shape[1]) < offered[:, None]
    return jnp.sum(jnp.cumprod((accept & inside).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def verify_greedy(
    target: Float32[Array, "B K1 V"], drafts: Int32[Array, "B K"], offered: Int32[Array, " B"]
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """(accepted length, next token) from target logits behind 0..K drafts."""
    best = jnp.argmax(target, axis=-1).astype(jnp.int32)
    accepted = leading(best[:, :-1] == drafts, offered)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def _at(p: Float32[Array, "B K V"], index: Int32[Array, " B"]) -> Float32[Array, "B V"]:
    return jnp.take_along_axis(p, index[:, None, None], axis=1)[:, 0]


def _finish(
    accepted: Int32[Array, " B"],
    offered: Int32[Array, " B"],
    target: Float32[Array, "B K1 V"],
    draft: Float32[Array, "B K V"],
    weight: Float32[Array, " B"],
    keys: Key[Array, " B"],
) -> Int32[Array, " B"]:
    """The token behind the accepted drafts: from the residual max(weight * M_b - M_s, 0), or M_b after a full house.

    A residual of zero everywhere can only be rounding (a rejection there has probability 0): M_b serves then.
    """
    behind = _at(target, accepted)
    rejected = _at(draft, jnp.minimum(accepted, draft.shape[1] - 1))
    residual = jnp.maximum(weight[:, None] * behind - rejected, 0.0)
    use = (accepted < offered) & (residual.sum(axis=-1) > 0)
    return draw(jnp.log(jnp.where(use[:, None], residual, behind)), keys)


def verify_standard(
    target: Float32[Array, "B K1 V"],
    draft: Float32[Array, "B K V"],
    drafts: Int32[Array, "B K"],
    offered: Int32[Array, " B"],
    uniforms: Float32[Array, "B K"],
    keys: Key[Array, " B"],
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """(accepted length, next token) from probabilities. A draft of probability 0 under M_s cannot have been drawn."""
    ratio = _taken(target[:, :-1], drafts) / _taken(draft, drafts)
    accepted = leading(uniforms < ratio, offered)
    return accepted, _finish(accepted, offered, target, draft, jnp.ones_like(uniforms[:, 0]), keys)


def verify_block(
    target: Float32[Array, "B K1 V"],
    draft: Float32[Array, "B K V"],
    drafts: Int32[Array, "B K"],
    offered: Int32[Array, " B"],
    uniforms: Float32[Array, "B K"],
    keys: Key[Array, " B"],
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """(accepted length, next token) from probabilities, judging whole prefixes."""
    ratio = _taken(target[:, :-1], drafts) / _taken(draft, drafts)
    count = drafts.shape[1]
    survive = [jnp.ones_like(ratio[:, 0])]
    for i in range(count):
        survive.append(jnp.minimum(survive[-1] * ratio[:, i], 1.0))
    p = jnp.stack(survive, axis=1)
    excess = jnp.maximum(p[:, :-1, None] * target[:, :-1] - draft, 0.0).sum(axis=-1)
    whole = excess + 1 - p[:, :-1]
    chance = jnp.where(whole > 0, excess / jnp.where(whole > 0, whole, 1.0), 0.0)
    chance = jnp.concatenate([chance[:, 1:], jnp.zeros_like(chance[:, :1])], axis=1)
    length = jnp.arange(1, count + 1, dtype=jnp.int32)
    chance = jnp.where(length == offered[:, None], p[:, 1:], chance)
    stands = (uniforms <= chance) & (length <= offered[:, None])
    accepted = jnp.max(jnp.where(stands, length, 0), axis=1)
    return accepted, _finish(accepted, offered, target, draft, jnp.take_along_axis(p, accepted[:, None], 1)[:, 0], keys)


REJECTION = {"standard": verify_standard, "block": verify_block}
