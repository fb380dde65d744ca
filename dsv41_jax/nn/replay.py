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

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Float32

from dsv41_jax.config import Config
from dsv41_jax.nn.block import Streams
from dsv41_jax.nn.cache import Cache, Span, push_ring
from dsv41_jax.nn.transformer import Call, Output, Transformer, embed, logits, run_layers
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


def init_tail(cfg: Config, batch: int, numerics: Numerics) -> Tail:
    """An empty tail for `batch` sequences."""
    window, streams = cfg.sliding_window, cfg.hc_mult
    return Tail(
        jnp.zeros((batch, window, streams * cfg.hidden_size), numerics.dtype),
        jnp.zeros((batch, window, streams), jnp.float32),
        jnp.zeros((batch, window, 1), bool),
    )


def run_below_cut(
    params: Transformer, call: Call, cache: Cache, tail: Tail, *, cfg: Config, numerics: Numerics
) -> tuple[Cache, Tail]:
    """The layers below the cut, and the cut's entries, for a chunk of a prompt: (cache, tail) after it."""
    last, span = cut(cfg), call.span(cache.length)
    how: dict[str, Any] = {"cfg": cfg, "numerics": numerics}
    streams = embed(params, call, **how)
    engram, image = call.engram_of(cfg), call.image_mask
    below = cfg.layers[:last]
    streams, cache, _ = run_layers(params, below, streams, cache, span, engram=engram, image=image, **how)
    with jax.named_scope(f"layers.{last}"):
        streams, state = params.layers[last].store(
            streams, cache.layers[last], span, plan=cfg.layers[last], engram=engram.get(last), image=image, **how
        )
    inside = jnp.zeros(call.tokens.shape, bool) if image is None else image
    tail = Tail(
        push_ring(tail.x, rearrange(streams.x, "b t m d -> b t (m d)"), span),
        push_ring(tail.mix, streams.mix, span),
        push_ring(tail.image, inside[..., None], span),
    )
    layers = (*cache.layers[:last], state, *cache.layers[last + 1 :])
    return replace(cache, length=span.end, layers=layers), tail


def run_above_cut(params: Transformer, cache: Cache, tail: Tail, *, cfg: Config, numerics: Numerics) -> Output:
    """The cut and the layers above it, on the last W tokens: logits [B, 1, V] behind each row's last token."""
    window = cfg.sliding_window
    count = jnp.minimum(cache.length, window)
    span = Span.after(cache.length - count, count, window, replay=True)

    def in_order(ring: Array) -> Array:
        return jnp.take_along_axis(ring, (span.positions % window)[..., None], axis=1)

    x = rearrange(in_order(tail.x), "b w (m d) -> b w m d", m=cfg.hc_mult)
    image = in_order(tail.image)[..., 0] if cfg.has_vision else None
    streams, above = Streams(x, in_order(tail.mix)), cfg.layers[cut(cfg) :]
    how: dict[str, Any] = {"cfg": cfg, "numerics": numerics}
    streams, cache, taps = run_layers(params, above, streams, cache, span, engram={}, image=image, **how)
    return logits(params, streams, cache, span, taps, last_only=True, **how)
