"""The fused site and its kernel: against float64, against the functions it fuses, and its gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from dsv41_jax.nn.norm import rmsnorm
from pallas_kernels import BackendError, mhc
from pallas_kernels.formats import cast
from pallas_kernels.mhc import cases, kernel, reference, stream
from pallas_kernels.mhc.mixes import Sizes

BY_NAME = {case.name: case for case in cases.SMALL}
EVERY = pytest.mark.parametrize("name", list(BY_NAME))


@EVERY
def test_kernel_equals_float64_within_the_models_rounding(name):
    case = BY_NAME[name]
    given = case.inputs(11)
    assert case.problems(given, jax.jit(partial(case.kernel, interpret=True))(*given)) == []


@EVERY
def test_reference_equals_float64_within_the_models_rounding(name):
    case = BY_NAME[name]
    given = case.inputs(12)
    assert case.problems(given, jax.jit(case.reference)(*given)) == []


def test_a_wrong_row_of_any_output_is_a_problem():
    case = BY_NAME["ragged"]
    given = case.inputs(13)
    good = jax.jit(case.reference)(*given)
    for i, name in enumerate(("X'", "next input", "pre", "post", "comb")):
        for change in (1.02, np.nan):
            bad = list(good)
            bad[i] = bad[i].at[1, 8].multiply(change)
            assert case.problems(given, bad)[0].startswith(name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_site_is_the_functions_that_the_model_calls_in_turn(dtype):
    given = [a.astype(dtype) if a.dtype == jnp.bfloat16 else a for a in BY_NAME["ragged"].inputs(14)[:9]]
    x, y, post, comb, mix, norm, *weights = given
    new = cast(mhc.update(x, y, post, comb), dtype)
    read = rmsnorm(cast(mhc.collapse(new, mix), dtype), norm, eps=1e-20, dtype=dtype)
    expected = new, read, *mhc.coefficients(new, *weights, **cases.SIZES)
    jax.tree.map(np.testing.assert_array_equal, mhc.site(*given, **cases.SIZES), expected)


def test_split_fn_keeps_sixteen_bits():
    fn = jax.random.normal(jax.random.key(0), (24, 96))
    split = mhc.split_fn(fn)
    assert split.shape == (48, 96)
    halves = np.asarray(split, np.float64)
    np.testing.assert_array_equal(mhc.join_fn(split), halves[:24] + halves[24:])
    assert (np.abs(halves[:24] + halves[24:] - np.asarray(fn, np.float64)) <= 2.0**-17 * np.abs(fn)).all()
    assert mhc.join_fn(fn) is fn


def test_gradient_of_the_kernel_equals_a_finite_difference_in_float64():
    given = BY_NAME["one-token"].inputs(15)
    rng = np.random.default_rng(0)
    given = (jnp.asarray(rng.standard_normal(given[0].shape), jnp.bfloat16), given[1] + 1, *given[2:9])
    run = mhc._recomputed(partial(kernel.site, interpret=True, tile=cases.TINY), reference.site)
    outputs, backward = jax.vjp(partial(run, Sizes(**cases.SIZES)), *given)
    weights = [rng.standard_normal(out.shape) for out in outputs]
    gradients = backward(tuple(jnp.asarray(w, out.dtype) for w, out in zip(weights, outputs, strict=True)))
    start = [np.asarray(a, np.float64) for a in given]
    along = [rng.standard_normal(a.shape) * (a.std() + 0.1) for a in start]

    def value(step: float) -> float:
        x, y, post, comb, mix, norm, fn, scale, base = (a + step * d for a, d in zip(start, along, strict=True))
        new = post[..., None] * y[:, None] + np.einsum("kij,kid->kjd", comb, x)
        read = np.einsum("km,kmd->kd", mix, new)
        read = norm * read / np.sqrt((read * read).mean(1, keepdims=True))
        rest = cases.exact_coefficients(new.reshape(1, -1), fn, scale, base, 4)[:3]
        return sum((w * out).sum() for w, out in zip(weights, (new, read, *rest), strict=True))

    expected = (value(1e-5) - value(-1e-5)) / 2e-5
    ours = [float((np.asarray(g, np.float64) * d).sum()) for g, d in zip(gradients, along, strict=True)]
    # Every cotangent and most gradients are rounded to bfloat16 once or twice: 2**-8 of each term.
    assert abs(sum(ours) - expected) <= 2.0**-7 * sum(abs(v) for v in ours)


def on_h200():
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: [a[0].astype(jnp.float32), *a[1:]], "mhc takes x in bfloat16, not float32"),
        (lambda a: [*a[:5], a[5].astype(jnp.float32), *a[6:]], "mhc takes norm in bfloat16, not float32"),
        (lambda a: a, r"mhc takes a width in multiples of 1024, .* x is \(2, 9, 4, 128\)"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_in_one_line(change, words):
    given = change(list(BY_NAME["ragged"].inputs(16)[:9]))
    with on_h200(), pytest.raises(BackendError, match=f"^backend 'pallas': {words}"):
        mhc.site(*given, **cases.SIZES, backend="pallas")


def test_without_a_gpu_the_kernel_is_refused():
    with pytest.raises(BackendError, match=r"mhc\.site needs a GPU"):
        mhc.site(*BY_NAME["ragged"].inputs(17)[:9], **cases.SIZES, backend="pallas")


def test_the_model_tiles_cover_every_call_and_the_models_width():
    for tiles in (kernel.H200, kernel.B300):
        assert [t.limit for t in tiles] == sorted(t.limit for t in tiles)
        assert isinstance(tiles[-1], kernel.Tile)
        assert tiles[-1].limit >= 1 << 30
        assert all(5120 % t.step == 0 for t in tiles)


def test_many_tokens_take_one_launch_where_the_gpu_and_their_number_allow_it():
    def chosen(tokens, tiles, kinds):
        found = []
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, 4, 5120), (48, 20480))]
        jax.eval_shape(lambda x, fn: found.append(kernel._fits(x, fn, tiles, kinds)), *shapes)
        return found[0]

    both = kernel.Tile, stream.Tile
    assert isinstance(chosen(8192, kernel.H200, both), stream.Tile)
    for other in ((8191, kernel.H200, both), (64, kernel.H200, both), (8192, kernel.B300, both)):
        assert isinstance(chosen(*other), kernel.Tile)
    assert isinstance(chosen(8192, kernel.H200, (kernel.Tile,)), kernel.Tile)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.MODEL, ids=lambda case: case.name)
def test_kernel_at_the_models_sizes(case):
    given = case.inputs(18)
    assert case.problems(given, jax.jit(case.kernel)(*given)) == []
