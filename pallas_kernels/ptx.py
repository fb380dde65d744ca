"""Instructions that JAX has no name for: inline PTX of the Triton kernels, and the PTX of number formats of all.

A code becomes bfloat16 without a table: its sign, exponent and mantissa are moved to where bfloat16 has them, and a
product with a power of two, which takes the scale too, brings the value back. Small codes pass as subnormal numbers.

    E2M1   bits s eem       at 15 and  8..6   are  value * 2**-126
    E4M3   bits s eeee mmm  at 15 and 10..4   are  value * 2**-120
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array

LOG2E = 1.4426950408889634  # the exponential that a GPU has is that of base 2

# Byte permutations: the low halves of two registers, and the high halves.
PAIRS = ("0x5410", "0x7632")
# (which nibbles of a word, the factor that copies such a nibble to bits 6.. and 12.. of its half): low, then high ones.
_NIBBLES = (("0x000F000F", "0x1040"), ("0x00F000F0", "0x104"))
_SIGNS = 0x80008000
# Exponent and mantissa of two codes in place.
_E4M3_FIELD, _E2M1_FIELD = 0x07F007F0, 0x01C001C0


def elementwise(text: str, args: list[Array], dtype: DTypeLike, *, constraints: str, pack: int) -> Array:
    """PTX on `pack` elements at a time, in a Triton kernel."""
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    return plt.elementwise_inline_asm(text, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[shape])[
        0
    ]


def float32(instruction: str, plain: Callable[..., Array], *args: Array, interpret: bool) -> Array:
    """One float32 instruction, elementwise, in a Triton kernel; interpret mode has only its plain twin."""
    shape = jnp.broadcast_shapes(*(arg.shape for arg in args))
    given = [jnp.broadcast_to(arg, shape) for arg in args]
    if interpret:
        return plain(*given)
    places = ", ".join(f"${i}" for i in range(len(given) + 1))
    constraints = "=f" + ",f" * len(given)
    return elementwise(f"{instruction} {places};", given, jnp.float32, constraints=constraints, pack=1)


# Triton under XLA contracts no product and sum by itself.
fma = partial(float32, "fma.rn.f32", lambda a, b, c: a * b + c)
reciprocal = partial(float32, "rcp.approx.ftz.f32", lambda x: 1.0 / x)


def e2m1_nibbles(out: str, word: str, high: bool) -> str:
    """out = the low (or high) nibbles of bytes 0 and 2 of a word, as E2M1 in place. Register a is overwritten.

    0000 0000 0000 seem  x 0x1040  =  seem 00se em..          a copy at bit 12 and one at bit 6
    and 1000 0001 1100 0000        =  s000 000e em00 0000     the rest is dropped
    """
    mask, factor = _NIBBLES[high]
    return f"and.b32 a, {word}, {mask}; mul.lo.u32 a, a, {factor}; and.b32 {out}, a, 0x81C081C0;"


def e4m3_bytes(out: str, word: str, high: bool) -> list[str]:
    """out = bytes 0 and 2 (or 1 and 3) of a word, as E4M3 in place. Registers a and b are overwritten."""
    move, sign = (f"shr.u32 a, {word}, 4;", 0) if high else (f"shl.b32 a, {word}, 4;", 8)
    return [
        f"{move} shl.b32 b, {word}, {sign}; and.b32 b, b, {_SIGNS:#010x};",
        f"lop3.b32 {out}, a, 0x{_E4M3_FIELD:08X}, b, 0xEA;",
    ]


def _word(outputs: int, mask: int, shifts: tuple[tuple[int, int], ...]) -> str:
    """From the word ${outputs} and the scale after it to `outputs` pairs: (magnitude, sign) shifted to the left."""
    word, scale = f"${outputs}", f"${outputs + 1}"
    text = "{ .reg .b32 t, u; "
    for out, (n, m) in enumerate(shifts):
        take = "shr.b32" if n < 0 else "shl.b32"
        text += f"{take} t, {word}, {abs(n)}; and.b32 t, t, 0x{mask:08X}; shl.b32 u, {word}, {m}; "
        # t = magnitudes in place, u = signs in place: t | u, times the scale
        text += f"lop3.b32 t, u, {_SIGNS:#010x}, t, 0xEA; mul.rn.bf16x2 ${out}, t, {scale}; "
    return text + "}"


# A word of eight or four codes, times a pair of scales: codes i and i + 4 (or i + 2) share an output.
E2M1_WORD = _word(4, _E2M1_FIELD, ((6, 12), (2, 8), (-2, 4), (-6, 0)))
E4M3_WORD = _word(2, _E4M3_FIELD, ((4, 8), (-4, 0)))
