"""Bounded Replay: prefill in which the upper layers run on the last W prompt tokens alone (paper 3.2.2).

Layers above the last Full one, the cut, compress nothing of their own: all that a prompt's early tokens leave in them
is window rows, and those are overwritten W tokens later. So the prompt goes through the layers below the cut, the cut
layer stores its entries and index keys for every token, and then the cut and the layers above it run once, on the last
W tokens, where token i of a replay that starts at s sees the window

    max(s, i - W + 1) .. i          instead of i - W + 1 .. i

in each of these layers. That is an APPROXIMATION: a window row used to depend on rows that stand up to W - 1 tokens
further back in the layer below. It is exact for prompts of at most W tokens. (vLLM 0.33 keeps the cut layer's own
window exact; the paper's definition, followed here, truncates it too.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv41_jax.config import Config
from dsv41_jax.nn.cache import Cache, Span, push_ring
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.transformer import Transformer, enter, leave, through
from dsv41_jax.nn.vision import ImageInput
from dsv41_jax.numerics import Numerics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tail:
    """What the cut layer is given for the last W tokens: position p stands in slot p % W."""

    x: Float[Array, "B W MD"]
    mix: Float32[Array, "B W M"]
    image: Bool[Array, "B W 1"]


def cut(cfg: Config) -> int:
    """The last Full layer. Raises ValueError for a config that cannot be replayed from it: Engram above it would need
    rows for the tail, draft features below it would exist for the tail only."""
    layer = max(cfg.kv_source_layer_ids, default=None)
    if layer is None:
        raise ValueError("prefill: 'replay' needs a Full layer, and kv_source_layer_ids is empty")
    above = [i for i in cfg.engram_layer_ids if i > layer]
    below = [i for i in cfg.dspark_target_layer_ids if i < layer]
    for name, wrong, side in (("engram_layer_ids", above, "above"), ("dspark_target_layer_ids", below, "below")):
        if wrong:
            raise ValueError(f"prefill: 'replay' cuts at layer {layer}; {name} has {wrong[0]}, {side} it")
    return layer


def init_tail(cfg: Config, batch: int, num: Numerics) -> Tail:
    """An empty tail for `batch` sequences."""
    window, streams = cfg.sliding_window, cfg.hc_mult
    return Tail(
        jnp.zeros((batch, window, streams * cfg.hidden_size), num.dtype),
        jnp.zeros((batch, window, streams), jnp.float32),
        jnp.zeros((batch, window, 1), bool),
    )


def encode(
    params: Transformer,
    tokens: Int32[Array, "B T"],
    cache: Cache,
    tail: Tail,
    cfg: Config,
    *,
    num: Numerics,
    count: Int32[Array, " B"],
    rows: Sequence[EngramRows] = (),
    image: ImageInput | None = None,
) -> tuple[Cache, Tail]:
    """The layers below the cut, and the cut's entries, for a chunk of a prompt: (cache, tail) after it."""
    last = cut(cfg)
    span = Span.after(cache.length, count, tokens.shape[1])
    memory = dict(zip(cfg.engram_layer_ids, rows, strict=True))
    mask = None if image is None else image.mask
    x, mix = enter(params, tokens, image, cfg, num)
    x, mix, cache, _ = through(params, cfg.layers[:last], x, mix, cache, span, num, rows=memory, image=mask)
    layers = list(cache.layers)
    x, layers[last] = params.layers[last].store(x, mix, layers[last], span, num, rows=memory.get(last), image=mask)
    inside = jnp.zeros(tokens.shape, bool) if mask is None else mask
    tail = Tail(
        push_ring(tail.x, x.reshape(*x.shape[:2], -1), span),
        push_ring(tail.mix, mix, span),
        push_ring(tail.image, inside[..., None], span),
    )
    return Cache(span.end, cache.history, tuple(layers), cache.drafts, cache.capacity), tail


def decode(
    params: Transformer, cache: Cache, tail: Tail, cfg: Config, *, num: Numerics
) -> tuple[Float32[Array, "B 1 V"], Cache]:
    """The cut and the layers above it, on the last W tokens: (logits behind each row's last token, cache)."""
    window = cfg.sliding_window
    count = jnp.minimum(cache.length, window)
    span = Span.after(cache.length - count, count, window, replay=True)

    def in_order(ring: Array) -> Array:
        return jnp.take_along_axis(ring, (span.positions % window)[..., None], axis=1)

    x = in_order(tail.x).reshape(*span.positions.shape, cfg.hc_mult, cfg.hidden_size)
    image = in_order(tail.image)[..., 0] if cfg.has_vision else None
    x, mix, cache, taps = through(
        params, cfg.layers[cut(cfg) :], x, in_order(tail.mix), cache, span, num, rows={}, image=image
    )
    logits, cache, _ = leave(params, x, mix, taps, cache, span, cfg, num, last_only=True)
    return logits, cache
