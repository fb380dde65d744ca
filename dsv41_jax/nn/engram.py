"""Engram: rows of a huge table, found by hashing (`engine.ngrams`), gated into the streams (paper 2.4.2).

    key, value (the table rows of all n-gram sizes and heads, side by side) Wkv      M keys and one value of width D
    d_m        sum(X_m q_m k_m key_m) rsqrt(mean X_m^2 + eps) rsqrt(mean key_m^2 + eps) D^-0.5
    gate_m     sigmoid(sign(d_m) sqrt(max(|d_m|, 1e-6)));   X_m += gate_m * value

The tables are no parameters: a call brings the rows that it needs, as the bytes of the checkpoint.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from dsv41_jax.config import Config
from dsv41_jax.nn.linear import QuantizedLinear, parameter
from dsv41_jax.numerics import Numerics, unpack_fp8
from pallas_kernels.formats import cast


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngramRows:
    """What a call needs of one table: the row of each column, as stored, and which positions may use it."""

    weight: UInt8[Array, "B T columns width"]
    scale: UInt8[Array, "B T columns groups"]
    ids: Int32[Array, "B T columns"]


def gates(
    x: Float[Array, "B T M D"],
    key: Float[Array, "B T M D"],
    q_weight: Float[Array, "M D"],
    k_weight: Float[Array, "M D"],
    *,
    eps: float,
) -> Float32[Array, "B T M"]:
    """gate_m, in float32. -0 counts as negative; the gradient at d = 0 is zero, not infinite."""
    x, key = x.astype(jnp.float32), key.astype(jnp.float32)
    weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    rms = [jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps) for v in (x, key)]
    d = jnp.sum(x * weight * key, axis=-1) * rms[0] * rms[1] * x.shape[-1] ** -0.5
    return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(d), 1e-6)), d))


class Engram(nnx.Module):
    """The device side: `wkv`, `q_weight`, `k_weight`. The checkpoint's table `embed` lies with `engine.tables`."""

    def __init__(self, cfg: Config):
        streams, width = cfg.hc_mult, cfg.hidden_size
        self.wkv = QuantizedLinear((streams + 1) * width, cfg.engram_columns * cfg.engram_head_dim, ("width", "ngram"))
        self.q_weight = parameter((streams, width), jnp.bfloat16, ("streams", "width"))
        self.k_weight = parameter((streams, width), jnp.bfloat16, ("streams", "width"))

    @jax.named_scope("engram")
    def __call__(
        self,
        x: Float[Array, "B T M D"],
        rows: EngramRows,
        image: Bool[Array, "B T"] | None,
        *,
        eps: float,
        numerics: Numerics,
    ) -> tuple[Float[Array, "B T M D"], dict[str, Array]]:
        """(streams with the memory added, taps). Image positions stay as they are."""
        values = unpack_fp8(jnp.concatenate([rows.weight, rows.scale], axis=-1), numerics.dtype)
        kv = self.wkv(rearrange(values, "b t columns width -> b t (columns width)"), numerics)
        kv = rearrange(kv, "b t (m d) -> b t m d", d=x.shape[-1])
        key, value = kv[..., :-1, :], kv[..., -1:, :]
        gate = gates(x, key, self.q_weight[...], self.k_weight[...], eps=eps)
        if image is not None:
            gate = jnp.where(image[..., None], 0.0, gate)
        out = cast(x.astype(jnp.float32) + gate[..., None] * value.astype(jnp.float32), numerics.dtype)
        return out, {"engram_hash_ids": rows.ids, "engram_gate": gate, "engram_out": out}
