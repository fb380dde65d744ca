"""The model: parameters, and the forward pass as a pure function of them (paper section 2; architecture 0).

Prefill, a chunk of a prefill and a decode step are this one function with a different T.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv41_jax.attention import Published
from dsv41_jax.block import Block, expand
from dsv41_jax.cache import Cache, Span
from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.dspark import DraftStage, observe
from dsv41_jax.engram import EngramRows
from dsv41_jax.linear import Linear, map_parameters, product_f32
from dsv41_jax.norm import RMSNorm
from dsv41_jax.quant import Numerics
from dsv41_jax.vision import Aligner, ImageInput, Vision, delimiter
from pallas_kernels import mhc
from pallas_kernels.formats import cast


class Transformer(nnx.Module):
    """All parameters that live on devices, under the checkpoint's names. Engram tables stay on the host."""

    def __init__(self, cfg: Config):
        self.embed = Linear(cfg.vocab_size, cfg.hidden_size, ("vocab", "width"))
        experts, per_token = cfg.n_routed_experts, cfg.num_experts_per_tok
        self.layers = nnx.List([Block(cfg, plan, experts, per_token) for plan in cfg.layers])
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.head = Linear(cfg.vocab_size, cfg.hidden_size, ("vocab", "width"))
        self.mtp = nnx.List([DraftStage(cfg, stage) for stage in range(cfg.num_nextn_predict_layers)])
        if cfg.has_vision:
            self.vision, self.aligner = Vision(cfg), Aligner(cfg)
            self.image_start, self.image_newline, self.image_end = (delimiter(cfg) for _ in range(3))


def enter(
    params: Transformer, tokens: Int32[Array, "B T"], image: ImageInput | None, cfg: Config, num: Numerics
) -> tuple[Float[Array, "B T M D"], Float32[Array, "B T M"]]:
    """(streams, mix) of tokens: their embeddings, or those of image spans in their places."""
    h = cast(params.embed.weight[...][tokens], num.dtype)
    if image is not None:
        h = jnp.where(image.mask[..., None], cast(image.rows, num.dtype), h)
    return expand(h, cfg.hc_mult)


def through(
    params: Transformer,
    plans: Sequence[LayerPlan],
    x: Float[Array, "B T M D"],
    mix: Float32[Array, "B T M"],
    cache: Cache,
    span: Span,
    num: Numerics,
    *,
    rows: Mapping[int, EngramRows],
    image: Bool[Array, "B T"] | None,
) -> tuple[Float[Array, "B T M D"], Float32[Array, "B T M"], Cache, dict[str, Array]]:
    """Run consecutive layers: (streams, mix, the cache with their new states, taps). `rows` are by layer."""
    published, layers, taps = Published(), list(cache.layers), dict[str, Array]()
    for plan in plans:
        block, state, memory = params.layers[plan.id], layers[plan.id], rows.get(plan.id)
        x, mix, published, state, seen = block(x, mix, published, state, span, num, rows=memory, image=image)
        layers[plan.id] = state
        taps |= {f"layers.{plan.id}.{name}": value for name, value in seen.items()}
    return x, mix, replace(cache, layers=tuple(layers)), taps


def leave(
    params: Transformer,
    x: Float[Array, "B T M D"],
    mix: Float32[Array, "B T M"],
    taps: dict[str, Array],
    cache: Cache,
    span: Span,
    cfg: Config,
    num: Numerics,
    *,
    last_only: bool,
) -> tuple[Float32[Array, "B T_out V"], Cache, dict[str, Array]]:
    """(logits, the cache with the drafters' rings and the length after `span`, taps)."""
    if last_only:
        newest = jnp.maximum(span.count - 1, 0)[:, None, None]
        x = jnp.take_along_axis(x, newest[..., None], axis=1)
        mix = jnp.take_along_axis(mix, newest, axis=1)
    hidden = params.norm(cast(mhc.collapse(x, mix), num.dtype), num)
    taps, drafts = taps | {"final_norm": hidden}, cache.drafts
    if drafts:
        features = [taps[f"layers.{layer}.draft_feature"] for layer in cfg.dspark_target_layer_ids]
        taps["main_hidden"] = jnp.concatenate(features, axis=-1)
        drafts = observe(params.mtp, taps["main_hidden"], drafts, span, num)
    return product_f32(hidden, params.head.weight[...]), replace(cache, drafts=drafts, length=span.end), taps


def forward(
    params: Transformer,
    tokens: Int32[Array, "B T"],
    cache: Cache,
    cfg: Config,
    *,
    num: Numerics,
    count: Int32[Array, " B"] | None = None,
    rows: Sequence[EngramRows] = (),
    image: ImageInput | None = None,
    last_only: bool = False,
    replay: bool = False,
) -> tuple[Float32[Array, "B T_out V"], Cache, dict[str, Array]]:
    """(logits, the cache after these tokens, every intermediate by name). Pure; compile it with `jax.jit`.

    `count` says how many of the T tokens of each row are live (default: all); the rest is padding on the right.
    `rows` are the Engram rows of the call (`engram.Memory.read`), one record a layer that has them. `image` holds the
    embeddings of image spans, which overwrite those of the placeholder ids. `last_only` gives the logits of each row's
    last live position instead of all T. `replay` rebuilds the windows of the last `count` tokens that the cache holds,
    instead of appending new ones. Intermediates that nobody uses cost nothing under jit.
    """
    batch, width = tokens.shape
    count = jnp.full((batch,), width, jnp.int32) if count is None else count
    span = Span.after(cache.length - count if replay else cache.length, count, width, replay=replay)
    memory = dict(zip(cfg.engram_layer_ids, rows, strict=True))
    mask = None if image is None else image.mask
    x, mix = enter(params, tokens, image, cfg, num)
    x, mix, cache, taps = through(params, cfg.layers, x, mix, cache, span, num, rows=memory, image=mask)
    return leave(params, x, mix, taps, cache, span, cfg, num, last_only=last_only)


def abstract_parameters(cfg: Config) -> Transformer:
    """The parameter tree as shapes and dtypes: nothing is allocated, whatever the size."""
    return nnx.eval_shape(lambda: Transformer(cfg))


def spread(path: tuple[Any, ...], leaf: Any) -> tuple[float, float]:
    """(centre, deviation) of a random parameter that keeps activations of unit scale, and every bias and gate in use.
    Of E8M0 scales: one code. Packed weights (uint8) are any bytes."""
    name, shape = str(path[-1]), leaf.shape
    if name == "scale":
        codes = 3.0 if len(shape) == 3 else 1.0  # random E2M1 codes against unit normal E4M3 values
        return 127.0 - round(math.log2(codes * (32 * shape[-1]) ** 0.5)), 0.0
    if len(shape) > 1 and name not in ("q_weight", "k_weight"):
        unit = leaf.dtype == jnp.float8_e4m3fn or path[0] == "embed"
        return 0.0, 1.0 if unit else shape[-1] ** -0.5
    return float(name.endswith(("weight", "_scale"))), 0.1


def random_parameters(cfg: Config, seed: int = 0) -> Transformer:
    """Parameters for tests and benchmarks, in their stored dtypes."""
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], leaf: Any) -> Array:
        centre, deviation = spread(path, leaf)
        if leaf.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        if leaf.dtype == jnp.float8_e8m0fnu:
            return jnp.asarray(np.full(leaf.shape, centre, np.uint8).view(leaf.dtype))
        return jnp.asarray((centre + deviation * rng.standard_normal(leaf.shape)).astype(leaf.dtype))

    return map_parameters(value, abstract_parameters(cfg))
