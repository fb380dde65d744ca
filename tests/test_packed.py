"""Packed caches: bytes and values against an oracle of fractions, the bytes a token adds, and `fast` = `reference`."""

from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_model, small_config

from dsv41_jax import Config, Model, numerics
from dsv41_jax.nn import attention
from dsv41_jax.nn.attention import Shared
from dsv41_jax.nn.cache import Span, init_cache, nbytes_per_token

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3 = [Fraction(m, 512) if e == 0 else Fraction(8 + m) * Fraction(2) ** (e - 10) for e in range(16) for m in range(8)]
E4M3 = E4M3[:0x7F]  # the last code is NaN
FORMATS = {"fp8": (numerics.FP8, numerics.round_fp8), "nvfp4": (numerics.NVFP4, numerics.round_nvfp4)}
FORMATS |= {"mxfp4": (numerics.MXFP4, numerics.round_mxfp4)}
GROUP = {"fp8": 32, "nvfp4": 16, "mxfp4": 32}
FLOOR = {"fp8": np.float32(1e-4), "nvfp4": np.float32(6 * 2.0**-9), "mxfp4": np.float32(6 * 2.0**-126)}
TOP = {"fp8": 448, "nvfp4": 6, "mxfp4": 6}
NAMES = pytest.mark.parametrize("name", FORMATS)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LEAST = 2.0**-126  # below it a backend may flush to zero
FAST = pytest.mark.parametrize(
    ("name", "entry", "key"), [("fast", 288, 68), ("fast-fp8", 528, 132), ("fast-bf16", 1024, 256)]
)


def nearest(size, table):
    """The code of the nearest value, ties to the even code, saturating."""
    above = bisect_left(table, size)
    if above == len(table) or above == 0 or table[above] == size:
        return min(above, len(table) - 1)
    gap = 2 * size - table[above - 1] - table[above]
    return above if gap > 0 or (gap == 0 and above % 2 == 0) else above - 1


def packed_group(name, group):
    """(element codes, scale byte) of one group of float32, in exact arithmetic but for the one float32 product."""
    amax = max(np.abs(group).max(), FLOOR[name])
    if name == "nvfp4":
        byte = nearest(Fraction(float(amax)) / 6, E4M3)
        scale = E4M3[byte]
    else:
        ratio = Fraction(float(amax * np.float32(1 / TOP[name])))  # rounded once, to float32
        power = next(p for p in range(-127, 128) if Fraction(2) ** p >= ratio)
        byte, scale = power + 127, Fraction(2) ** power
    table, sign = (E4M3, 0x80) if name == "fp8" else (E2M1, 8)
    return [nearest(abs(Fraction(float(x))) / scale, table) | (sign if np.signbit(x) else 0) for x in group], byte


def midpoints(table):
    return [float(a + b) / 2 for a, b in pairwise(table)]


def around(x):
    """Values, and the float32 on either side of them."""
    x = np.asarray(x, np.float32)
    return np.stack([np.nextafter(x, np.float32(-np.inf)), x, np.nextafter(x, np.float32(np.inf))]).ravel()


