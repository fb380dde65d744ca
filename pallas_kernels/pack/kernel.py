"""Cached rows: norm, rope, quantize and the write by slot in one launch.

**Why.** A token's row is 1 KB in and 68 to 528 bytes out: nothing but launches. XLA makes a reduction, two or three
fusions, a concatenation and a scatter of them for each cache of each layer; this is one.

**Numerics.** float32, rounded to bfloat16 after the norm and after the rotation, as the reference does, by integer
arithmetic on the bits (no compiler may skip it). Codes come from comparisons with multiples of the scale, scales from
exponent bits; an E4M3 scale starts from a product and is corrected by exact comparison with the midpoints beside it.
So the codes are those of the reference wherever both round to the same bfloat16: their float32 sums and cosines differ
in the last bit.

**Tiling.** One token a program. Channels that stand still are cut into pieces of powers of two (448 = 256 + 128 + 64),
the rotary ones are a piece of their own; every piece is held as its even and its odd channels, which is what both the
rotation and the two codes of a byte want. A dead slot skips the stores, so none is masked.

Backend: Pallas-Triton; a program is one warp, and there is nothing to pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels import BackendError
from pallas_kernels.formats import E4M3_MAX
from pallas_kernels.pack.reference import FLOOR, GROUPS, width
from pallas_kernels.target import choose_tile


@dataclass(frozen=True)
class Tile:
    """Warps of a program."""

    warps: int


H200 = B300 = Tile(warps=1)
E4M3_TOP = 0x7E  # the byte of 448
# E2M1's midpoints, and whether one goes up: ties go to the even mantissa.
E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def pieces(channels: int, rotary: int) -> list[tuple[int, int]]:
    """(first channel, count) of each piece, powers of two: the rotary channels are the last piece."""
    found, first, still = [], 0, channels - rotary
    while first < still:
        size = 1 << ((still - first).bit_length() - 1)
        found.append((first, size))
        first += size
    return [*found, (still, rotary)]


def _bits(x: Array, dtype: Any = jnp.int32) -> Array:
    return lax.bitcast_convert_type(x, dtype)


def _bfloat16(x: Array) -> Array:
    """float32 rounded to bfloat16's values, ties to even."""
    bits = _bits(x)
    return _bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, jnp.float32)


def _power(byte: Array) -> Array:
    """2**(byte - 127) of an E8M0 byte in int32; byte 0 is subnormal."""
    return _bits(jnp.where(byte == 0, 1 << 22, byte << 23), jnp.float32)


def _ceil_byte(x: Array) -> Array:
    return (_bits(x) + 0x7FFFFF) >> 23


def _e4m3_value(byte: Array) -> Array:
    return _bits(byte.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)


def _e4m3_byte(x: Array) -> Array:
    return _bits(x.astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.int32)


def _e4m3_sixth(amax: Array) -> Array:
    """The E4M3 byte nearest to amax / 6, ties to even, at most 448: a product's guess, then exact comparisons."""
    guess = _e4m3_byte(jnp.minimum(amax * jnp.float32(1 / 6), E4M3_MAX))
    odd = (guess & 1) == 1
    up = 3.0 * (_e4m3_value(guess) + _e4m3_value(jnp.minimum(guess + 1, E4M3_TOP)))
    down = 3.0 * (_e4m3_value(guess) + _e4m3_value(guess - 1))
    more = (guess < E4M3_TOP) & ((amax > up) | ((amax == up) & odd))
    less = (amax < down) | ((amax == down) & odd)
    return guess + more.astype(jnp.int32) - less.astype(jnp.int32)


def _e2m1(x: Array, scale: Array) -> Array:
    size = jnp.abs(x)
    code = jnp.where(_bits(x) < 0, 8, 0)
    for step, tie_up in E2M1_STEPS:
        over = (size >= step * scale) & (size > 0) if tie_up else size > step * scale
        code += over.astype(jnp.int32)
    return code


def _quantize(even: Array, odd: Array, layout: str) -> tuple[list[Array], Array]:
    """(code bytes of the even and odd channels, or of pairs; a scale byte a group) of one piece."""
    groups = even.shape[0] * 2 // GROUPS[layout]
    even, odd = (half.reshape(groups, -1) for half in (even, odd))
    amax = jnp.maximum(jnp.max(jnp.maximum(jnp.abs(even), jnp.abs(odd)), axis=1), jnp.float32(FLOOR[layout]))
    if layout == "fp8":
        scale = _ceil_byte(amax * jnp.float32(1 / E4M3_MAX))
        inverse = _power(254 - scale)[:, None]
        halves = (jnp.clip(half * inverse, -E4M3_MAX, E4M3_MAX) for half in (even, odd))
        return [_e4m3_byte(half).reshape(-1) for half in halves], scale
    scale = _e4m3_sixth(amax) if layout == "nvfp4" else _ceil_byte(amax * jnp.float32(1 / 6))
    value = (_e4m3_value(scale) if layout == "nvfp4" else _power(scale))[:, None]
    return [(_e2m1(even, value) | (_e2m1(odd, value) << 4)).reshape(-1)], scale


