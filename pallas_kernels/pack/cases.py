"""Shapes of the cached rows, and what their bytes must be.

A group of channels whose bfloat16 values float64 decides, by more than float32 arithmetic can err, must have exactly
the bytes that the formats say. Where a value lies on the edge of two bfloat16 numbers (one group in fifty), either may
be written: there the bytes must be those of one of the two roundings' neighbours, a code away at most.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.oracle64 import E2M1, E4M3, bfloat16, sample
from pallas_kernels.pack import kernel, reference

EPS = 1e-20
SLACK = 2.0**-20  # float32 of a norm's sum and product, of an angle's cosine, of a rotation: a few times 2**-23 each


def inputs(seed: int, *, batch: int, tokens: int, channels: int, layout: str, slots: int) -> tuple[Any, ...]:
    """Rows of many sizes, one of them zeros; positions up to a million; a slot for most tokens, none for some; a store
    of random bytes."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    x = jax.random.normal(next(keys), (batch, tokens, channels))
    x *= jnp.exp2(jax.random.randint(next(keys), (batch, tokens, 1), -12, 12).astype(jnp.float32))
    x = x.at[0, 0].set(0).astype(jnp.bfloat16)
    positions = jax.random.randint(next(keys), (batch, 1), 0, 1 << 20, jnp.int32) + jnp.arange(tokens, dtype=jnp.int32)
    freqs = jnp.asarray(10000.0 ** (-np.arange(32) / 32), jnp.float32)
    norm = (1 + jax.random.normal(next(keys), (channels,)) / 8).astype(jnp.bfloat16)
    slot = jax.vmap(lambda key: jax.random.permutation(key, slots)[:tokens])(jax.random.split(next(keys), batch))
    slot = jnp.where(jnp.arange(tokens) % 8 == 5, jnp.array([-1, slots + 3])[slot % 2], slot).astype(jnp.int32)
    store = jax.random.bits(next(keys), (batch, slots, reference.width(channels, layout)), jnp.uint8)
    return store, x, positions, slot, freqs, norm


def values(x: np.ndarray, positions: np.ndarray, freqs: np.ndarray, norm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what each channel rounds to, whether float32 may round it otherwise) of rows [K, C], in float64."""
    exact = norm * (x / np.sqrt((x * x).mean(1, keepdims=True) + EPS))
    normed, open_ = bfloat16(exact), bfloat16(exact * (1 - SLACK)) != bfloat16(exact * (1 + SLACK))
    first = x.shape[1] - 2 * len(freqs)
    angle = (positions.astype(np.float32)[:, None] * freqs.astype(np.float32)).astype(np.float64)
    even, odd = normed[:, first::2], normed[:, first + 1 :: 2]
    turned = np.stack([even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)], 2)
    slack = SLACK * (np.abs(even) + np.abs(odd))[..., None]
    either = (bfloat16(turned - slack) != bfloat16(turned + slack)) | (open_[:, first::2] | open_[:, first + 1 :: 2])[
        ..., None
    ]
    shape = (len(x), -1)
    return (
        np.concatenate([normed[:, :first], bfloat16(turned).reshape(shape)], 1),
        np.concatenate([open_[:, :first], either.reshape(shape)], 1),
    )


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending grid, ties to the even index, the ends saturating."""
    right = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = x - grid[right - 1], grid[right] - x
    return np.where((low < high) | ((low == high) & (right % 2 == 1)), right - 1, right)


