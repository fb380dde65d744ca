"""The experts' kernel in interpret mode against float64, its decoding instructions, and the rows that it walks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, oracle64, ptx
from pallas_kernels.formats import E2M1_VALUES
from pallas_kernels.grouped_matmul import cases, experts, groups, kernel
from pallas_kernels.hopper import fragments


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_kernel_agrees_with_float64(case):
    inputs = case.inputs(0)
    assert not case.problems(inputs, case.kernel(*inputs, interpret=True))


def test_kernel_error_is_the_references_own_rounding():
    case = cases.SMALL[1]
    inputs = case.inputs(1)
    x, _, expert, start, live, tiles, codes, scales = (np.asarray(v) for v in inputs)
    columns = np.asarray(fragments.FP4.permute(jnp.arange(x.shape[1]))).argsort()
    outputs = [np.asarray(f(*inputs)) for f in (lambda *v: case.kernel(*v, interpret=True), jax.jit(case.reference))]
    assert not case.problems(inputs, outputs[1])
    for t in range(int(tiles[0])):
        rows = slice(start[t], start[t] + live[t])
        exact = x[rows].astype(np.float64)[:, columns] @ oracle64.mxfp4(codes[expert[t]], scales[expert[t]]).T
        kernels, references = (np.linalg.norm(out[rows].astype(np.float64) - exact) for out in outputs)
        assert kernels <= 1.5 * references


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MODEL, ids=lambda case: case.name)
def test_kernel_agrees_with_float64_at_model_shapes(case):
    inputs = case.inputs(0)
    assert not case.problems(inputs, case.kernel(*inputs))


def execute(ptx: str, operands: dict[str, int]) -> dict[str, int]:
    """Run the few PTX instructions that the decoders use, on Python integers."""
    registers = dict(operands)

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for text in re.sub(r"\.reg[^;]*;|[{}]", "", ptx).split(";"):
        if not text.strip():
            continue
        operation, rest = text.split(None, 1)
        target, *names = (name.strip() for name in rest.split(","))
        match operation, [read(name) for name in names]:
            case "shr.b32", [x, n]:
                value = x >> n
            case "shl.b32", [x, n]:
                value = x << n
            case "and.b32", [x, y]:
                value = x & y
            case "lop3.b32", [x, y, z, 0xEA]:
                value = x & y | z
            case "mul.rn.bf16x2", [x, y]:
                halves = np.array([x, y], np.uint32).view(jnp.bfloat16).astype(np.float64).reshape(2, 2)
                value = int(halves.prod(axis=0).astype(jnp.bfloat16).view(np.uint32)[0])
            case other:
                raise AssertionError(other)
        registers[target] = value & 0xFFFFFFFF
    return registers


def pairs(registers: dict[str, int], count: int) -> np.ndarray:
    """The bfloat16 pairs in registers $0 .. as float64."""
    words = np.array([registers[f"${i}"] for i in range(count)], np.uint32)
    return words.view(jnp.bfloat16).astype(np.float64).reshape(count, 2)


def test_instructions_decode_every_e2m1_code():
    for byte in range(256):
        word = byte | (byte ^ 0x5A) << 8 | (255 - byte) << 16 | (byte * 7 & 255) << 24
        scale = int(np.array(2.0 ** (126 - 32 - 5), jnp.bfloat16).view(np.uint16))
        got = pairs(execute(ptx.E2M1_WORD, {"$4": word, "$5": scale * 0x10001}), 4)
        value = E2M1_VALUES[[word >> 4 * i & 15 for i in range(8)]] * 2.0 ** -(5 + 32)
        np.testing.assert_array_equal(got, np.stack([value[:4], value[4:]], axis=-1))


def test_instructions_decode_every_e4m3_code():
    for byte in range(256):
        if byte & 127 == 127:
            continue  # NaN is not kept
        word = byte | 0x3A << 8 | byte << 16 | byte << 24
        scale = int(np.array(2.0 ** (120 - 32 + 3), jnp.bfloat16).view(np.uint16))
        got = pairs(execute(ptx.E4M3_WORD, {"$2": word, "$3": scale * 0x10001}), 2)
        value = np.array([word], np.uint32).view(jnp.float8_e4m3fn).astype(np.float64) * 2.0 ** (3 - 32)
        np.testing.assert_array_equal(got, np.stack([value[:2], value[2:]], axis=-1))


def test_fragments_are_the_weights_in_the_order_of_permute():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 128), np.uint8)
    scales = rng.integers(60, 160, (64, 8), np.uint8)
    words = fragments.FP4.scales(jnp.asarray(scales), 2, interpret=True)
    dense = np.asarray(fragments.FP4.permute(jnp.asarray(oracle64.mxfp4(codes, scales), jnp.float32)))
    for chunk in range(2):
        read = fragments.FP4.read(jnp.asarray(codes), chunk, interpret=True)
        got = [fragments.FP4.fragment(read, words, chunk, half, interpret=True) for half in range(2)]
        expected = dense[:, 128 * chunk : 128 * chunk + 128] / fragments.UNSCALE
        np.testing.assert_array_equal(np.concatenate(got, axis=1).astype(np.float32), expected)


@pytest.mark.parametrize("form", [fragments.FP4, fragments.FP8])
def test_permute_moves_columns_inside_chunks_only(form):
    order = np.asarray(form.permute(jnp.arange(512)[None]))[0].reshape(4, 128)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.arange(512).reshape(4, 128))


@pytest.mark.parametrize(("tokens", "idle", "compared"), [(1, 0, 4096), (3, 6, 4096), (40, 5, 4096), (40, 5, 0)])
def test_groups_cover_every_row_once(tokens, idle, compared, monkeypatch):
    monkeypatch.setattr(groups, "COMPARED", compared)
    rng = np.random.default_rng(tokens)
    ids = np.stack([np.sort(rng.permutation(8 - idle)[:2]) for _ in range(tokens)]).astype(np.int32)
    found = jax.device_get(groups.group(jnp.asarray(ids), 8, 16))
    plan = found.plan
    places = found.place.reshape(-1)
    assert len(set(places.tolist())) == len(places)
    np.testing.assert_array_equal(found.slot[places], np.arange(ids.size))
    walked = []
    for t in range(int(plan.tiles[0])):
        rows = plan.start[t] + np.arange(plan.live[t])
        assert plan.start[t] % 8 == 0
        assert 0 < plan.live[t] <= 16
        assert plan.start[t] + 16 <= len(found.slot)
        assert (ids.reshape(-1)[found.slot[rows]] == plan.expert[t]).all()
        walked += rows.tolist()
    assert sorted(walked) == sorted(places.tolist())


def test_what_does_not_fit_is_refused():
    tile = kernel.H200.others[0][1]
    w = jnp.zeros((2, 256, 256), jnp.uint8)
    kernel.check(jnp.zeros((1, 512), jnp.bfloat16), w, tile)
    with pytest.raises(BackendError, match="bfloat16 x, not float32"):
        kernel.check(jnp.zeros((1, 512), jnp.float32), w, tile)
    with pytest.raises(BackendError, match="expert width F 64 is not a multiple of 256"):
        kernel.check(jnp.zeros((1, 512), jnp.bfloat16), w[:, :64], tile)
    with pytest.raises(BackendError, match="width D 256 is not a multiple of 512"):
        kernel.check(jnp.zeros((1, 256), jnp.bfloat16), w[..., :128], tile)


def test_pallas_without_a_gpu_is_refused():
    x, ids, weights, *w = cases.SMALL[2].inputs(0)
    with pytest.raises(BackendError, match="needs a GPU"):
        experts(
            x, ids, weights, tuple(w[:2]), tuple(w[2:4]), tuple(w[4:]), limit=1.0, round_input=lambda v: v,
            backend="pallas",
        )  # fmt: skip