def _row(x_ref, position_ref, slot_ref, freqs_ref, norm_ref, *outs, eps: float, layout: str, normed: bool):
    out_ref = outs[-1]  # before it, in `insert`, the store that it aliases
    token, batch = pl.program_id(0), pl.program_id(1)
    channels, rotary = x_ref.shape[2], 2 * freqs_ref.shape[0]
    codes_end = channels if layout == "fp8" else channels // 2
    # Every load comes before the first store, or it would wait for it.
    slot = slot_ref[batch, token]
    angle = position_ref[batch, token].astype(jnp.float32) * freqs_ref[:]
    cuts, square = [], jnp.float32(0)
    for first, size in pieces(channels, rotary):
        at = first + 2 * jnp.arange(size // 2, dtype=jnp.int32)
        halves = [x_ref[batch, token, at + odd].astype(jnp.float32) for odd in (0, 1)]
        weight = [norm_ref[at + odd].astype(jnp.float32) for odd in (0, 1)] if normed else []
        square += sum(jnp.sum(half * half) for half in halves)
        cuts.append((first, at, halves, weight))
    # normed = norm * (x * rsqrt(mean(x^2) + eps)), rounded
    inverse = lax.rsqrt(square / channels + eps)
    written = []
    for first, at, (even, odd), weight in cuts:
        if normed:
            even, odd = (_bfloat16(w * (v * inverse)) for w, v in zip(weight, (even, odd), strict=True))
        # turned = channels (2i, 2i + 1) by position * f_i, rounded again
        if first == channels - rotary:
            cos, sin = jnp.cos(angle), jnp.sin(angle)
            even, odd = _bfloat16(even * cos - odd * sin), _bfloat16(even * sin + odd * cos)
        # row = codes, then scales
        codes, scale = _quantize(even, odd, layout)
        group = (codes_end + first // GROUPS[layout]) + jnp.arange(scale.shape[0], dtype=jnp.int32)
        places = [at, at + 1] if layout == "fp8" else [at // 2]
        written += [*zip(places, codes, strict=True), (group, scale)]

    @pl.when((slot >= 0) & (slot < out_ref.shape[1]))
    def write():
        for place, byte in written:
            out_ref[batch, slot, place] = byte.astype(jnp.uint8)


def _fits(x: Array, freqs: Array, norm: Array | None, store: tuple[int, ...], layout: str) -> None:
    """The rules of the kernel, or the one that is broken."""
    for name, array in (("x", x), ("norm", norm)):
        if array is not None and array.dtype != jnp.bfloat16:
            raise BackendError(f"backend 'pallas': pack takes {name} in bfloat16, not {array.dtype}")
    rotary, channels = 2 * freqs.shape[0], x.shape[-1]
    sizes = [size for _, size in pieces(channels, rotary)]
    if not 0 < rotary < channels or any(s % GROUPS[layout] or s & (s - 1) for s in sizes) or channels & (channels - 1):
        rule = f"powers of two with {GROUPS[layout]} rotary channels at least"
        raise BackendError(f"backend 'pallas': pack takes {rule}, not {rotary} of {channels}")
    if not x.shape[0] * x.shape[1]:
        raise BackendError(f"backend 'pallas': pack takes a token at least; x is {x.shape}")
    if 2**31 <= store[0] * store[1] * store[2] < 2**32:  # Triton's element offsets wrap there
        raise BackendError(f"backend 'pallas': pack takes a store below 2 or from 4 GiB; it is {store}")


def insert(
    store: UInt8[Array, "B S row"],
    x: Float[Array, "B T K"],
    positions: Int32[Array, "B T"],
    slots: Int32[Array, "B T"],
    freqs: Float32[Array, " pairs"],
    norm: Float[Array, " K"] | None,
    *,
    eps: float,
    layout: str,
    tile: Tile | None = None,
    interpret: bool = False,
) -> UInt8[Array, "B S row"]:
    """As the reference's."""
    return _launch(x, positions, slots, freqs, norm, store, store.shape, eps, layout, tile, interpret)


def pack(
    x: Float[Array, "B T K"],
    positions: Int32[Array, "B T"],
    freqs: Float32[Array, " pairs"],
    norm: Float[Array, " K"] | None,
    *,
    eps: float,
    layout: str,
    tile: Tile | None = None,
    interpret: bool = False,
) -> UInt8[Array, "B T row"]:
    """As the reference's: every token in a row of its own."""
    slots = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    shape = (*x.shape[:2], width(x.shape[-1], layout))
    return _launch(x, positions, slots, freqs, norm, None, shape, eps, layout, tile, interpret)


def _launch(
    x: Array,
    positions: Array,
    slots: Array,
    freqs: Array,
    norm: Array | None,
    store: Array | None,
    shape: tuple[int, ...],
    eps: float,
    layout: str,
    tile: Tile | None,
    interpret: bool,
) -> Array:
    _fits(x, freqs, norm, shape, layout)
    tile = choose_tile({"sm_90": H200, "sm_103": B300}) if tile is None else tile
    weight = jnp.ones(1, x.dtype) if norm is None else norm
    return pl.pallas_call(
        partial(_row, eps=eps, layout=layout, normed=norm is not None),
        grid=(x.shape[1], x.shape[0]),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.uint8),
        input_output_aliases={} if store is None else {5: 0},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        name=f"pack_{layout}",
        interpret=interpret,
    )(x, positions, slots, jnp.asarray(freqs), weight, *([] if store is None else [store]))
