"""Rotations against the released tables, a numpy float32 replica of the recipe, and the geometry of a rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax.config import Config
from dsv41_jax.nn import attention as attention_module
from dsv41_jax.nn.attention import Attention, Shared
from dsv41_jax.nn.cache import Span, init_cache
from dsv41_jax.nn.rope import frequencies, layer_frequencies, rotate, yarn_frequencies
from dsv41_jax.numerics import numerics_by_name
from pallas_kernels.sparse_attention import sparse_attention

ULP = 2.0**-24  # half a step of float32 below 1: the error of one rounded operation, relative


def recipe(dim: int, theta: float, original: float = 0, factor: float = 1, fast: float = 32, slow: float = 1):
    """The released `precompute_freqs_cis` in numpy, float32 step by step; original 0: no YaRN.

    The power is rounded correctly: numpy's float32 one misses six of the 32 released frequencies by a step.
    """
    f32 = np.float32
    exponent = np.arange(0, dim, 2, dtype=f32) / f32(dim)
    freqs = f32(1) / np.array([theta ** float(e) for e in exponent], f32)
    if not original:
        return freqs
    low, high = (dim * math.log(original / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    smooth = f32(1) - np.clip((np.arange(dim // 2, dtype=f32) - f32(low)) / f32(max(high - low, 1e-3)), 0, 1)
    return freqs / f32(factor) * (f32(1) - smooth) + freqs * smooth


def table(freqs: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) [T, pairs] as `rotate` applies them: it turns (1, 0) to (cos, sin)."""
    x = np.tile(np.array([1, 0], np.float32), (1, len(positions), len(freqs)))
    turned = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions[None], jnp.int32), freqs))[0]
    return turned[:, 0::2], turned[:, 1::2]


def window_of_one(monkeypatch):
    """Layer 1 of the small model with a window of itself only, and head 3's output in place of the projected one."""
    cfg = small_config(sliding_window=1)
    layer = random_model(cfg).params.layers[1].attn
    layer.attn_sink[...] = jnp.full(cfg.num_attention_heads, -1e30)
    monkeypatch.setattr(Attention, "project_out", lambda self, o, **how: o[:, :, 3])
    return cfg, layer


@pytest.mark.parametrize("name", ["plain", "yarn_tiny", "yarn_release"])
def test_tables_equal_the_released_program(units, name):
    dim, length, original, theta, factor, fast, slow = units[f"rope/{name}_args"].tolist()
    dim = int(dim)
    freqs = frequencies(dim, theta)
    if original:
        scaling = {"factor": factor, "beta_fast": fast, "beta_slow": slow, "original": int(original)}
        freqs = yarn_frequencies(dim, theta, **scaling)
    positions = np.arange(int(length))
    for ours, released in zip(table(freqs, positions), ("cos", "sin"), strict=True):
        assert np.abs(ours - units[f"rope/{name}_{released}"]).max() <= 4 * ULP  # frequencies equal to the bit


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_and_inverse_equal_the_released_program(units, inverse):  # half-split pairs instead of adjacent ones
    x, positions = units["rope/x"], jnp.tile(jnp.arange(10, dtype=jnp.int32), (2, 1))
    freqs = yarn_frequencies(16, 160000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0, original=32)
    ours = rotate(jnp.asarray(x), positions, freqs, inverse=inverse)
    released = units[f"rope/x_{'inverse' if inverse else 'rotated'}_yarn_tiny_pos0_9"]
    bound = 2 * np.abs(x).max() * 6 * ULP  # two products, each with cos or sin off by 4 and two roundings
    assert np.abs(ours - released).max() <= bound


def test_released_config_keeps_fast_pairs_divides_slow_ones_by_16_and_blends_between():  # one table for all layers
    cfg = Config.flash()
    plain = recipe(64, 160000.0)
    assert [round(64 * math.log(65536 / (2 * math.pi * r)) / (2 * math.log(160000)), 2) for r in (32, 1)] == [
        15.45,
        24.71,
    ]
    for ratio in (1, 2):
        freqs = layer_frequencies(cfg, ratio)
        assert np.array_equal(freqs[:16], plain[:16])
        assert np.array_equal(freqs[25:], plain[25:] / 16)
        ramp = (np.arange(16, 25) - 15) / 10
        blend = plain[16:25].astype(np.float64) * (1 - ramp + ramp / 16)
        np.testing.assert_allclose(freqs[16:25], blend, rtol=8 * ULP)


def test_window_layers_turn_at_theta_10000_without_yarn():  # YaRN on window layers shows only at long range
    freqs = layer_frequencies(Config.flash(), 0)
    assert np.array_equal(freqs, recipe(64, 10000.0))
    np.testing.assert_allclose(freqs, 10000.0 ** (-np.arange(32) / 32), rtol=4 * ULP)


@pytest.mark.parametrize("ratio", [0, 1])
def test_angles_are_float32_products_up_to_a_million_positions(ratio):  # float64 angles are another model far out
    positions = np.array([0, 127, 65535, 65536, 1048575])
    expected = recipe(64, 160000.0, 65536, 16) if ratio else recipe(64, 10000.0)
    angles = (positions.astype(np.float32)[:, None] * expected).astype(np.float64)
    cos, sin = table(layer_frequencies(Config.flash(), ratio), positions)
    # The angles are equal to the bit, so only the error of cos and sin is left: XLA states 2 steps of float32.
    assert np.abs(cos - np.cos(angles)).max() <= 4 * ULP
    assert np.abs(sin - np.sin(angles)).max() <= 4 * ULP


