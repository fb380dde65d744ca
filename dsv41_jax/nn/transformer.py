"""The model: parameters, and the forward pass as a pure function of them (paper 2).

    streams  = embed(tokens)                                 each token's embedding in M residual streams
    streams  = layer N of (streams), N = 0, 1, ...           `config.LayerPlan` says what each is, `block` what it does
    logits   = norm(collapsed streams) head^T

Prefill, a chunk of a prefill and a decode step are this one function with a different T. The parameters know nothing of
the config that they are called with: roles, candidates and sizes of a selection are those of the call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from dsv41_jax.config import Config, LayerPlan
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.block import Block, Streams, collapse, to_streams
from dsv41_jax.nn.cache import Cache, HostOrDevice, Span
from dsv41_jax.nn.dspark import DraftStage, write_draft_rings
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.linear import Linear, product_f32
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.nn.vision import Aligner, ImageInput, Vision, delimiter
from dsv41_jax.numerics import Numerics
from pallas_kernels.formats import cast


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Call:
    """What one run is given: `tokens`, of which each row's first `count` are live (the rest pads on the right), the
    Engram rows of each layer that has a table, and the embeddings of image spans, which overwrite those of the
    placeholder ids."""

    tokens: Int32[HostOrDevice, "B T"]
    count: Int32[HostOrDevice, " B"]
    engram: tuple[EngramRows, ...] = ()
    image: ImageInput | None = None

    def span(self, length: Int32[HostOrDevice, " B"], *, replay: bool = False) -> Span:
        """The positions of the tokens behind `length` earlier ones; in a replay, of the last `count` among those."""
        start = length - self.count if replay else length
        return Span.after(start, self.count, self.tokens.shape[1], replay=replay)

    def engram_of(self, cfg: Config) -> dict[int, EngramRows]:
        """The Engram rows by layer. Raises ValueError unless the call brings those of every layer that reads some."""
        if len(self.engram) != len(cfg.engram_layer_ids):
            raise ValueError(f"call: Engram rows of {len(self.engram)} layers, layers {cfg.engram_layer_ids} read some")
        return dict(zip(cfg.engram_layer_ids, self.engram, strict=True))

    @property
    def image_mask(self) -> Bool[Array, "B T"] | None:
        """The positions inside image spans; None: the call has no images."""
        return None if self.image is None else self.image.mask


class Output(NamedTuple):
    """Logits, the cache after the tokens, and intermediates by name."""

    logits: Float32[Array, "B T_out V"]
    cache: Cache
    taps: dict[str, Array]


class Transformer(nnx.Module):
    """All parameters that live on devices, under the checkpoint's names; called, it is the forward pass."""

    def __init__(self, cfg: Config):
        self.embed = Linear(cfg.vocab_size, cfg.hidden_size, ("vocab", "width"))
        self.layers = nnx.List([Block(cfg, plan) for plan in cfg.layers])
        self.norm = RMSNorm(cfg.hidden_size)
        self.head = Linear(cfg.vocab_size, cfg.hidden_size, ("vocab", "width"))
        self.mtp = nnx.List([DraftStage(cfg, plan) for plan in cfg.draft_stages])
        if cfg.has_vision:
            self.vision, self.aligner = Vision(cfg), Aligner(cfg)
            self.image_start, self.image_newline, self.image_end = (delimiter(cfg) for _ in range(3))

    def __call__(
        self,
        call: Call,
        cache: Cache,
        *,
        cfg: Config,
        numerics: Numerics,
        last_only: bool = False,
        replay: bool = False,
    ) -> Output:
        """Logits [B, T, V] in float32, the cache after these tokens, every intermediate. Pure; compile with `jax.jit`.

        `last_only` gives the logits of each row's last live position instead of all T. `replay` rebuilds the windows of
        the last `count` tokens that the cache holds, instead of appending new ones. Intermediates that nobody uses cost
        nothing under jit.
        """
        engram, image = call.engram_of(cfg), call.image_mask
        how: dict[str, Any] = {"cfg": cfg, "numerics": numerics}
        span, streams = call.span(cache.length, replay=replay), embed(self, call, **how)
        streams, cache, taps = run_layers(self, cfg.layers, streams, cache, span, engram=engram, image=image, **how)
        return logits(self, streams, cache, span, taps, last_only=last_only, **how)


@jax.named_scope("embed")
def embed(params: Transformer, call: Call, *, cfg: Config, numerics: Numerics) -> Streams:
    """The streams of tokens: their embeddings, or those of image spans in their places."""
    h = cast(params.embed.weight[...][call.tokens], numerics.dtype)
    if call.image is not None:
        h = jnp.where(call.image.mask[..., None], cast(call.image.embeddings, numerics.dtype), h)
    return to_streams(h, cfg.hc_mult)


class Layers(NamedTuple):
    """The streams behind some layers, the cache with their new states, and taps."""

    streams: Streams
    cache: Cache
    taps: dict[str, Array]


def run_layers(
    params: Transformer,
    plans: Sequence[LayerPlan],
    streams: Streams,
    cache: Cache,
    span: Span,
    *,
    cfg: Config,
    numerics: Numerics,
    engram: Mapping[int, EngramRows],
    image: Bool[Array, "B T"] | None,
) -> Layers:
    """Run consecutive layers. `engram` is what was looked up, by layer."""
    shared, layers, taps = Shared(), list(cache.layers), dict[str, Array]()
    for plan in plans:
        with jax.named_scope(f"layers.{plan.id}"):
            streams, shared, layers[plan.id], seen = params.layers[plan.id](
                streams,
                shared,
                layers[plan.id],
                span,
                plan=plan,
                cfg=cfg,
                numerics=numerics,
                engram=engram.get(plan.id),
                image=image,
            )
        taps |= {f"layers.{plan.id}.{name}": value for name, value in seen.items()}
    return Layers(streams, replace(cache, layers=tuple(layers)), taps)


@jax.named_scope("head")
def logits(
    params: Transformer,
    streams: Streams,
    cache: Cache,
    span: Span,
    taps: dict[str, Array],
    *,
    cfg: Config,
    numerics: Numerics,
    last_only: bool,
) -> Output:
    """The logits, and the cache with the drafters' rings and the length after `span`."""
    if last_only:
        newest = jnp.maximum(span.count - 1, 0)[:, None, None]
        x = jnp.take_along_axis(streams.x, newest[..., None], axis=1)
        streams = Streams(x, jnp.take_along_axis(streams.mix, newest, axis=1))
    hidden = params.norm(collapse(streams, numerics), cfg.rms_norm_eps, numerics)
    taps, drafts = taps | {"final_norm": hidden}, cache.drafts
    if drafts:
        features = [taps[f"layers.{layer}.draft_feature"] for layer in cfg.dspark_target_layer_ids]
        taps["main_hidden"] = jnp.concatenate(features, axis=-1)
        drafts = write_draft_rings(params.mtp, taps["main_hidden"], drafts, span, cfg=cfg, numerics=numerics)
    return Output(product_f32(hidden, params.head.weight[...]), replace(cache, drafts=drafts, length=span.end), taps)


def abstract_parameters(cfg: Config) -> Transformer:
    """The parameter tree as shapes and dtypes: nothing is allocated, whatever the size."""
    return nnx.eval_shape(lambda: Transformer(cfg))
