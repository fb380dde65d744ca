"""Dense FP8 layers in interpret mode against float64, and beside the model's own layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.nn.linear import QuantizedLinear, product
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels import BackendError
from pallas_kernels.block_linear import block_diagonal, block_linear, cases, kernel
from pallas_kernels.formats import cast, dequantize_fp8
from pallas_kernels.hopper import fragments


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_kernel_agrees_with_float64(case):
    inputs = case.inputs(0)
    assert not case.problems(inputs, case.kernel(*inputs, interpret=True))
    assert not case.problems(inputs, jax.jit(case.reference)(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MODEL, ids=lambda case: case.name)
def test_kernel_agrees_with_float64_at_model_shapes(case):
    inputs = case.inputs(0)
    assert not case.problems(inputs, case.kernel(*inputs))


@pytest.mark.parametrize("name", ["float32", "reference"])
def test_the_models_layer_is_one_product_with_the_dequantized_matrix(name):
    num = numerics_by_name(name)
    layer = QuantizedLinear(96, 64, ("out", "in"))
    _, weight, scale = cases.case("ragged", tokens=3, columns=64, rows=96).inputs(2)
    layer.weight[...], layer.scale[...] = weight, jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    x = jax.random.normal(jax.random.key(0), (2, 3, 64), num.dtype)
    expected = cast(product(num.activation(x), dequantize_fp8(weight, scale, num.dtype)), num.dtype)
    np.testing.assert_array_equal(np.asarray(layer(x, num)), np.asarray(expected))


def test_row_blocks_are_layers_of_their_own():
    x, weight, scale = cases.case("blocks", tokens=3, columns=64, rows=96, groups=2).inputs(3)
    expected = [block_linear(x[:, g], weight[96 * g :][:96], scale[3 * g :][:3]) for g in range(2)]
    np.testing.assert_array_equal(np.asarray(block_diagonal(x, weight, scale)), np.stack(expected, axis=1))


def test_fragments_are_the_weights_in_the_order_of_permute():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 256), np.uint8)
    codes[(codes & 127) == 127] = 0x3A  # NaN is not kept
    scales = rng.integers(80, 150, (2, 8), np.uint8)
    words = fragments.FP8.scales(jnp.asarray(scales), 2, interpret=True)
    values = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    dense = values * np.repeat(np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, 0), 32, 1)
    dense = np.asarray(fragments.FP8.permute(jnp.asarray(dense.astype(np.float32))))
    for chunk in range(2):
        read = fragments.FP8.read(jnp.asarray(codes), chunk, interpret=True)
        got = [fragments.FP8.fragment(read, words, chunk, half, interpret=True) for half in range(2)]
        expected = dense[:, 128 * chunk : 128 * chunk + 128] / np.float32(fragments.UNSCALE)
        np.testing.assert_array_equal(np.concatenate(got, axis=1).astype(np.float32), expected)


def test_columns_are_split_when_rows_are_few():
    tile = kernel.H200.few
    assert kernel.splits_of(32768, 1280, tile) == 1
    assert kernel.splits_of(1280, 5120, tile) * 5 <= tile.blocks
    assert kernel.splits_of(1280, 5120, tile) > 4


def test_what_does_not_fit_is_refused():
    weight, scale = jnp.zeros((256, 128), jnp.float8_e4m3fn), jnp.full((8, 4), 127, jnp.uint8)
    with pytest.raises(BackendError, match="bfloat16 x, not float32"):
        kernel.block_linear(jnp.zeros((1, 128), jnp.float32), weight, scale)
    with pytest.raises(BackendError, match="a matrix of 96 x 128 is not in multiples of 256 x 128"):
        kernel.block_linear(jnp.zeros((1, 128), jnp.bfloat16), weight[:96], scale[:3])
    with pytest.raises(BackendError, match="needs a GPU"):
        block_linear(jnp.zeros((1, 128), jnp.bfloat16), weight, scale, backend="pallas")
    assert kernel.block_linear(jnp.zeros((0, 128), jnp.bfloat16), weight, scale).shape == (0, 256)
