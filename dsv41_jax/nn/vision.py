"""Images on the device: the vision transformer and the aligner (paper 2.1.1; config keys `vision_config.*`).

    tower     x += attn(norm1 x); x += mlp(norm2 x); all patches of one image see each other; rotary over rows (first
              half of the pairs) and columns (second half), channel j paired with j + width / 2
    aligner   windows of r x r patches, channel-major, zeros past the edge; w2 gelu(w1 x + b1) + b2, the exact gelu

Every norm here has eps 1e-6. From files to patches: `engine.images`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from dsv41_jax.config import Config
from dsv41_jax.nn.linear import Linear, parameter
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.nn.rope import frequencies
from dsv41_jax.numerics import Numerics
from pallas_kernels.formats import cast

EPS = 1e-6


def rotate_2d(x: Float[Array, "P N H"], places: Int32[Array, "P 2"], theta: float) -> Float[Array, "P N H"]:
    """Rotary over rows and columns, half-split pairing."""
    half = x.shape[-1] // 2
    angles = places.astype(jnp.float32)[..., None] * frequencies(half, theta)
    angles = rearrange(angles, "p places pairs -> p 1 (places pairs)")
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return cast(turned, x.dtype)


def _add(x: Float[Array, "P X"], y: Float[Array, "P X"]) -> Float[Array, "P X"]:
    return cast(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


class VisionAttention(nnx.Module):
    """All live patches see each other."""

    def __init__(self, cfg: Config):
        width = cfg.vision_hidden_size
        self.wqkv = Linear(3 * width, width, ("heads", "width"), bias=True)
        self.wo = Linear(width, width, ("width", "heads"), bias=True)

    @jax.named_scope("attn")
    def __call__(
        self,
        x: Float[Array, "P X"],
        places: Int32[Array, "P 2"],
        live: Bool[Array, " P"],
        *,
        cfg: Config,
        numerics: Numerics,
    ) -> Float[Array, "P X"]:
        q, k, v = rearrange(self.wqkv(x, numerics), "p (k n h) -> k p n h", k=3, n=cfg.vision_num_attention_heads)
        q, k = (rotate_2d(part, places, cfg.vision_rope_theta) for part in (q, k))
        scores = jnp.einsum("qnh,knh->nqk", q, k, precision="highest", preferred_element_type=jnp.float32)
        p = jax.nn.softmax(jnp.where(live, scores * q.shape[-1] ** -0.5, -jnp.inf), axis=-1)
        values = jnp.where(live[:, None, None], v.astype(jnp.float32), 0.0)  # 0 * NaN is NaN
        o = jnp.einsum("nqk,knh->qnh", p, values, precision="highest")
        return self.wo(rearrange(cast(o, numerics.dtype), "p n h -> p (n h)"), numerics)


class VisionMLP(nnx.Module):
    """`w1` holds the gate's rows, then the up projection's."""

    def __init__(self, width: int, hidden: int):
        self.w1 = Linear(2 * hidden, width, ("hidden", "width"))
        self.w2 = Linear(width, hidden, ("width", "hidden"))

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "P X"], numerics: Numerics) -> Float[Array, "P X"]:
        gate, up = jnp.split(self.w1(x, numerics).astype(jnp.float32), 2, axis=-1)
        gate = cast(jax.nn.silu(gate), numerics.dtype).astype(jnp.float32)
        return self.w2(cast(gate * up, numerics.dtype), numerics)


class VisionBlock(nnx.Module):
    """One layer of the tower."""

    def __init__(self, cfg: Config):
        self.norm1 = RMSNorm(cfg.vision_hidden_size)
        self.attn = VisionAttention(cfg)
        self.norm2 = RMSNorm(cfg.vision_hidden_size)
        self.mlp = VisionMLP(cfg.vision_hidden_size, cfg.vision_intermediate_size)

    def __call__(
        self,
        x: Float[Array, "P X"],
        places: Int32[Array, "P 2"],
        live: Bool[Array, " P"],
        *,
        cfg: Config,
        numerics: Numerics,
    ) -> Float[Array, "P X"]:
        x = _add(x, self.attn(self.norm1(x, EPS, numerics), places, live, cfg=cfg, numerics=numerics))
        return _add(x, self.mlp(self.norm2(x, EPS, numerics), numerics))


class PatchEmbed(nnx.Module):
    """The projection of a flattened patch."""

    def __init__(self, cfg: Config):
        self.proj = Linear(cfg.vision_hidden_size, 3 * cfg.vision_patch_size**2, ("width", "patch"), bias=True)


class Vision(nnx.Module):
    """The tower: patches of one image to one vector each. Padding (not `live`) is seen by nobody."""

    def __init__(self, cfg: Config):
        self.patch_embed = PatchEmbed(cfg)
        self.blocks = nnx.List([VisionBlock(cfg) for _ in range(cfg.vision_num_hidden_layers)])
        self.norm = RMSNorm(cfg.vision_hidden_size)

    @jax.named_scope("vision")
    def __call__(
        self,
        patches: Float[Array, "P K"],
        places: Int32[Array, "P 2"],
        live: Bool[Array, " P"],
        *,
        cfg: Config,
        numerics: Numerics,
    ) -> Float[Array, "P X"]:
        x = self.patch_embed.proj(cast(patches, numerics.dtype), numerics)
        for number, block in enumerate(self.blocks):
            with jax.named_scope(f"blocks.{number}"):
                x = block(x, places, live, cfg=cfg, numerics=numerics)
        return self.norm(x, EPS, numerics)


class Aligner(nnx.Module):
    """Square windows of `downsample_ratio` patches a side become one vector of width D."""

    def __init__(self, cfg: Config):
        window = cfg.vision_hidden_size * cfg.vision_downsample_ratio**2
        self.w1 = Linear(cfg.hidden_size, window, ("width", "patch"), bias=True)
        self.w2 = Linear(cfg.hidden_size, cfg.hidden_size, ("width", "width"), bias=True)

    @jax.named_scope("aligner")
    def __call__(
        self, x: Float[Array, "P X"], windows: Int32[Array, "cells square"], numerics: Numerics
    ) -> Float[Array, "cells D"]:
        taken = jnp.where((windows >= 0)[..., None], x[jnp.maximum(windows, 0)], jnp.zeros((), x.dtype))
        unfolded = rearrange(taken, "cells square x -> cells (x square)")
        hidden = jax.nn.gelu(self.w1(unfolded, numerics).astype(jnp.float32), approximate=False)
        return self.w2(cast(hidden, numerics.dtype), numerics)


def delimiter(cfg: Config) -> nnx.Param:
    """One learned vector of the span: `image_start`, `image_newline` or `image_end`."""
    return parameter((cfg.hidden_size,), jnp.bfloat16, ("width",))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ImageInput:
    """Image spans of a call: `mask` marks their positions, `embeddings` holds what stands there."""

    mask: Bool[Array, "B T"]
    embeddings: Float[Array, "B T D"]

    def part(self, first: int, last: int) -> "ImageInput":
        """Positions first .. last - 1, for a call with a part of the tokens; no image past the end."""
        short = ((0, 0), (0, max(0, last - self.mask.shape[1])))
        mask, embeddings = self.mask[:, first:last], self.embeddings[:, first:last]
        return ImageInput(jnp.pad(mask, short), jnp.pad(embeddings, (*short, (0, 0))))

    def take(self, place: Int32[Array, "B K"] | np.ndarray) -> "ImageInput":
        """The positions `place` of each row."""
        embeddings = jnp.take_along_axis(self.embeddings, jnp.asarray(place)[..., None], axis=1)
        return ImageInput(jnp.take_along_axis(self.mask, jnp.asarray(place), axis=1), embeddings)


def embed_patches(
    vision: Vision,
    aligner: Aligner,
    patches: Float[Array, "P K"],
    places: Int32[Array, "P 2"],
    windows: Int32[Array, "cells square"],
    count: Int32[Array, ""],
    *,
    cfg: Config,
    numerics: Numerics,
) -> tuple[Float[Array, "P X"], Float[Array, "cells D"]]:
    """(tower output, aligner output) of one image whose first `count` patches are live."""
    live = jnp.arange(patches.shape[0]) < count
    features = vision(patches, places, live, cfg=cfg, numerics=numerics)
    return features, aligner(features, windows, numerics)
