"""PTX that brings rows of a cache to where Hopper's tensor cores read them, a channel half of 64 rows at a time.

Hopper's copy engine cannot gather into the swizzled tiles that its tensor cores read, and Pallas has no copies of
single threads, so the three formats below are PTX. Each leaves 64 keys x 256 channels of bfloat16 in tiles of 8 keys
x 64 channels, with 16-byte chunk c of key r at place c ^ (r % 8) of its 128-byte line, and exact zeros for an id of
-1. The format of a row is told by its bytes, for 512 channels:

    bf16    1024   512 bfloat16 (or their bytes), copied past the registers
    fp8      528   512 E4M3 codes, then 16 E8M0 scales
    nvfp4    288   256 bytes of E2M1 pairs (low nibble the even channel), then 32 E4M3 scales

FP4 codes and scales, 20 registers a thread, are read before there is room for the rows, and wait there: the time to
memory passes while the half block before is still in use.

**Numerics.** Codes become bfloat16 as `pallas_kernels.ptx` says. Codes and scales have at most seven significant bits
together, so all of it is exact: packed rows arrive as 2**-7 of what `unpack` gives, bit for bit. The 2**-7 keeps scale
and power of two together in bfloat16's range; the consumers undo it.
"""

from dataclasses import dataclass

from jaxtyping import Array, Shaped

from pallas_kernels import BackendError
from pallas_kernels.formats import GROUP, NVFP4_GROUP
from pallas_kernels.ptx import PAIRS, e2m1_nibbles, e4m3_bytes

KEYS = 64  # rows of a block
HEAD = 512  # channels of a row
HALF = HEAD // 2
DOWN = 7
TILE = 8 * 128  # bytes of a swizzled tile: 8 keys of 64 channels


def _lines(*parts: str | list[str]) -> list[str]:
    return [line for part in parts for line in ([part] if isinstance(part, str) else part)]


# Operands: $tile; $table; $ids (shared memory); $first, the table's first row of this batch entry; $half.
_PROLOGUE = [
    ".reg .pred valid; .reg .b32 t, lane, r, c, x, id, at, list; .reg .b64 src;",
    "mov.u32 t, %tid.x; and.b32 t, t, 127; and.b32 lane, t, 31;",
]
_FENCE = "fence.proxy.async.shared::cta;"  # tensor cores read through the async proxy


def _row(k: int, count: int, nbytes: int) -> list[str]:
    """`src` is the row of key r + 16 k, clamped into the table; `valid` says that its id is not -1."""
    return [
        f"ld.shared.b32 id, [list + {64 * k}]; setp.ge.s32 valid, id, 0;",
        f"max.s32 id, id, 0; min.s32 id, id, {count - 1}; add.s32 id, id, $first;",
        f"mad.wide.s32 src, id, {nbytes}, $table;",
    ]


# `list`: where key r's id is.
_LIST = "shl.b32 list, r, 2; add.u32 list, list, $ids;"
# `at`: where chunk `at` of key r stands in the first tile of its eight keys.
_ADDRESS = [
    "and.b32 x, r, 7; xor.b32 at, at, x; shl.b32 at, at, 4; shl.b32 x, x, 7; add.u32 at, at, x;",
    f"shr.u32 x, r, 3; mad.lo.u32 at, x, {4 * TILE}, at; add.u32 at, at, $tile;",
]


