"""A small machine for the PTX of `pallas_kernels.sparse_attention.row_ptx`: what one warpgroup does, without a GPU.

Registers are arrays of 64-bit words, one a thread. Only the instructions that those programs use are known; any other
raises. Memory is an array of bytes, addresses are its indices.
"""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

U = np.uint64
THREADS = 128
SIZES = {"b32": 4, "b16": 2, "u8": 1}


def low32(x: np.ndarray) -> np.ndarray:
    return x & U(0xFFFFFFFF)


def signed(x: np.ndarray) -> np.ndarray:
    return low32(x).astype(np.uint32).view(np.int32).astype(np.int64)


def pair(x: np.ndarray, dtype: type) -> np.ndarray:
    """The two 16-bit halves, low first, as numbers."""
    return np.stack([x & U(0xFFFF), (x >> U(16)) & U(0xFFFF)], -1).astype(np.uint16).view(dtype)


def joined(halves: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(halves).view(np.uint16).astype(U)
    return bits[..., 0] | bits[..., 1] << U(16)


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both, code = a | b << U(32), int(selector[0])
    picked = [(both >> U(8 * (code >> 4 * i & 7)) & U(255)) << U(8 * i) for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (pair(v, ml_dtypes.bfloat16).astype(np.float32) for v in (a, b))
    return joined((x * y).astype(ml_dtypes.bfloat16))


def from_f32(x: np.ndarray) -> np.ndarray:
    return low32(x).astype(np.uint32).view(np.float32)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": low32,
    "mov.b16": low32,
    "mov.u32": low32,
    "cvt.u64.u32": low32,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: low32(a << b),
    "shr.u32": lambda a, b: a >> b,
    "bfe.u32": lambda a, b, c: a >> b & ((U(1) << c) - U(1)),
    "add.u32": lambda a, b: low32(a + b),
    "add.s32": lambda a, b: low32(a + b),
    "add.u64": lambda a, b: a + b,
    "max.s32": lambda a, b: np.maximum(signed(a), signed(b)).astype(U),
    "min.s32": lambda a, b: np.minimum(signed(a), signed(b)).astype(U),
    "mul.wide.u32": lambda a, b: a * b,
    "mul.lo.u32": lambda a, b: low32(a * b),
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "mad.wide.s32": lambda a, b, c: a * b + c,  # of rows that are not negative
    "mad.lo.u32": lambda a, b, c: low32(a * b + c),
    "setp.ge.s32": lambda a, b: (signed(a) >= signed(b)).astype(U),
    "selp.b32": lambda a, b, c: np.where(c.astype(bool), a, b),
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[int(table[0])],
    "prmt.b32": permute,
    "mul.rn.bf16x2": multiply,
    "mul.f32": lambda a, b: (from_f32(a) * from_f32(b)).view(np.uint32).astype(U),
    "cvt.rn.f16x2.e4m3x2": lambda a: joined(
        np.stack([a & U(255), a >> U(8)], -1).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    ),
    "cvt.f32.f16": lambda a: pair(a, np.float16)[..., 0].astype(np.float32).view(np.uint32).astype(U),
    "cvt.rn.bf16x2.f32": lambda a, b: joined(np.stack([from_f32(b), from_f32(a)], -1).astype(ml_dtypes.bfloat16)),
}


class Machine:
    """`operands` are the values of $0, $1, ..."""

    def __init__(self, operands: list[int], memory: np.ndarray, shared: np.ndarray):
        self.registers = {f"${i}": np.full(THREADS, value, U) for i, value in enumerate(operands)}
        self.registers["%tid.x"] = np.arange(THREADS).astype(U)
        self.memory, self.shared = memory, shared

    def value(self, word: str) -> np.ndarray:
        return self.registers[word] if word in self.registers else np.full(THREADS, int(word, 0), np.int64).astype(U)

    def address(self, word: str) -> np.ndarray:
        base, _, offset = word.strip("[]").partition("+")
        return (self.value(base.strip()) + U(int(offset or 0))).astype(np.int64)

    def load(self, source: np.ndarray, at: np.ndarray, size: int, on: np.ndarray) -> np.ndarray:
        got = np.zeros(THREADS, U)
        for i in range(size):
            got[on] |= source[at[on] + i].astype(U) << U(8 * i)
        return got

    def step(self, op: str, args: list[str], on: np.ndarray) -> None:
        words = [word.strip() for word in args[0].strip("{}").split(",")]
        if op.startswith("ld."):
            size = SIZES[op.rsplit(".", 1)[1]]
            source, at = self.shared if "shared" in op else self.memory, self.address(args[1])
            for k, word in enumerate(words):
                before = self.registers.get(word, np.zeros(THREADS, U))
                self.registers[word] = np.where(on, self.load(source, at + size * k, size, on), before)
        elif op == "st.shared.v4.b32":
            at = self.address(args[0])
            for k, word in enumerate(args[1].strip("{}").split(",")):
                for i in range(4):
                    self.shared[at + 4 * k + i] = (self.value(word.strip()) >> U(8 * i) & U(255)).astype(np.uint8)
        elif op.startswith("cp.async.cg.shared.global"):
            to, at, some = self.address(args[0]), self.address(args[1]), self.value(args[3]) > 0
            for i in range(16):
                self.shared[to + i] = self.load(self.memory, at + i, 1, some).astype(np.uint8)
        elif op == "mov.b32" and args[0].startswith("{"):
            for k, word in enumerate(words):
                self.registers[word] = self.value(args[1]) >> U(16 * k) & U(0xFFFF)
        else:
            self.registers[args[0]] = OPERATIONS[op](*(self.value(word) for word in args[1:]))

    def run(self, text: str) -> None:
        for line in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
            words = line.strip()
            if not words or words.startswith((".reg", "cp.async.wait_all", "fence.proxy.async")):
                continue
            on = np.ones(THREADS, bool)
            if words.startswith("@"):
                guard, words = words[1:].split(" ", 1)
                on = self.registers[guard].astype(bool)
            op, rest = words.split(" ", 1)
            self.step(op, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest), on)
