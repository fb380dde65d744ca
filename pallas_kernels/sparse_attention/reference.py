"""Sparse attention in plain jnp: gather the rows that each query reads, then one softmax with a sink.

    s[n, k] = scale * q[n] . row[k]        over window rows and selected rows together; K = V = the latent row
    o[n]    = sum_k exp(s[n, k]) row[k] / (sum_k exp(s[n, k]) + exp(sink[n]))

The released kernel walks the keys in blocks of 64 and rounds exp(s - running max) to the activation dtype before it
multiplies the values, while the denominator sums the unrounded float32. The running maximum makes that rounding depend
on the block, so the blocks are kept here; with float32 rows the rounding is the identity and they change nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.formats import cast

Unpack = Callable[[Array, DTypeLike], Array]
BLOCK = 64
LEAST = -1e30  # where the running maximum starts: a query without any key gives 0, not NaN


def gather(
    rows: Shaped[Array, "B S row"], ids: Int32[Array, "B T K"], width: int, dtype: DTypeLike, unpack: Unpack | None
) -> Float[Array, "B T K H"]:
    """rows[b, ids[b, t, k]], unpacked, and exact zeros where the id is -1, whatever those rows hold."""
    if rows.shape[1] == 0:
        return jnp.zeros((*ids.shape, width), dtype)
    taken = jax.vmap(lambda r, i: r[i])(rows, jnp.clip(ids, 0, rows.shape[1] - 1))
    taken = taken if unpack is None else unpack(taken, dtype)
    return jnp.where((ids >= 0)[..., None], taken, jnp.zeros((), dtype))


def sparse_attention(
    q: Float[Array, "B T N H"],
    window: Shaped[Array, "B X window_row"],
    window_ids: Int32[Array, "B T W"],
    main: Shaped[Array, "B S main_row"],
    main_ids: Int32[Array, "B T C"],
    sink: Float32[Array, " N"],
    *,
    scale: float,
    unpack_window: Unpack | None = None,
    unpack_main: Unpack | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B T N"]]:
    ids = jnp.concatenate([window_ids, main_ids], axis=-1)
    sources = ((window, window_ids, unpack_window), (main, main_ids, unpack_main))
    rows = jnp.concatenate([gather(r, i, q.shape[-1], q.dtype, unpack) for r, i, unpack in sources], axis=2)
    pad = -ids.shape[-1] % BLOCK
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, pad)), constant_values=-1)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pad), (0, 0)))
    scores = jnp.einsum("btnh,btkh->btnk", q, rows, precision="highest", preferred_element_type=jnp.float32)
    scores = jnp.where((ids >= 0)[:, :, None], scores * scale, -jnp.inf)
    blocks = scores.reshape(*scores.shape[:-1], -1, BLOCK)
    running = jax.lax.cummax(jnp.maximum(blocks.max(axis=-1), LEAST), axis=3)
    top = jnp.where(running[..., -1:] > LEAST, running[..., -1:], sink[:, None])  # no key at all: only the sink
    p = jnp.exp(blocks - running[..., None])
    rescale = jnp.exp(running - top)
    total = jnp.sum(p.sum(axis=-1) * rescale, axis=-1) + jnp.exp(sink - top[..., 0])
    p = cast(p, q.dtype).astype(jnp.float32)
    p = (p * rescale[..., None]).reshape(scores.shape)
    values = rows.astype(jnp.float32)
    o = jnp.einsum("btnk,btkh->btnh", p, values, precision="highest", preferred_element_type=jnp.float32)
    return o / total[..., None], top[..., 0] + jnp.log(total)
