"""Quantized weight rows to the register fragments of a Hopper matrix instruction, inside a Mosaic GPU kernel.

`wgmma` takes its A operand, 64 rows of weights, from registers: thread t of a warpgroup holds rows
`r = 16 (t // 32) + t % 32 // 4` and `r + 8`, and of each 16 columns the pairs 2c and 2c + 8 with `c = t % 4`. Which
column of the matrix stands at which place is free as long as the other operand agrees. So a thread takes 16
consecutive bytes of its row, as the checkpoint has them, and the activations' columns are permuted instead, by
`Format.permute`, which is a transpose. Nothing about the weights is prepared, and those 16 bytes have one scale.

    thread 37   c = 1, rows 17 and 25, bytes 16..31 of each row's 64 of a chunk (of E4M3, of both its halves)
    E2M1        those are 32 values, which share a scale
    E4M3        16 values

A multiplication by the power of two of `pallas_kernels.ptx`, the scale and 2**-32 makes exact bfloat16: of scales from
2**-90 to 2**33, further ones saturate to inf. The kernel's epilogue undoes the 2**-32 (`UNSCALE`) on the float32 sums.
E4M3's NaN is not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir.dialects import gpu, llvm  # of what `inline_mgpu` is written in, these have no public name
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels import ptx
from pallas_kernels.formats import GROUP

ROWS, COLUMNS = 64, 64  # of a fragment
CHUNK = 128  # columns that are read together
UNSCALE = 2.0**32


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a row of weights is stored, and how 128 columns of 64 rows become two fragments of 64 columns.

    `scales(ref, chunks)` reads the scales of 64 rows and some chunks from device memory; `read(ref, chunk)` the codes
    of a chunk from shared memory: int32 words, so many for each thread. `fragment(codes, scales, chunk, half)` makes
    bfloat16 of half a chunk. All take `interpret=`, for which they do the same in jnp.
    """

    chunk_bytes: int  # of a row
    block_rows: int  # that share a scale
    permute: Callable[[jax.Array], jax.Array]
    scales: Callable[..., jax.Array]
    read: Callable[..., jax.Array]
    fragment: Callable[..., jax.Array]