def codes(rows: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """(signed codes [K, groups, size], scale bytes [K, groups]) of bfloat16 values, from the formats' tables."""
    groups = rows.reshape(len(rows), -1, reference.GROUPS[layout])
    amax = np.maximum(np.abs(groups).max(2), np.float32(reference.FLOOR[layout]))
    if layout == "nvfp4":
        scale = nearest(amax / 6, E4M3[:127])
        value = E4M3[scale]
    else:
        top = np.float32(1 / 448) if layout == "fp8" else np.float32(1 / 6)
        exponent = np.ceil(np.log2((amax.astype(np.float32) * top).astype(np.float64))).astype(int)
        scale, value = exponent + 127, 2.0**exponent
    size = nearest(np.abs(groups) / value[..., None], E4M3[:127] if layout == "fp8" else E2M1[:8])
    return np.where(np.signbit(groups), -1 - size, size), scale


def problems(given: tuple[Any, ...], output: Any, layout: str) -> list[str]:
    """Bytes of written rows that are wrong, and rows that were to stay and did not."""
    store, x, positions, slots, freqs, norm = (np.asarray(a) for a in given)
    output = np.asarray(output)
    batch, token = np.nonzero((slots >= 0) & (slots < store.shape[1]))
    kept = np.ones(store.shape[:2], bool)
    kept[batch, slots[batch, token]] = False
    found = [] if np.array_equal(output[kept], store[kept]) else ["rows that no slot names changed"]
    chosen = sample(len(batch), 512)
    batch, token = batch[chosen], token[chosen]
    rows = output[batch, slots[batch, token]]
    exact, open_ = values(x[batch, token].astype(np.float64), positions[batch, token], freqs, norm.astype(np.float64))
    size, scale = codes(exact, layout)
    channels = x.shape[-1]
    ends = channels if layout == "fp8" else channels // 2
    high = 7 if layout == "fp8" else 3
    byte = rows[:, :ends] if layout == "fp8" else np.stack([rows[:, :ends] & 15, rows[:, :ends] >> 4], 2)
    byte = byte.reshape(size.shape).astype(int)
    ours = np.where(byte >> high == 1, -1 - (byte & ((1 << high) - 1)), byte)
    open_ = open_.reshape(size.shape).any(2)
    wrong = (ours != size).any(2) | (rows[:, ends:].astype(int) != scale)
    far = (np.abs(np.where(ours < 0, -1 - ours, ours) - np.where(size < 0, -1 - size, size)) > 8).any(2)
    for name, bad in (("decided", wrong & ~open_), ("open", wrong & open_ & far)):
        if bad.any():
            row, group = np.argwhere(bad)[0]
            at = f"sequence {batch[row]}, token {token[row]}, group {group}"
            found.append(f"{bad.sum()} {name} groups of {bad.size} have wrong bytes, first {at}")
    return found


def case(name: str, layout: str, *, batch: int, tokens: int, channels: int, slots: int) -> Case:
    """`insert` of tokens into a store of `slots` rows a sequence."""
    how: dict[str, Any] = {"eps": EPS, "layout": layout}
    row = reference.width(channels, layout)
    return Case(
        name=name,
        inputs=partial(inputs, batch=batch, tokens=tokens, channels=channels, layout=layout, slots=slots),
        kernel=partial(kernel.insert, **how),
        reference=partial(reference.insert, **how),
        problems=partial(problems, layout=layout),
        nbytes=float(batch * tokens * (2 * channels + row + 8)),
    )


SMALL = (
    case("window", "fp8", batch=2, tokens=9, channels=128, slots=12),
    case("main", "nvfp4", batch=1, tokens=11, channels=128, slots=16),
    case("index", "mxfp4", batch=3, tokens=3, channels=128, slots=5),
)
MODEL = (
    case("window-8192", "fp8", batch=1, tokens=8192, channels=512, slots=8192),
    case("main-8192", "nvfp4", batch=1, tokens=8192, channels=512, slots=65536),
    case("index-8192", "mxfp4", batch=1, tokens=8192, channels=128, slots=65536),
    case("window-128x1", "fp8", batch=128, tokens=1, channels=512, slots=132),
    case("main-128x1", "nvfp4", batch=128, tokens=1, channels=512, slots=4096),
    case("index-1x1", "mxfp4", batch=1, tokens=1, channels=128, slots=65536),
)
