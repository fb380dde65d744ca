"""Gradients through the whole forward pass: finite, and blind to rows that hold nothing but padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import Call


@pytest.fixture(scope="module")
def gradients(small):
    """Gradients of a loss over the first row, by the float32 parameters and the residual of the embedding."""
    cfg, num = small.config, small.numerics
    leaves, structure = jax.tree.flatten(small.params)
    trained = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]

    @jax.jit
    def run(values, call, cache):
        def loss(values):
            full = list(leaves)
            for i, value in zip(trained, values, strict=True):
                full[i] = value
            params = jax.tree.unflatten(structure, full)
            logits, _, _ = params(call, cache, cfg=cfg, numerics=num)
            live = (jnp.arange(call.tokens.shape[1]) < call.count[0])[:, None]
            return jnp.sum(jnp.where(live, jax.nn.log_softmax(logits[0]), 0.0) ** 2)

        return jax.grad(loss)(values)

    def of(tokens, count):
        cache = small.init_cache(2, 24)
        count = np.array(count, np.int32)
        rows, _ = small.engram.read(tokens, count, cache.length, cache.history, None)
        return run([leaves[i] for i in trained], Call(tokens, count, rows), cache)

    return of


TOKENS = np.random.default_rng(0).integers(8, 280, (2, 20)).astype(np.int32)


def test_gradients_are_finite_and_not_all_zero_for_every_float32_parameter(gradients):
    found = gradients(TOKENS, [20, 20])
    assert all(np.isfinite(g).all() for g in found)
    # A router's biases only select: no gradient reaches them. Everything else takes part.
    silent = [g.shape for g in found if not np.any(g)]
    assert set(silent) <= {(4,)}


def test_a_row_of_padding_changes_no_gradient_of_the_others(gradients):  # all keys masked: softmax gives NaN
    beside = gradients(TOKENS, [17, 20])
    alone = gradients(TOKENS, [17, 0])
    for one, other in zip(beside, alone, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(one).max())