def _regrouped(x: jax.Array, sizes: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """Columns read as digits of mixed radix `sizes`, their digits reordered."""
    lead = x.ndim - 1
    digits = x.reshape(*x.shape[:-1], -1, *sizes)
    return digits.transpose(*range(lead + 1), *(lead + 1 + i for i in order)).reshape(x.shape)


def permute_fp4(x: jax.Array) -> jax.Array:
    """Columns in the order of `fragment` of E2M1 rows: column = thread, word, half, nibble (2 digits)."""
    return _regrouped(x, (4, 4, 2, 2, 2), (1, 3, 4, 0, 2))


def permute_fp8(x: jax.Array) -> jax.Array:
    """Columns in the order of `fragment` of E4M3 rows: column = thread, word, half, byte."""
    return _regrouped(x, (4, 4, 2, 2), (1, 3, 0, 2))


def _words_layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((128 * count,), vec_size=count)


def _constant(value: Any) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _place() -> tuple[ir.Value, ir.Value]:
    """(row r, quad c) of this thread."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    thread = arith.andi(thread, _constant(127))
    row = arith.muli(arith.shrui(thread, _constant(5)), _constant(16))
    row = arith.addi(row, arith.andi(arith.shrui(thread, _constant(2)), _constant(7)))
    return row, arith.andi(thread, _constant(3))


def _load(ref: ir.Value, row: ir.Value, byte: ir.Value | int, words: int) -> ir.Value:
    """A vector of 32-bit words at a byte of a row of a uint8 reference."""
    kind = ir.MemRefType(ref.type)
    stride = kind.get_strides_and_offset()[0][0]
    byte = _constant(byte) if isinstance(byte, int) else byte
    offset = arith.addi(arith.muli(row, _constant(stride)), byte)
    base = mgpu.utils.memref_ptr(ref)
    place = llvm.getelementptr(base.type, base, [offset], [-(2**31)], ir.IntegerType.get_signless(8), 0)
    return llvm.load(ir.VectorType.get((words,), ir.IntegerType.get_signless(32)), place, alignment=4 * words)


def _array(registers: Any, shape: tuple[int, ...], layout: Any, signed: bool | None) -> mgpu.FragmentedArray:
    layout = layout.to_mgpu()
    registers = np.asarray(registers, object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _read(ref: Any, count: int, load: Callable[[ir.Value], list[ir.Value]]) -> jax.Array:
    """`count` words for each thread: the vectors that `load` gives, one after the other."""
    layout = _words_layout(count)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.dtype(jnp.int32), layout=layout),
    )
    def read(ctx: Any, ref: ir.Value) -> mgpu.FragmentedArray:
        return _array([mgpu.utils.vector_concat(load(ref))], (128 * count,), layout, True)

    return read(ref)


def _multiplier(word: ir.Value, byte: ir.Value, offset: int) -> ir.Value:
    """Two bfloat16 of exponent field min(scale byte + offset, 255)."""
    field = arith.andi(arith.shrui(word, arith.muli(byte, _constant(8))), _constant(255))
    field = arith.minui(arith.addi(field, _constant(offset)), _constant(255))
    return arith.muli(field, _constant(0x00800080))


def _expand(asm: str, word: ir.Value, multiplier: ir.Value, outputs: int) -> list[ir.Value]:
    """The bfloat16 pairs of a word of codes."""
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=&r"] * outputs + ["r", "r"])
    kind = llvm.StructType.get_literal([i32] * outputs)
    pairs = llvm.inline_asm(kind, [word, multiplier], asm, constraints, asm_dialect=0, has_side_effects=False)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    return [llvm.bitcast(pair, llvm.extractvalue(i32, pairs, [i])) for i in range(outputs)]


def _decode(codes: jax.Array, scales: jax.Array, wgmma: bool, body: Callable[..., None]) -> jax.Array:
    """A fragment whose registers [8 tiles of 8 columns, 2 row halves] `body` fills from a thread's words."""
    layouts = tuple(_words_layout(words.shape[0] // 128) for words in (codes, scales))
    fragment = plgpu.Layout.WGMMA if wgmma else plgpu.Layout.MMA_LHS(jnp.bfloat16)
    shape = (ROWS, COLUMNS)

    @plgpu.inline_mgpu(
        arg_types=layouts, return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=fragment)
    )
    def decode(ctx: Any, codes: mgpu.FragmentedArray, scales: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = np.empty((8, 2), object)
        [code_words], [scale_words] = codes.registers.flat, scales.registers.flat
        body(code_words, scale_words, registers)
        return _array(registers, shape, fragment, None)

    return decode(codes, scales)


def _element(vector: ir.Value, index: int) -> ir.Value:
    return llvm.extractelement(vector, _constant(index))


def _power(byte: jax.Array) -> jax.Array:
    """2**(byte - 127 - 32)."""
    return lax.bitcast_convert_type((byte - 32) << 23, jnp.float32)


def _digits(words: jax.Array, bits: int, sizes: tuple[int, ...]) -> jax.Array:
    """Fields of `bits` of each word as new axes `sizes`, the highest first."""
    shifts = bits * lax.broadcasted_iota(jnp.int32, (*words.shape, 32 // bits), words.ndim)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*words.shape, *sizes)


def _fp4_scales(ref: Any, chunks: int, *, interpret: bool) -> jax.Array:
    """Words [row half, chunk]; byte c of one is the scale of quad c."""
    if interpret:
        words = lax.bitcast_convert_type(ref[...].reshape(ROWS, chunks, 4), jnp.int32).reshape(4, 2, 8, 1, chunks)
        return jnp.broadcast_to(words, (4, 2, 8, 4, chunks)).transpose(0, 2, 3, 1, 4).reshape(-1)

    def load(ref: ir.Value) -> list[ir.Value]:
        row, _ = _place()
        return [_load(ref, arith.addi(row, _constant(8 * half)), 0, chunks) for half in range(2)]

    return _read(ref, 2 * chunks, load)


def _fp4_read(ref: Any, chunk: int, *, interpret: bool) -> jax.Array:
    """Words [row half, 4]."""
    if interpret:
        codes = ref[:, 64 * chunk : 64 * chunk + 64].reshape(4, 2, 8, 4, 4, 4)
        return lax.bitcast_convert_type(codes, jnp.int32).transpose(0, 2, 3, 1, 4).reshape(-1)

    def load(ref: ir.Value) -> list[ir.Value]:
        row, quad = _place()
        start = arith.addi(arith.muli(quad, _constant(16)), _constant(64 * chunk))
        return [_load(ref, arith.addi(row, _constant(8 * half)), start, 4) for half in range(2)]

    return _read(ref, 8, load)


def _fp4_fragment(
    codes: jax.Array, scales: jax.Array, chunk: int, half: int, *, interpret: bool, wgmma: bool = True
) -> jax.Array:
    chunks = scales.shape[0] // 256
    if interpret:  # axes: warp, row, quad, row half, word, then the nibble's three bits
        nibble = _digits(codes.reshape(4, 8, 4, 2, 4)[..., 2 * half : 2 * half + 2], 4, (2, 2, 2))
        size = (nibble & 7).astype(jnp.float32)
        size = jnp.where(size < 4, size * 0.5, jnp.where(size < 6, size - 2, 2 * size - 8))
        byte = _digits(scales.reshape(4, 8, 4, 2, chunks)[..., chunk], 8, (4,))
        scale = _power(jnp.stack([byte[:, :, c, :, c] for c in range(4)], axis=2))
        value = jnp.where(nibble < 8, size, -size) * scale[..., None, None, None, None]
        return value.transpose(0, 3, 1, 4, 6, 7, 2, 5).reshape(ROWS, COLUMNS).astype(jnp.bfloat16)

    def body(words: ir.Value, scales: ir.Value, registers: np.ndarray) -> None:
        _, quad = _place()
        for rows in range(2):
            multiplier = _multiplier(_element(scales, rows * chunks + chunk), quad, 94)
            for w in range(2):
                word = _element(words, 4 * rows + 2 * half + w)
                registers[4 * w : 4 * w + 4, rows] = _expand(ptx.E2M1_WORD, word, multiplier, 4)

    return _decode(codes, scales, wgmma, body)


def _fp8_scales(ref: Any, chunks: int, *, interpret: bool) -> jax.Array:
    """Words [chunk]; byte 2 h + c // 2 of one is the scale of quad c in half h."""
    if interpret:
        words = lax.bitcast_convert_type(ref[...].reshape(2, 1, chunks, 4), jnp.int32)
        return jnp.broadcast_to(words, (2, 64, chunks)).reshape(-1)

    def load(ref: ir.Value) -> list[ir.Value]:
        row, _ = _place()
        return [_load(ref, arith.shrui(row, _constant(5)), 0, chunks)]

    return _read(ref, chunks, load)


def _fp8_read(ref: Any, chunk: int, *, interpret: bool) -> jax.Array:
    """Words [half, row half, 4]."""
    if interpret:
        codes = ref[:, CHUNK * chunk : CHUNK * chunk + CHUNK].reshape(4, 2, 8, 2, 4, 4, 4)
        return lax.bitcast_convert_type(codes, jnp.int32).transpose(0, 2, 4, 3, 1, 5).reshape(-1)

    def load(ref: ir.Value) -> list[ir.Value]:
        row, quad = _place()
        start = arith.addi(arith.muli(quad, _constant(16)), _constant(CHUNK * chunk))
        return [
            _load(ref, arith.addi(row, _constant(8 * rows)), arith.addi(start, _constant(64 * half)), 4)
            for half in range(2)
            for rows in range(2)
        ]

    return _read(ref, 16, load)


def _fp8_fragment(
    codes: jax.Array, scales: jax.Array, chunk: int, half: int, *, interpret: bool, wgmma: bool = True
) -> jax.Array:
    if interpret:  # axes: warp, row, quad, row half, word, then the byte's two bits
        byte = _digits(codes.reshape(4, 8, 4, 2, 2, 4)[:, :, :, half], 8, (2, 2)).astype(jnp.uint8)
        value = lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)
        scale = _power(_digits(scales.reshape(4, 32, -1)[:, 0, chunk], 8, (2, 2))[:, half])
        value *= jnp.repeat(scale, 2, axis=1)[:, None, :, None, None, None, None]
        return value.transpose(0, 3, 1, 4, 6, 2, 5).reshape(ROWS, COLUMNS).astype(jnp.bfloat16)

    def body(words: ir.Value, scales: ir.Value, registers: np.ndarray) -> None:
        _, quad = _place()
        group = arith.addi(arith.shrui(quad, _constant(1)), _constant(2 * half))
        multiplier = _multiplier(_element(scales, chunk), group, 88)
        for rows in range(2):
            for w in range(4):
                word = _element(words, 8 * half + 4 * rows + w)
                registers[2 * w : 2 * w + 2, rows] = _expand(ptx.E4M3_WORD, word, multiplier, 2)

    return _decode(codes, scales, wgmma, body)


FP4 = Format(
    chunk_bytes=64,
    block_rows=1,
    permute=permute_fp4,
    scales=_fp4_scales,
    read=_fp4_read,
    fragment=_fp4_fragment,
)
FP8 = Format(
    chunk_bytes=128,
    block_rows=GROUP,
    permute=permute_fp8,
    scales=_fp8_scales,
    read=_fp8_read,
    fragment=_fp8_fragment,
)