def test_positions_are_not_rounded_to_the_activation_dtype():  # in bf16 position 65537 becomes 65536
    x = jnp.tile(jnp.array([1, 0], jnp.bfloat16), (1, 1, 1))
    turned = rotate(x, jnp.array([[65537]], jnp.int32), frequencies(2, 10000.0))
    expected = np.array([math.cos(65537), math.sin(65537)])
    assert turned.dtype == jnp.bfloat16
    assert np.abs(np.asarray(turned, np.float64)[0, 0] - expected).max() <= 2.0**-9 + 4 * ULP


@pytest.mark.parametrize("start", [0, 5])
def test_group_j_is_rotated_at_its_first_token_also_in_later_chunks(start):  # rotation by the entry's index instead
    cfg = small_config()
    layer, num = random_model(cfg).params.layers[1].attn, numerics_by_name("float32")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 32)), jnp.float32)
    span = Span.after(jnp.full(1, start, jnp.int32), jnp.full(1, 8, jnp.int32), 8)
    how = {"plan": cfg.layers[1], "cfg": cfg, "numerics": num}
    _, taps = jax.jit(lambda x, cache: layer.compress(x, cache, span, **how))(x, init_cache(cfg, 1, 16, num).layers[1])
    latent, entries = (np.asarray(taps[name], np.float64)[0] for name in ("latent", "main_kv"))
    freqs = recipe(8, cfg.compress_rope_theta, cfg.yarn_original_length, cfg.yarn_factor)
    position = 2 * (start // 2 + np.arange(len(latent)))
    assert 6 in position
    turn = np.exp(1j * (position.astype(np.float32)[:, None] * freqs).astype(np.float64))
    turned = (latent[:, 24::2] + 1j * latent[:, 25::2]) * turn
    assert np.array_equal(entries[:, :24], latent[:, :24])
    bound = 16 * ULP * np.abs(latent).max()
    np.testing.assert_allclose(entries[:, 24::2], turned.real, atol=bound)
    np.testing.assert_allclose(entries[:, 25::2], turned.imag, atol=bound)


def test_a_query_that_sees_only_itself_returns_its_unrotated_value(monkeypatch):  # values carry the key's rotation
    cfg, layer = window_of_one(monkeypatch)
    monkeypatch.setattr(
        attention_module, "sparse_attention", lambda *a, **k: sparse_attention(*a[:3], *none, a[5], **k)
    )
    none = jnp.zeros((1, 0, 32)), jnp.zeros((1, 40, 0), jnp.int32)  # and no compressed entries
    x = np.random.default_rng(1).standard_normal((1, 40, 32)).astype(np.float32)
    num, span = numerics_by_name("float32"), Span.after(jnp.full(1, 7, jnp.int32), jnp.full(1, 40, jnp.int32), 40)
    how = {"plan": cfg.layers[1], "cfg": cfg, "numerics": num}
    run = jax.jit(lambda x, cache: layer(x, Shared(), cache, span, **how).y)
    o = np.asarray(run(jnp.asarray(x), init_cache(cfg, 1, 64, num).layers[1]))[0]
    weight = np.asarray(layer.wkv.weight[...]).astype(np.float64)
    weight *= 2.0 ** (np.asarray(layer.wkv.scale[...]).view(np.uint8).astype(float) - 127)
    value = x[0].astype(np.float64) @ weight.T
    value *= np.asarray(layer.kv_norm.weight[...]).astype(np.float64) / np.sqrt((value**2).mean(-1, keepdims=True))
    # 32 products of the projection, and two rotations; both relative to the row's largest value.
    bound = 64 * ULP * np.abs(value).max()
    np.testing.assert_allclose(o, value, atol=bound)


def test_rotated_attention_depends_on_relative_positions_only():  # an output that is not turned back
    rng = np.random.default_rng(2)
    q, rows = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 6, 2, 32), (1, 6, 32)))
    ids = np.where(np.tri(6, dtype=bool), np.arange(6), -1)[None]
    ids, none = jnp.asarray(ids, jnp.int32), (rows[:, :0], jnp.zeros((1, 6, 0), jnp.int32))
    freqs = frequencies(8, 10000.0)

    @jax.jit
    def attend(start: jax.Array) -> jax.Array:
        p = start + jnp.arange(6, dtype=jnp.int32)[None]
        out, _ = sparse_attention(rotate(q, p, freqs), rotate(rows, p, freqs), ids, *none, jnp.zeros(2), scale=0.2)
        return rotate(out, p, freqs, inverse=True)

    near, far = (np.asarray(attend(jnp.int32(start))) for start in (0, 1000))
    assert np.abs(near - far).max() <= 1e-3 * np.abs(near).max()  # angles near 1000 carry 3e-5


def test_pairs_are_adjacent_and_only_the_last_channels_turn():  # half-split pairs read sin at R/2 instead
    freqs = np.array([1.0, 0.25], np.float32)
    x = np.eye(8, dtype=np.float32)[None]
    turned = np.asarray(rotate(jnp.asarray(x), jnp.full((1, 8), 3, jnp.int32), freqs))[0]
    c, s, d, e = math.cos(3), math.sin(3), math.cos(0.75), math.sin(0.75)
    expected = np.eye(8)
    expected[4:, 4:] = [[c, s, 0, 0], [-s, c, 0, 0], [0, 0, d, e], [0, 0, -e, d]]
    np.testing.assert_allclose(turned, expected, atol=4 * ULP)


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 5, 3, 16)])
def test_inverse_undoes_the_rotation_of_every_head(shape):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    p = jnp.asarray(np.random.default_rng(4).integers(0, 100000, shape[:2]), jnp.int32)
    freqs = frequencies(8, 10000.0)
    back = rotate(rotate(jnp.asarray(x), p, freqs), p, freqs, inverse=True)
    np.testing.assert_allclose(back, x, atol=16 * ULP * np.abs(x).max())