def bf16_bits(x):
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@cache
def samples(dtype):
    """Float32 rows of 512 channels: random ones, zeros, every kind of tie, both ends of the range."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    spread = normal(64, 32) * 10.0 ** rng.uniform(-6, 4, (64, 2)).repeat(16, axis=1)
    spread[rng.random((64, 2)).repeat(16, axis=1) < 0.3] *= 0  # zero groups of either sign beside live ones

    def filled(tops, size):
        return np.concatenate([tops[:, None], tops[:, None] * rng.uniform(-1, 1, (len(tops), size - 1))], 1)

    powers = 2.0 ** np.arange(-12, 10)
    steps = [
        np.resize([448 * p, *m], 32) for p in (2.0**-8, 1, 8) for m in np.multiply(midpoints(E4M3), p).reshape(6, 21)
    ]
    steps += [
        np.resize([-6 * s, *around(np.multiply(m, s))], 32)
        for s in map(float, E4M3[1::4])
        for m in (midpoints(E2M1), np.negative(midpoints(E2M1)))
    ]
    ends = [464, 450, 2688, 2700, 1e6, 3e38, 0.005, 1e-4, 9e-5, 6 * 2.0**-9, 1e-9, 1e-30]
    parts = [
        normal(11, 512) * np.logspace(-6, 4, 11)[:, None],
        np.copysign(np.zeros(512), normal(512)),
        spread,
        filled(around(np.multiply(midpoints(E4M3), 6)), 16),  # ties of main KV's scale
        filled(around(np.outer([3, 6, 224, 232, 448], powers)), 32),  # edges of power-of-two scales
        np.stack(steps),  # ties of the elements
        np.linspace(np.negative(ends), ends, 32, axis=1),
        filled(2.0**-9 * np.linspace(5.5, 16, 43), 16),  # the smallest scales of main KV
    ]
    flat = np.concatenate([np.asarray(p, np.float32).ravel() for p in parts])
    rows = np.pad(flat, (0, -len(flat) % 512)).reshape(-1, 512)
    return (bf16_bits(rows).astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else rows


def inputs(dtype):
    return jnp.asarray(samples(dtype)).astype(dtype)


@cache
def expected_bytes(name, dtype):
    rows = []
    for row in samples(dtype):
        groups = [packed_group(name, group) for group in row.reshape(-1, GROUP[name])]
        codes = np.array([code for group, _ in groups for code in group], np.uint8)
        codes = codes if name == "fp8" else codes[0::2] | codes[1::2] << 4
        rows.append(np.append(codes, np.array([byte for _, byte in groups], np.uint8)))
    return np.stack(rows)


@cache
def packed(name, dtype):
    return jax.jit(FORMATS[name][0].pack)(inputs(dtype))


def bits(x):
    """float32 bit patterns: -0 and +0 differ."""
    return np.asarray(x).astype(np.float32).view(np.uint32)


def assert_same(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    wrong = np.argwhere(got != expected)
    assert not wrong.size, f"{len(wrong)} differ, first at {wrong[0]}: {got[tuple(wrong[0])]}"


def assert_same_values(got, expected):
    """NaN at the same places, every other value bit for bit; subnormals may be zeros of their sign."""
    got, expected = np.asarray(got).astype(np.float32), np.asarray(expected).astype(np.float32)
    flushed = (np.abs(expected) < LEAST) & (got == 0)
    expected = np.where(flushed, np.copysign(np.float32(0), expected), expected)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert_same(
        bits(np.nan_to_num(got, posinf=np.inf, neginf=-np.inf)),
        bits(np.nan_to_num(expected, posinf=np.inf, neginf=-np.inf)),
    )


@DTYPES
@NAMES
def test_packed_bytes_equal_the_oracle_eager_and_under_jit(name, dtype):  # midpoints, zero groups, FP8's overflow
    for got in (packed(name, dtype), FORMATS[name][0].pack(inputs(dtype))):
        assert got.dtype == np.uint8
        assert_same(got, expected_bytes(name, dtype))


@DTYPES
def test_bf16_rows_are_the_nearest_bfloat16_low_byte_first(dtype):
    expected = bf16_bits(samples(dtype)).astype("<u2").view(np.uint8)
    for pack in (numerics.pack_bf16, jax.jit(numerics.pack_bf16)):
        assert_same(pack(inputs(dtype)), expected)


def arbitrary(name):
    """(rows of every code with every scale, their values in float64)."""
    scales = np.arange(0x7F) if name == "nvfp4" else np.arange(1, 255)
    blocks = np.arange(256, dtype=np.uint8).reshape(-1, 32 if name == "fp8" else GROUP[name] // 2)
    groups = 8 if name == "fp8" else len(blocks)
    shown = scales[(np.arange(len(scales))[:, None] + np.arange(groups)) % len(scales)]
    rows = np.concatenate([np.tile(blocks.ravel(), (len(scales), 1)), shown.astype(np.uint8)], axis=1)
    positive = [float(v) for v in (E4M3 if name == "fp8" else E2M1)] + [np.nan] * (name == "fp8")
    table = np.array([*positive, *np.negative(positive)])
    codes = blocks.ravel() if name == "fp8" else np.stack([blocks.ravel() & 15, blocks.ravel() >> 4], 1).ravel()
    factor = np.array([float(v) for v in E4M3])[shown] if name == "nvfp4" else np.ldexp(1.0, shown - 127)
    return rows, table[codes] * factor.repeat(GROUP[name], axis=1)


@DTYPES
@NAMES
def test_every_code_with_every_scale_unpacks_to_its_exact_value(name, dtype):  # low nibble first; E8M0 byte 0
    rows, values = arbitrary(name)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)  # exact, also in bfloat16, or beyond the range
    got = jax.jit(FORMATS[name][0].unpack, static_argnums=1)(jnp.asarray(rows), dtype)
    assert got.dtype == dtype
    assert_same_values(got, expected)


@DTYPES
def test_every_bf16_pattern_unpacks_to_itself_and_packs_back(dtype):
    codes = np.arange(1 << 16, dtype="<u2").reshape(128, 512)
    rows = jnp.asarray(codes.view(np.uint8))
    got = numerics.unpack_bf16(rows, dtype)
    assert_same_values(got, (codes.astype(np.uint32) << 16).view(np.float32))
    normal = (codes & 0x7F80 != 0) & (codes & 0x7FFF <= 0x7F80) | (codes & 0x7FFF == 0)
    again = np.asarray(numerics.pack_bf16(got)).view("<u2")
    assert np.array_equal(again[normal], codes[normal])


@pytest.mark.parametrize("wrap", [lambda f, **_: f, jax.jit], ids=["eager", "jit"])
@DTYPES
@NAMES
def test_unpacking_what_was_packed_equals_the_fake_quantizer_bit_for_bit(name, dtype, wrap):
    storage, fake = FORMATS[name]
    x = inputs(dtype)
    rounded = wrap(fake)(x)
    assert rounded.dtype == dtype
    for got in (wrap(storage.unpack, static_argnums=1)(packed(name, dtype), dtype), wrap(storage)(x)):
        assert got.dtype == dtype
        assert np.array_equal(bits(got), bits(rounded))


@DTYPES
@NAMES
def test_packing_what_was_unpacked_keeps_the_values_and_where_no_smaller_scale_fits_the_bytes(name, dtype):
    # A group whose largest code is 224 (FP8) or 3 (MXFP4) fits half the scale: other bytes, the same values. Main KV:
    # scale 2 * 2**-9 with largest code 4 repacks at scale round(8 / 6) * 2**-9 and saturates; all else keeps its bytes.
    storage, rows = FORMATS[name][0], packed(name, dtype)
    rows = rows[np.isfinite(storage.unpack(rows, jnp.float32)).all(axis=1)]
    again = storage.pack(storage.unpack(rows, jnp.float32))
    values, settled = (bits(storage.unpack(r, jnp.float32)).reshape(len(rows), -1, GROUP[name]) for r in (rows, again))
    scales, rescaled = (np.asarray(r)[:, -values.shape[1] :].astype(int) for r in (rows, again))
    movable = scales == 2 if name == "nvfp4" else np.full(scales.shape, True)
    assert set((scales - rescaled)[movable].tolist()) == {0, 1}
    assert np.array_equal(rescaled[~movable], scales[~movable])
    assert np.array_equal(
        settled[~movable] if name == "nvfp4" else settled, values[~movable] if name == "nvfp4" else values
    )
    whole = (rescaled == scales).all(axis=1)
    assert whole.any()
    assert np.array_equal(again[whole], rows[whole])


@pytest.mark.parametrize(
    ("storage", "wide", "narrow"),
    [(numerics.FP8, 528, 132), (numerics.NVFP4, 288, 72), (numerics.MXFP4, 272, 68), (numerics.BF16, 1024, 256)],
)
def test_rows_are_as_long_as_the_layout_says(storage, wide, narrow):
    for channels, length in ((512, wide), (128, narrow)):
        assert storage.row(channels, jnp.bfloat16) == (length, jnp.uint8)
        row = jax.eval_shape(storage.pack, jax.ShapeDtypeStruct((2, 3, channels), jnp.bfloat16))
        assert (row.shape, row.dtype) == ((2, 3, length), jnp.uint8)
        back = jax.eval_shape(lambda r: storage.unpack(r, jnp.float32), row)
        assert (back.shape, back.dtype) == ((2, 3, channels), jnp.float32)


@pytest.mark.parametrize("width", [1, 8, 40, 520])
@NAMES
def test_packing_a_width_of_broken_groups_raises_one_clear_line(name, width):
    with pytest.raises(ValueError, match=f"^last axis: {width} is not a multiple of .* {GROUP[name]}$") as error:
        FORMATS[name][0].pack(jnp.zeros((2, width)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("storage", "width"),
    [
        (numerics.FP8, 2),
        (numerics.FP8, 512),
        (numerics.NVFP4, 2),
        (numerics.NVFP4, 256),
        (numerics.MXFP4, 64),
        (numerics.BF16, 33),
    ],
)
def test_unpacking_a_row_of_a_wrong_width_raises(storage, width):
    with pytest.raises((TypeError, ValueError)):
        storage.unpack(jnp.zeros((2, width), jnp.uint8), jnp.float32)


def bytes_by_hand(cfg, entry):
    return sum(entry / cfg.compress_ratios[layer] for layer in cfg.kv_source_layer_ids)


def buffer_bytes(cfg, batch, capacity, num):
    leaves = jax.eval_shape(lambda: jax.tree.leaves(init_cache(cfg, batch, capacity, num)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@FAST
def test_released_config_adds_as_many_bytes_a_token_as_the_report_says(name, entry, key):
    cfg, num = Config.flash(), numerics.numerics_by_name(name)
    assert nbytes_per_token(cfg, num) == bytes_by_hand(cfg, entry + key) == {288: 890, 528: 1650, 1024: 3200}[entry]
    grown = buffer_bytes(cfg, 3, 6144, num) - buffer_bytes(cfg, 3, 4096, num)
    assert grown == 3 * 2048 * nbytes_per_token(cfg, num)


@FAST
@pytest.mark.parametrize("make", [Config.tiny, small_config])
def test_real_buffers_grow_by_the_bytes_a_token(make, name, entry, key):
    cfg, num = make(), numerics.numerics_by_name(name)
    token = bytes_by_hand(cfg, entry * cfg.head_dim // 512 + key * cfg.index_head_dim // 128)
    assert nbytes_per_token(cfg, num) == token
    few, many = (sum(leaf.nbytes for leaf in jax.tree.leaves(init_cache(cfg, 2, n, num))) for n in (32, 96))
    assert many - few == 2 * 64 * token


def test_every_cache_format_selects_and_attends_to_as_many_keys(monkeypatch):  # a format that turns selection off
    cfg, attend, shapes = small_config(), attention.sparse_attention, []

    def recorded(q, window, window_ids, main, main_ids, *rest, **options):
        shapes.append((q.shape, window_ids.shape, main_ids.shape))
        return attend(q, window, window_ids, main, main_ids, *rest, **options)

    monkeypatch.setattr(attention, "sparse_attention", recorded)
    layer = random_model(cfg).params.layers[1].attn
    how = {"plan": cfg.layers[1], "cfg": cfg}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 14, 32)), jnp.bfloat16)
    span = Span.after(jnp.zeros(1, jnp.int32), jnp.full(1, 14, jnp.int32), 14)
    nums = [numerics.numerics_by_name(name) for name in ("reference", "fast", "fast-fp8", "fast-bf16")]

    def select(x, num):
        return layer(x, Shared(), init_cache(cfg, 1, 16, num).layers[1], span, **how, numerics=num).shared.selected

    selected = jax.jit(lambda x: [select(x, num) for num in nums])(x)
    assert shapes == [shapes[0]] * 4
    for ids in selected:
        assert np.sum(ids >= 0, axis=-1).tolist() == [[min(cfg.index_topk, (t + 1) // 2) for t in range(14)]]
    assert_same(selected[1], selected[0])


TAPS = [f"layers.{layer}.index_topk" for layer in (1, 3, 4, 6)] + ["layers.4.candidate_blocks"]
TOKENS = np.random.default_rng(1).integers(6, 288, (2, 46)).astype(np.int32)
WINDOW = 16


class Recorded(Model):
    """A model that steps in the two shapes that every test here uses, so that they compile once."""

    def run(self, lengths):
        """([logits and taps of each call], cache) of TOKENS in chunks of 16, `lengths` of each row live."""
        calls, cache = [], self.init_cache(2, 128)
        for first in range(0, max(lengths), 16):
            part = TOKENS[:, first : min(first + 16, max(lengths))]
            logits, cache, taps = self.step(part, cache, np.clip(np.subtract(lengths, first), 0, part.shape[1]), TAPS)
            calls.append({"logits": logits} | taps)
        return calls, cache

    def decode(self, cache, first, steps):
        calls = []
        for t in range(first, first + steps):
            logits, cache, taps = self.step(TOKENS[:, t : t + 1], cache, taps=TAPS)
            calls.append({"logits": logits} | taps)
        return calls, cache


@pytest.fixture(scope="module")
def models():
    return [Recorded.from_pretrained("tiny", numerics=name) for name in ("reference", "fast")]


def assert_equal_calls(calls, others):
    for number, (call, other) in enumerate(zip(calls, others, strict=True)):
        for name, value in call.items():
            assert np.isfinite(value).all()
            assert np.array_equal(value, other[name]), f"call {number}: {name}"


def live_slots(length, reach, rows):
    return [p % rows for p in range(max(0, length - reach), length)]


def test_fast_equals_reference_bit_for_bit_in_prefill_decode_and_every_live_cache_row(models):
    runs = []
    for model in models:
        prefill, state = model.run((40, 40))
        steps, state = model.decode(state, 40, 6)
        runs.append((prefill + steps, state))
    (calls, plain), (others, rows) = runs
    assert sum(call["logits"].shape[1] for call in calls) == 46
    assert_equal_calls(calls, others)
    for name in ("length", "history"):
        assert np.array_equal(getattr(plain, name), getattr(rows, name))

    def check(values, stored, storage, slots):
        assert stored.dtype == jnp.uint8
        got = np.asarray(storage.unpack(stored, jnp.bfloat16))[:, slots]
        assert np.array_equal(bits(got), bits(np.asarray(values)[:, slots]))
        assert got.any(axis=-1).all()

    ring = live_slots(46, 21, 21)  # 16 and 5 spare rows
    for stage in range(2):
        check(plain.drafts[stage], rows.drafts[stage], numerics.FP8, ring)
    for plan, layer, other in zip(models[0].config.layers, plain.layers, rows.layers, strict=True):
        check(layer.window, other.window, numerics.FP8, ring)
        if plan.owns_kv:
            check(layer.main, other.main, numerics.NVFP4, slice(46 // plan.ratio))
            check(layer.index_keys, other.index_keys, numerics.MXFP4, slice(46 // plan.ratio))
            assert np.array_equal(layer.open_kv, other.open_kv)
            assert np.array_equal(layer.open_gate, other.open_gate)


@pytest.mark.slow
def test_fast_generates_the_tokens_of_reference_with_and_without_drafts(models):
    prompts = [TOKENS[0, :16].tolist(), TOKENS[1, :9].tolist()]
    for draft in (False, True):
        expected, got = (model.generate(prompts, 20, draft=draft) for model in models)
        assert min(map(len, expected)) > 5
        assert got == expected


@pytest.mark.parametrize("fill", [0xFF, 0x7F, 0x88])
@pytest.mark.parametrize("lengths", [(13, 6), (37, 22)])
def test_dead_packed_rows_of_any_byte_reach_no_logit(models, lengths, fill):  # bytes of no row may decode to NaN
    model = models[1]
    _, clean = model.run(lengths)

    def poisoned(store, live):
        rows = np.array(store)
        assert rows.dtype == np.uint8
        for row, slots in enumerate(live):
            rows[row, ~np.isin(np.arange(rows.shape[1]), slots)] = fill
        assert (rows != np.asarray(store)).any()
        return jnp.asarray(rows)

    ring = [live_slots(n, WINDOW - 1, 21) for n in lengths]
    layers, copy = [], clean.copy()
    for plan, layer in zip(model.config.layers, copy.layers, strict=True):
        layer = replace(layer, window=poisoned(layer.window, ring))
        if plan.owns_kv:
            live = [range(n // plan.ratio) for n in lengths]
            layer = replace(layer, main=poisoned(layer.main, live), index_keys=poisoned(layer.index_keys, live))
        layers.append(layer)
    drafts = tuple(poisoned(ring, [live_slots(n, WINDOW, 21) for n in lengths]) for ring in clean.drafts)
    poison = replace(copy, layers=tuple(layers), drafts=drafts)
    token = TOKENS[:, 40]
    guesses, others = (vars(model.draft(token, state)) for state in (clean, poison))
    assert_equal_calls([guesses], [others])
    assert_equal_calls(model.decode(clean, 40, 3)[0], model.decode(poison, 40, 3)[0])