def _copy_bf16(count: int) -> list[str]:
    """Eight threads copy 128 bytes of a row: thread t the chunk t % 8 of keys t / 8 + 16 k."""
    body = _lines(
        "shr.u32 r, t, 3; and.b32 c, t, 7; mov.b32 at, c;",
        _LIST,
        _ADDRESS,
        f"mad.lo.u32 c, $half, {HALF // 8}, c; mul.wide.u32 shift, c, 16;",
    )
    for k in range(KEYS // 16):
        body += [*_row(k, count, 2 * HEAD), "add.u64 src, src, shift; selp.b32 size, 16, 0, valid;"]
        body += [
            f"cp.async.cg.shared.global.L2::256B [at + {k * 8 * TILE + j * TILE}], [src + {j * 128}], 16, size;"
            for j in range(4)
        ]
    return _lines(_PROLOGUE, ".reg .b32 size; .reg .b64 shift;", body, "cp.async.wait_all;")


# Lanes of a quarter warp take four keys, and two chunks whose places differ in bit 2: no bank is hit twice.
_KEY = "shr.u32 r, t, 5; shl.b32 r, r, 2; shr.u32 x, lane, 1; and.b32 x, x, 3; add.u32 r, r, x;"
_VALUES = ".reg .b32 y<4>, o<4>, s0, s1, s, a, b, to; .reg .b16 h0, h1; .reg .f32 f0, f1; .reg .b64 more, sc;"


def _scaled(values: list[str], *factors: str) -> list[str]:
    return [" ".join(f"mul.rn.bf16x2 {y}, {y}, {factor};" for factor in factors) for y in values]


def _nvfp4_word(word: str, scale: str) -> list[str]:
    """Eight codes: nibbles i and i + 4 share a register. Then neighbours are paired."""
    lines = [f"shr.u32 b, {word}, 8;"]
    lines += [e2m1_nibbles(f"y{i}", (word, "b")[i // 2], bool(i % 2)) for i in range(4)]
    lines += _scaled(["y0", "y1", "y2", "y3"], scale)
    return lines + [
        f"prmt.b32 o{2 * high + low}, y{2 * low}, y{2 * low + 1}, {PAIRS[high]};" for high in (0, 1) for low in (0, 1)
    ]


def _load(name: str, at: str) -> list[str]:
    """Sixteen bytes into four registers, zeros where the id is -1."""
    words = [f"{name}_{q}" for q in range(4)]
    return [
        f".reg .b32 {', '.join(words)}; " + " ".join(f"mov.b32 {word}, 0;" for word in words),
        f"@valid ld.global.v4.b32 {{{', '.join(words)}}}, [{at}];",
    ]


NVFP4_WORDS = [*(f"v{k}_{q}" for k in range(KEYS // 16) for q in range(4)), *(f"codes{k}" for k in range(KEYS // 16))]


def _load_nvfp4(count: int) -> list[str]:
    """A thread reads 16 bytes, 32 channels, of four rows: chunk c = 2 (lane / 8) + lane % 2 of its half. Leaves them
    in NVFP4_WORDS."""
    body = _lines(
        ".reg .b64 more, sc;",
        _KEY,
        _LIST,
        "and.b32 c, lane, 1; shr.u32 x, lane, 3; shl.b32 x, x, 1; add.u32 c, c, x;",
        f"mad.lo.u32 c, $half, {HALF // 32}, c;",
    )
    for k in range(KEYS // 16):
        body += _lines(
            _row(k, count, HEAD // 2 + HEAD // NVFP4_GROUP),
            f".reg .b32 codes{k}; mov.b32 codes{k}, 0; mad.wide.u32 more, c, 16, src; mad.wide.u32 sc, c, 2, src;",
            _load(f"v{k}", "more"),
            f"@valid ld.global.b16 codes{k}, [sc + {HEAD // 2}];",
        )
    return _lines(_PROLOGUE, body)


def _unpack_nvfp4() -> list[str]:
    """Then it writes them, from NVFP4_WORDS."""
    body = _lines(
        _KEY,
        "and.b32 c, lane, 1; shl.b32 at, c, 2;",
        _ADDRESS,
        f"shr.u32 x, lane, 3; mad.lo.u32 at, x, {TILE}, at;",
    )
    for k in range(KEYS // 16):
        body += [
            f"mov.b32 {{h0, h1}}, codes{k}; cvt.rn.f16x2.e4m3x2 s, h0;",
            "mov.b32 {h0, h1}, s; cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;",
            "mul.f32 f0, f0, power; mul.f32 f1, f1, power; cvt.rn.bf16x2.f32 s, f1, f0;",
            "prmt.b32 s0, s, s, 0x1010; prmt.b32 s1, s, s, 0x3232;",
        ]
        for q in range(4):
            body += _lines(
                _nvfp4_word(f"v{k}_{q}", f"s{q // 2}"),
                f"xor.b32 to, at, {16 * q}; st.shared.v4.b32 [to + {k * 8 * TILE}], {{o0, o1, o2, o3}};",
            )
    power = f".reg .f32 power; mov.b32 power, {127 + 126 - DOWN << 23};"
    return _lines(_PROLOGUE, _VALUES, power, body)


def _unpack_fp8(count: int) -> list[str]:
    """A thread reads 16 bytes, 16 channels, twice of four rows: chunk c of its half has the bits, high to low,
    (again, lane / 16, lane % 2, lane / 8 % 2)."""
    body = _lines(
        _KEY,
        "and.b32 c, lane, 1; shl.b32 c, c, 1; bfe.u32 x, lane, 3, 1; add.u32 c, c, x; shl.b32 at, c, 1;",
        _LIST,
        _ADDRESS,
        f"shr.u32 x, lane, 4; mad.lo.u32 at, x, {TILE}, at; shl.b32 x, x, 2; add.u32 c, c, x;",
        f"mad.lo.u32 c, $half, {HALF // 16}, c; shr.u32 x, c, 1;",
    )
    for again in range(2):
        for k in range(KEYS // 16):
            body += _lines(
                _row(k, count, HEAD + HEAD // GROUP),
                "mad.wide.u32 more, c, 16, src; cvt.u64.u32 sc, x; add.u64 sc, sc, src;",
                _load(f"v{k}{again}", f"more + {128 * again}"),
                f".reg .b32 s{k}{again}; mov.b32 s{k}{again}, 0;",
                f"@valid ld.global.u8 s{k}{again}, [sc + {HEAD + 4 * again}];",
            )
        for k in range(KEYS // 16):
            body += [f"shl.b32 s, s{k}{again}, 7; prmt.b32 s, s, s, 0x1010;"]
            for q in range(2):
                for i in range(2):
                    word = f"v{k}{again}_{2 * q + i}"
                    body += e4m3_bytes("y0", word, False) + e4m3_bytes("y1", word, True)
                    body += _scaled(["y0", "y1"], "power", "s")
                    body += [f"prmt.b32 o{2 * i + high}, y0, y1, {PAIRS[high]};" for high in (0, 1)]
                place = k * 8 * TILE + again * 2 * TILE
                body += [f"xor.b32 to, at, {16 * q}; st.shared.v4.b32 [to + {place}], {{o0, o1, o2, o3}};"]
    bits = 127 + 120 - DOWN << 7
    return _lines(_PROLOGUE, _VALUES, f".reg .b32 power; mov.b32 power, {bits << 16 | bits};", body)


@dataclass(frozen=True)
class Format:
    """How rows are stored, and what brings them."""

    name: str

    @property
    def down(self) -> int:
        """Rows are left in shared memory as 2**-down of their values."""
        return 0 if self.name == "bf16" else DOWN

    @property
    def words(self) -> int:
        """Registers in which a thread keeps its part of the packed rows until there is room for them."""
        return len(NVFP4_WORDS) if self.name == "nvfp4" else 0

    def load_ptx(self, count: int) -> str:
        """Of `load`, from a table of `count` rows an entry; its results are the first operands."""
        n = self.words
        lines = [*_load_nvfp4(count), *(f"mov.b32 ${i}, {word};" for i, word in enumerate(NVFP4_WORDS))]
        return _text(lines, {"table": n, "ids": n + 1, "first": n + 2, "half": n + 3})

    def unpack_ptx(self) -> str:
        """Of `unpack`; the words are its last operands."""
        words = [f".reg .b32 {word}; mov.b32 {word}, ${1 + i};" for i, word in enumerate(NVFP4_WORDS)]
        return _text([*words, *_unpack_nvfp4(), _FENCE], {"tile": 0})

    def fetch_ptx(self, count: int) -> str:
        """Of `fetch`, from a table of `count` rows an entry."""
        lines = {"bf16": _copy_bf16, "fp8": _unpack_fp8}[self.name](count)
        return _text([*lines, _FENCE], {"tile": 0, "table": 1, "ids": 2, "first": 3, "half": 4})


def _text(lines: list[str], operands: dict[str, int]) -> str:
    text = "\n".join(["{", *lines, "}"])
    for name, number in operands.items():
        text = text.replace(f"${name}", f"${number}")
    return text


def row_format(rows: Shaped[Array, "B S row"], channels: int) -> Format:
    """The format of rows of `channels` values, told by dtype and width."""
    name, width = rows.dtype.name, rows.shape[-1]
    known = {
        ("bfloat16", channels): "bf16",
        ("uint8", 2 * channels): "bf16",
        ("uint8", channels + channels // GROUP): "fp8",
        ("uint8", channels // 2 + channels // NVFP4_GROUP): "nvfp4",
    }
    if (name, width) not in known:
        wanted = ", ".join(f"{dtype}[{size}]" for dtype, size in known)
        raise BackendError(f"backend 'pallas': sparse_attention has no row of {name}[{width}]; there are {wanted}")
    return Format(known[name, width])
