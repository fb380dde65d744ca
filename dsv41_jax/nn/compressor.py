"""The compressor of a Full layer: every `ratio` tokens become one latent (paper 2.3).

    ratio 1:  latent_t = rmsnorm(x_t Wkv)
    ratio r:  latent_j = rmsnorm(sum_i softmax_i(x_i Wgate) * (x_i Wkv)),  i = r j .. r j + r - 1, channel by channel

Groups do not overlap and carry no positional bias. The tokens of an unfinished group wait in rings in the cache.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv41_jax.config import Config
from dsv41_jax.nn.cache import LayerCache, Span, push_ring
from dsv41_jax.nn.linear import Linear, product_f32
from dsv41_jax.nn.norm import RMSNorm
from dsv41_jax.numerics import Numerics
from pallas_kernels.formats import cast


def group_positions(span: Span, ratio: int, tokens: int) -> tuple[Int32[Array, "B K r"], Bool[Array, "B K"]]:
    """Positions of the groups that a call of `tokens` may finish, the open one first, and which it does finish."""
    limit = -(-(tokens + ratio - 1) // ratio)
    group = (span.start // ratio)[:, None] + jnp.arange(limit, dtype=jnp.int32)
    position = group[..., None] * ratio + jnp.arange(ratio, dtype=jnp.int32)
    return position, position[..., -1] < span.end[:, None]


def rows_at(
    ring: Float32[Array, "B R H"], new: Float32[Array, "B T H"], position: Int32[Array, "B K r"], span: Span
) -> Float32[Array, "B K r H"]:
    """Rows of this call at `position`, and of the ring where that lies before it."""
    size, start = ring.shape[1], span.start[:, None, None]
    row = jnp.where(position < start, position % size, size + position - start)
    row = jnp.minimum(row, size + new.shape[1] - 1)
    return jax.vmap(lambda rows, index: rows[index])(jnp.concatenate([ring, new], axis=1), row)


def pool(kv: Float32[Array, "*lead r H"], gate: Float32[Array, "*lead r H"]) -> Float32[Array, "*lead H"]:
    """sum_i softmax_i(gate) * kv over a group, each channel with weights of its own."""
    return jnp.sum(jax.nn.softmax(gate, axis=-2) * kv, axis=-2)


class Compressed(NamedTuple):
    """Latents, of which the first `finished` of each row are whole, and the cache in which the rest waits. Latent k is
    that of entry start // ratio + k."""

    latent: Float[Array, "B K H"]
    finished: Int32[Array, " B"]
    cache: LayerCache


class Compressor(nnx.Module):
    """`wkv`, `norm`, and at a ratio above 1 `wgate`."""

    def __init__(self, cfg: Config, ratio: int):
        self.wkv = Linear(cfg.head_dim, cfg.hidden_size, ("latent", "width"))
        self.wgate = Linear(cfg.head_dim, cfg.hidden_size, ("latent", "width")) if ratio > 1 else None
        self.norm = RMSNorm(cfg.head_dim, "latent")

    @jax.named_scope("compressor")
    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache, span: Span, *, ratio: int, eps: float, numerics: Numerics
    ) -> Compressed:
        """The latents of the groups that these tokens may finish."""
        if self.wgate is None:
            return Compressed(self.norm(self.wkv(x, numerics), eps, numerics), span.count, cache)
        kv, gate = (product_f32(x, w.weight[...]) for w in (self.wkv, self.wgate))
        position, finished = group_positions(span, ratio, x.shape[1])
        latent = pool(*(rows_at(*rows, position, span) for rows in ((cache.open_kv, kv), (cache.open_gate, gate))))
        cache = replace(
            cache, open_kv=push_ring(cache.open_kv, kv, span), open_gate=push_ring(cache.open_gate, gate, span)
        )
        normed = self.norm(cast(latent, numerics.dtype), eps, numerics)
        return Compressed(normed, jnp.sum(finished, axis=1, dtype=jnp.int32), cache)
