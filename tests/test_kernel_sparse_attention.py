"""Sparse attention's kernels: against float64 in interpret mode, the rows' PTX on a machine of its own, gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ptx import Machine

from dsv41_jax import numerics
from pallas_kernels import BackendError, oracle64
from pallas_kernels.sparse_attention import cases, forward, kernel, row_ptx, sparse_attention, triton

SMALL = {case.name: case for case in cases.SMALL}
STORED = {"bf16": numerics.unpack_bf16, "fp8": numerics.unpack_fp8, "nvfp4": numerics.unpack_nvfp4}
TILES = {
    "whole queries, one program": replace(forward.H200, programs=1),
    "whole queries, two programs": replace(forward.H200, programs=2),
    "keys split over programs": replace(forward.H200, programs=12),
    "triton": triton.H200,
}


def error(value: np.ndarray, exact: np.ndarray) -> float:
    """Of the worst query, as a share of its norm."""
    difference = np.linalg.norm((np.asarray(value).astype(np.float64) - exact).reshape(len(exact), -1), axis=1)
    return float((difference / np.maximum(np.linalg.norm(exact.reshape(len(exact), -1), axis=1), 1e-30)).max())


@pytest.mark.parametrize(
    ("name", "tile"),
    [("values", "whole queries, two programs"), ("packed, uneven lists", "whole queries, two programs"),
     ("no main rows", "whole queries, two programs"), ("odd number of blocks", "whole queries, one program"),
     ("packed, uneven lists", "keys split over programs"), ("values", "triton")],
)  # fmt: skip
def test_kernel_is_as_near_to_float64_as_the_reference(name, tile):
    case, shape = SMALL[name], cases.SMALL_SHAPES[name]
    given = case.inputs(3)
    o, lse = case.kernel(*given, tile=TILES[tile], interpret=True)
    assert case.problems(given, (o, lse)) == []
    exact, exact_lse = zip(*(cases.expected(given, b, t, shape.H**-0.5) for b, t in cases.sample(shape)), strict=True)
    theirs, their_lse = case.reference(*given)
    assert error(o.reshape(-1, *o.shape[2:]), np.stack(exact)) <= 1.5 * error(
        theirs.reshape(-1, *o.shape[2:]), np.stack(exact)
    )
    np.testing.assert_allclose(lse.reshape(-1, shape.N), np.stack(exact_lse), rtol=0, atol=2e-6)
    np.testing.assert_allclose(their_lse.reshape(-1, shape.N), np.stack(exact_lse), rtol=0, atol=2e-6)


def test_a_wrong_value_anywhere_is_a_problem():
    case = SMALL["values"]
    given = case.inputs(4)
    o, lse = case.reference(*given)
    assert case.problems(given, (o, lse)) == []
    assert "o is off" in case.problems(given, (o.at[1, 1, 5].multiply(1.1), lse))[0]
    assert "lse is off" in case.problems(given, (o, lse.at[0, 1, 7].add(1e-3)))[0]
    assert "not finite" in case.problems(given, (o.at[0, 0, 0, 0].set(jnp.nan), lse))[0]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", list(STORED))
def test_ptx_leaves_the_unpacked_rows_in_swizzled_tiles(name, half):
    rng = np.random.default_rng(half)
    count, first, tile, ids_at, table_at = 40, 7, 1024, 40960, 48
    packed = random_rows(rng, name, count + first)
    unpacked = (oracle64.cached_rows(packed, 512) * 2.0 ** -row_ptx.Format(name).down).astype(ml_dtypes.bfloat16)
    ids = rng.integers(-1, count + 3, 64).astype(np.int32)  # above the table: clamped to its last row
    ids[:4] = (-1, 0, count - 1, 10 * count)
    shared = np.full(1 << 16, 0xAB, np.uint8)
    shared[ids_at : ids_at + 256] = ids.view(np.uint8)
    memory = np.concatenate([np.zeros(table_at, np.uint8), packed.reshape(-1)])
    fmt, operands = row_ptx.Format(name), [table_at, ids_at, first, half]
    if fmt.words:  # read into registers first
        reading = Machine([0] * fmt.words + operands, memory, shared)
        reading.run(fmt.load_ptx(count))
        writing = Machine([tile], memory, shared)
        writing.registers |= {f"${1 + i}": reading.registers[f"${i}"] for i in range(fmt.words)}
        writing.run(fmt.unpack_ptx())
    else:
        Machine([tile, *operands], memory, shared).run(fmt.fetch_ptx(count))

    chunks = shared[tile : tile + 64 * 512].reshape(8, 4, 8, 8, 16)  # eight keys, 64 channels, key, place, bytes
    key = np.arange(8)
    places = np.stack([chunks[:, :, k, key ^ k] for k in key], axis=2)
    got = places.transpose(0, 2, 1, 3, 4).reshape(64, 512).view(np.uint16)
    expected = np.where((ids >= 0)[:, None], unpacked[first + np.clip(ids, 0, count - 1)], ml_dtypes.bfloat16(0))
    np.testing.assert_array_equal(got, expected[:, 256 * half : 256 * half + 256].view(np.uint16))
    written = shared != 0xAB
    assert not written[:tile].any() and not written[tile + 64 * 512 : ids_at].any()


class Lanes(Machine):
    """With the instructions that exchange registers and write global memory."""

    def step(self, op, args, on):
        if op == "shfl.sync.bfly.b32":
            self.registers[args[0]] = self.value(args[1])[np.arange(128) ^ int(args[2])]
        elif op == "setp.ne.u32":
            self.registers[args[0]] = (self.value(args[1]) != self.value(args[2])).astype(np.uint64)
        elif op == "setp.ge.u32":
            self.registers[args[0]] = (self.value(args[1]) >= self.value(args[2])).astype(np.uint64)
        elif op == "st.global.v4.b32":
            at = self.address(args[0])
            words = [self.value(word.strip()) for word in args[1].strip("{}").split(",")]
            for i in range(16):
                self.memory[at + i] = (words[i // 4] >> np.uint64(8 * (i % 4)) & np.uint64(255)).astype(np.uint8)
        else:
            super().step(op, args, on)


def test_ptx_writes_an_accumulator_where_it_belongs():
    part, column, base, thread = 128, 384, 64, np.arange(128)
    value = np.arange(64 * part).astype(np.uint16).reshape(64, part)
    lanes = Lanes([base, 2 * column], np.full(1 << 17, 0xAB, np.uint8), np.zeros(16, np.uint8))
    for block in range(part // 8):  # as wgmma leaves it: two columns of rows r and r + 8
        for half in range(2):
            row, at = 16 * (thread // 32) + thread % 32 // 4 + 8 * half, 8 * block + 2 * (thread % 4)
            pair = value[row, at] | value[row, at + 1].astype(np.uint64) << np.uint64(16)
            lanes.registers[f"${2 + 2 * block + half}"] = pair.astype(np.uint64)
    lanes.run(forward.store_ptx(1024, part))
    got = lanes.memory[base : base + 64 * 1024].view(np.uint16).reshape(64, 512)
    np.testing.assert_array_equal(got[:, column : column + part], value)
    assert (got[:, :column] == 0xABAB).all() and (got[:, column + part :] == 0xABAB).all()


def random_rows(rng: np.random.Generator, name: str, count: int) -> np.ndarray:
    """Rows of 512 channels of every code (but NaN) and a wide range of scales, as bytes."""
    if name == "bf16":
        return rng.standard_normal((count, 512)).astype(ml_dtypes.bfloat16).view(np.uint8)
    codes, groups, low, high = (512, 16, 97, 140) if name == "fp8" else (256, 32, 1, 0x7F)
    code, scale = rng.integers(0, 256, (count, codes)), rng.integers(low, high, (count, groups))
    if name == "fp8":
        code = np.where(code & 0x7F == 0x7F, code ^ 1, code)
    return np.concatenate([code, scale], axis=1).astype(np.uint8)


@pytest.mark.parametrize("name", list(STORED))
def test_cases_read_rows_as_the_model_does(name):
    packed = random_rows(np.random.default_rng(2), name, 5)
    model = np.asarray(STORED[name](jnp.asarray(packed), jnp.float32)).astype(np.float64)
    np.testing.assert_array_equal(oracle64.cached_rows(packed, 512), model)
    if name != "bf16":
        ours = {"fp8": cases.unpack_fp8, "nvfp4": cases.unpack_nvfp4}[name](jnp.asarray(packed), jnp.float32)
        np.testing.assert_array_equal(ours, model)


def test_gradients_are_as_near_to_float64_as_the_references():
    shape = cases.SMALL_SHAPES["values"]
    case = cases.gradient("values", shape)
    given = case.inputs(5)
    ours = case.kernel(*given, tile=TILES["triton"], interpret=True)
    theirs = case.reference(*given)
    assert case.problems(given, ours) == []
    *arrays, do, dlse = given
    exact = cases.gradient64(tuple(arrays), np.asarray(do), np.asarray(dlse), shape.H**-0.5)
    for name, a, b, c in zip(("q", "window", "main", "sink"), ours, theirs, exact, strict=True):
        assert np.isfinite(np.asarray(a)).all(), name
        assert error(a[None], c[None]) <= 1.5 * error(b[None], c[None]), name
    wrong = [ours[0], ours[1].at[0, 3].multiply(2), *ours[2:]]
    assert "gradient of window is off" in case.problems(given, wrong)[0]


def test_rows_and_queries_that_the_kernel_does_not_take_are_refused():
    q = jnp.zeros((1, 1, 64, 512), jnp.bfloat16)
    with pytest.raises(BackendError, match=r"no row of uint8\[272\]"):
        row_ptx.row_format(jnp.zeros((1, 4, 272), jnp.uint8), 512)
    ids = jnp.zeros((1, 1, 4), jnp.int32)
    with pytest.raises(BackendError, match="needs a GPU"):
        sparse_attention(q, q[:, :, 0], ids, q[:, :, 0], ids, jnp.zeros(64), scale=0.1, backend="pallas")
    with pytest.raises(BackendError, match="64 heads of 512"):
        kernel._check(q[:, :, :32], interpret=False)
    with pytest.raises(BackendError, match="bfloat16, not float32"):
        kernel._check(q.astype(jnp.float32), interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MODEL, ids=[case.name for case in cases.MODEL])
def test_model_shapes_on_a_gpu(case):
    given = case.inputs(6)
    first = jax.jit(case.kernel)(*given)
    assert case.problems(given, first) == []
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(case.kernel)(*given), first)
