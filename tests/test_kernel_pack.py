"""Cached rows: the kernel and the reference against the formats' tables, the model's packers, and each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from dsv41_jax import numerics
from dsv41_jax.nn.norm import rmsnorm
from dsv41_jax.nn.rope import rotate
from pallas_kernels import BackendError, oracle64, pack
from pallas_kernels.pack import cases, kernel

BY_NAME = {case.name: case for case in cases.SMALL}
EVERY = pytest.mark.parametrize("name", list(BY_NAME))
MODEL = {"fp8": numerics.pack_fp8, "nvfp4": numerics.pack_nvfp4, "mxfp4": numerics.pack_mxfp4}
LAYOUTS = pytest.mark.parametrize("layout", list(MODEL))


@EVERY
def test_kernel_writes_the_bytes_of_the_formats_tables(name):
    case = BY_NAME[name]
    given = case.inputs(21)
    assert case.problems(given, jax.jit(partial(case.kernel, interpret=True))(*given)) == []


@EVERY
def test_reference_writes_the_bytes_of_the_formats_tables(name):
    case = BY_NAME[name]
    for seed in range(22, 26):
        given = case.inputs(seed)
        assert case.problems(given, jax.jit(case.reference)(*given)) == []


@EVERY
def test_a_wrong_byte_and_a_row_that_should_have_stayed_are_problems(name):
    case = BY_NAME[name]
    given = case.inputs(27)
    good = np.array(case.reference(*given))
    slot = int(given[3][0, 1])
    for column in (0, -1):
        bad = good.copy()
        bad[0, slot, column] ^= 1
        assert "have wrong bytes, first sequence 0, token 1" in case.problems(given, bad)[0]
    unnamed = next(s for s in range(good.shape[1]) if s not in np.asarray(given[3][0]))
    bad = good.copy()
    bad[0, unnamed, 0] ^= 1
    assert case.problems(given, bad) == ["rows that no slot names changed"]


def special_rows(channels: int) -> jax.Array:
    """Every finite bfloat16 in some row, ties of every format, zeros of both signs, the largest and smallest groups."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits[(bits & 0x7F80) != 0x7F80].reshape(-1, 32)
    near = np.abs(every[:, :1].astype(np.int32) - 0x3F80) < 64 * 20  # groups around one
    rng = np.random.default_rng(0)
    ties = rng.choice(np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.0, -5, 1.0625, 448, 17]), (256, 32))
    ties *= np.exp2(rng.integers(-30, 30, (256, 1)))
    groups = [every.view(jnp.bfloat16), every[near[:, 0]].view(jnp.bfloat16), ties.astype(jnp.bfloat16)]
    flat = np.concatenate([np.concatenate([g.reshape(-1) for g in groups]), np.zeros(channels, jnp.bfloat16)])
    return jnp.asarray(flat[: len(flat) // channels * channels].reshape(1, -1, channels))


@LAYOUTS
def test_without_norm_and_rotation_rows_equal_the_models_packers_bit_for_bit(layout):
    x = special_rows(128)
    at_zero = jnp.zeros(x.shape[:2], jnp.int32), jnp.ones(32)
    still = rotate(x, at_zero[0], np.ones(32, np.float32))  # by angle 0: only -0 may become 0
    expected = np.asarray(jax.jit(MODEL[layout])(still))
    ours = pack.pack(x, *at_zero, None, eps=1e-20, layout=layout)
    np.testing.assert_array_equal(ours, expected)
    few = x[:, :: x.shape[1] // 60]
    zeros = at_zero[0][:, : few.shape[1]], at_zero[1]
    ours = jax.jit(partial(kernel.pack, eps=1e-20, layout=layout, interpret=True))(few, *zeros, None)
    np.testing.assert_array_equal(ours, expected[:, :: x.shape[1] // 60])


@LAYOUTS
def test_reference_is_the_models_norm_rotation_and_packer_in_turn(layout):
    _, x, positions, _, freqs, norm = cases.inputs(28, batch=2, tokens=7, channels=128, layout=layout, slots=9)
    normed = rmsnorm(x, norm, eps=1e-20, dtype=x.dtype)
    expected = MODEL[layout](rotate(normed, positions, np.asarray(freqs)))
    ours = pack.pack(x, positions, freqs, norm, eps=1e-20, layout=layout)
    np.testing.assert_array_equal(ours, expected)


def test_e4m3_of_a_sixth_is_correct_at_every_tie_and_beside_it():
    grid = oracle64.E4M3[:127]
    ties = 3 * (grid[1:] + grid[:-1])
    amax = np.concatenate([ties, np.nextafter(ties.astype(np.float32), 0), np.nextafter(ties.astype(np.float32), 9e9)])
    amax = np.maximum(np.concatenate([amax, [2700, 1e30]]), 6 * 2.0**-9).astype(np.float32)
    expected = cases.nearest(amax.astype(np.float64) / 6, grid)
    np.testing.assert_array_equal(jax.jit(kernel._e4m3_sixth)(jnp.asarray(amax)), expected)


def test_bfloat16_rounding_by_bits_equals_the_cast():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10000, np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    expected = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(
        np.asarray(kernel._bfloat16(jnp.asarray(x))).view(np.uint32), expected.view(np.uint32)
    )


def test_pieces_cover_the_channels_once_and_end_with_the_rotary_ones():
    assert kernel.pieces(512, 64) == [(0, 256), (256, 128), (384, 64), (448, 64)]
    assert kernel.pieces(128, 64) == [(0, 64), (64, 64)]


def test_a_store_that_is_not_donated_keeps_its_rows():
    store, *rest = BY_NAME["index"].inputs(29)
    before = np.array(store)
    kernel.insert(store, *rest, eps=1e-20, layout="mxfp4", interpret=True)
    np.testing.assert_array_equal(store, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.float32}, "pack takes x in bfloat16, not float32"),
        ({"norm": jnp.float32}, "pack takes norm in bfloat16, not float32"),
        ({"freqs": 4}, "powers of two with 16 rotary channels at least, not 8 of 128"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_in_one_line(change, words):
    _, x, positions, _, freqs, norm = cases.inputs(30, batch=1, tokens=2, channels=128, layout="nvfp4", slots=3)
    x, norm = x.astype(change.get("x", x.dtype)), norm.astype(change.get("norm", norm.dtype))
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(h200), pytest.raises(BackendError, match=f"^backend 'pallas': .*{words}"):
        pack.pack(x, positions, freqs[: change.get("freqs", 32)], norm, eps=1e-20, layout="nvfp4", backend="pallas")


def test_a_store_between_two_and_four_gib_is_refused():
    shapes = [(1, 1 << 22, 528), (1, 1, 512)]
    store, x = (jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.uint8, jnp.bfloat16), strict=True))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    rest = token, token, jax.ShapeDtypeStruct((32,), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.bfloat16)
    with pytest.raises(BackendError, match="a store below 2 or from 4 GiB"):
        jax.eval_shape(partial(kernel.insert, eps=1e-20, layout="fp8"), store, x, *rest)


def test_unknown_layouts_and_wrong_stores_are_named():
    store, x, positions, slots, freqs, norm = cases.inputs(31, batch=1, tokens=2, channels=128, layout="mxfp4", slots=3)
    with pytest.raises(ValueError, match="layout: 'int8' is not one of fp8, nvfp4, mxfp4"):
        pack.pack(x, positions, freqs, norm, eps=1e-20, layout="int8")
    with pytest.raises(ValueError, match="store: rows of 68 bytes, fp8 of 128 channels has 132"):
        pack.insert(store, x, positions, slots, freqs, norm, eps=1e-20, layout="fp8")
    with pytest.raises(BackendError, match=r"pack\.insert needs a GPU"):
        pack.insert(store, x, positions, slots, freqs, norm, eps=1e-20, layout="mxfp4", backend="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MODEL, ids=lambda case: case.name)
def test_kernel_at_the_models_sizes(case):
    given = case.inputs(32)
    assert case.problems(given, jax.jit(case.kernel)(*given)) == []


def test_rows_have_the_released_bytes():
    assert [pack.width(512, "fp8"), pack.width(512, "nvfp4"), pack.width(128, "mxfp4")] == [528, 288, 68]
