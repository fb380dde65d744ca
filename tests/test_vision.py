"""Images: the resize rule, preprocessing against Pillow, the tower, spans, and images in the model's calls."""

import contextlib
import copy
import io
import math
import zlib
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from PIL import Image, ImageOps

from dsv41_jax import Config
from dsv41_jax.engine import images
from dsv41_jax.nn import vision
from dsv41_jax.nn.linear import map_parameters
from dsv41_jax.numerics import numerics_by_name

FLASH, TINY = Config.flash(), Config.tiny()
GIVEN = dict(np.load(GOLDEN["tiny-full"] / "inputs.npz"))
RELEASED = dict(np.load(GOLDEN["tiny-full"] / "outputs_float32.npz"))
PUBLISHED = """1 1 184 546 546 13 13; 640 480 206 644 490 12 16; 100 100 184 546 546 13 13; 978 479 302 980 490 12 24;
1080 1920 986 966 1708 41 23; 4096 4096 994 1302 1302 31 31; 3024 4032 1010 1134 1512 36 27; 2 165 356 70 4942 118 2;
10000 158 962 10010 168 4 239; 1920 1080 968 1708 966 23 41"""


@pytest.mark.parametrize("case", PUBLISHED.split(";"))
def test_published_resize_cases(case):
    width, height, tokens, best_width, best_height, rows, columns = map(int, case.split())
    plan = images.resize_plan(width, height, FLASH)
    assert plan == images.Plan(best_width, best_height, rows, columns)
    assert plan.tokens == tokens


def rule(w, h, cfg):
    """(best_w, best_h, n_h, n_w) as the released preprocessing plans it, in float64 and in its order of operations."""
    patch, most = cfg.vision_patch_size, cfg.vision_max_image_tokens
    cell = patch * cfg.vision_downsample_ratio
    if 0 < w * h < cfg.vision_min_pixels:
        r = math.sqrt(cfg.vision_min_pixels / (w * h))
        w, h = int(w * r), int(h * r)
    best_w, best_h = math.ceil(w / patch) * patch, math.ceil(h / patch) * patch
    if math.ceil(best_h / cell) * (math.ceil(best_w / cell) + 1) + 2 > most:
        r = h / w
        mw = math.sqrt((most - 2) / r + 0.25) - 0.5
        mh = mw * r
        if mw < 1:
            best_h, best_w = (most - 2) // 2 * cell, cell
        elif mh < 1:
            best_h, best_w = cell, (most - 3) * cell
        else:
            b = min(math.floor(mw) * cell / w, math.floor(mh) * cell / h)
            best_w, best_h = math.floor(w * b / patch) * patch, math.floor(h * b / patch) * patch
    return best_w, best_h, math.ceil(best_h / cell), math.ceil(best_w / cell)


def exact_grid(w, h, cfg):
    """(n_h, n_w) in integers. With s = most - 2 = n_h (n_w + 1): floor(mw) is the largest m with m (m + 1) <= s w / h,
    floor(mh) the largest n with n (n w + h) <= s h, and the tighter of the two sides fills its windows."""
    cell, s = cfg.vision_patch_size * cfg.vision_downsample_ratio, cfg.vision_max_image_tokens - 2
    if w * h < cfg.vision_min_pixels:
        w, h = math.isqrt(cfg.vision_min_pixels * w // h), math.isqrt(cfg.vision_min_pixels * h // w)
    rows, columns = -(-h // cell), -(-w // cell)
    if rows * (columns + 1) <= s:
        return rows, columns
    m = max(i for i in range(s + 1) if i * (i + 1) * h <= s * w)
    n = max(i for i in range(s + 1) if i * (i * w + h) <= s * h)
    if m < 1:
        return s // 2, 1
    if n < 1:
        return 1, s - 1
    if m * h <= n * w:  # the columns bind
        return -(-(m * cell * h // w // cfg.vision_patch_size) // cfg.vision_downsample_ratio), m
    return n, -(-(n * cell * w // h // cfg.vision_patch_size) // cfg.vision_downsample_ratio)


def sizes():
    rng = np.random.default_rng(0)
    spread = [tuple(int(x) for x in np.exp(rng.uniform(0, math.log(9000), 2))) for _ in range(400)]
    ones = [(1, n) for n in (1, 2, 3, 7, 500, 9999, 60000, 295935, 295936, 400000)]
    smallest = [(544, 544), (543, 545), (2, 147968), (2, 147967), (592, 500), (591, 500), (1088, 272), (1087, 272)]
    largest = [(72 * 42 + i, 14 * 42 + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    thin = [(42, 511 * 42), (42, 511 * 42 + 1), (43, 511 * 42), (1021 * 42, 42), (1021 * 42 + 1, 42), (1021 * 42, 43)]
    return sorted({size for w, h in [*spread, *ones, *smallest, *largest, *thin] for size in ((w, h), (h, w))})


@pytest.mark.parametrize("cfg", [FLASH, TINY], ids=["flash", "tiny"])
def test_resize_follows_the_written_rule_for_any_size(cfg):
    cases = sizes()
    assert len(cases) > 800
    for w, h in cases:
        plan = images.resize_plan(w, h, cfg)
        assert (plan.width, plan.height, plan.rows, plan.columns) == rule(w, h, cfg), (w, h)
        assert (plan.rows, plan.columns) == exact_grid(w, h, cfg), (w, h)
        assert plan.tokens <= cfg.vision_max_image_tokens
        assert plan.width % cfg.vision_patch_size == plan.height % cfg.vision_patch_size == 0


def test_the_token_count_is_the_length_of_the_expansion():  # a count from a formula instead of the plan
    rng = np.random.default_rng(1)
    for w, h in rng.integers(8, 4000, (200, 2)).tolist():
        plan = images.resize_plan(w, h, FLASH)
        row = [1] * plan.columns + [2]
        assert plan.roles == [0, *row * plan.rows, 3]
        assert plan.tokens == len(plan.roles) == plan.rows * (plan.columns + 1) + 2


def test_a_span_depends_on_the_image_alone_and_has_no_alignment_pads():  # V4's vision pads to the ratio
    for offset in range(4):
        ids = images.expand_placeholders([9] * offset + [TINY.image_token_id, 9], [10], TINY)
        assert ids == [9] * offset + [TINY.image_token_id] * 10 + [9]
        assert images.span_starts(ids, [10], TINY) == [offset]


def bfloat16(x):
    """Round float32 to the nearest bfloat16, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def pipeline(rgb, cfg):
    """Patches of an array [H, W, 3], step by step as released."""
    best_w, best_h, _, _ = rule(rgb.shape[1], rgb.shape[0], cfg)
    canvas = ImageOps.pad(Image.fromarray(rgb), (best_w, best_h), Image.Resampling.BICUBIC, color=(127, 127, 127))
    x = bfloat16((np.asarray(canvas).astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5))
    p = cfg.vision_patch_size
    rows = [
        np.concatenate([x[top : top + p, left : left + p, channel].ravel() for channel in range(3)])
        for top in range(0, best_h, p)
        for left in range(0, best_w, p)
    ]
    return np.stack(rows)


def values(source, cfg=TINY):
    return images.preprocess(source, cfg).values.astype(np.float32)


def encoded(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@pytest.mark.parametrize("k", range(3))
def test_golden_patches_are_bit_equal(k):
    patches = images.preprocess(GIVEN[f"d_img{k}_rgb"], TINY)
    np.testing.assert_array_equal(patches.values.astype(np.float32), GIVEN[f"d_img{k}_patches"].reshape(-1, 48))
    p = patches.plan
    assert [p.height // 4, p.width // 4, p.rows, p.columns] == GIVEN[f"d_img{k}_grid"].tolist()


RNG = np.random.default_rng(2)
RGB = RNG.integers(0, 256, (31, 23, 3), np.uint8)
RGBA, CMYK = (RNG.integers(0, 256, (31, 23, 4), np.uint8) for _ in range(2))


def modes():
    """{name: (what is given, the RGB array that it stands for)}."""
    palette = Image.fromarray(RGB).quantize(7)
    colours = np.array(palette.getpalette(), np.uint8).reshape(-1, 3)
    ink = CMYK.astype(int)
    light = 255 - ink[..., 3:]
    product = ink[..., :3] * light + 128
    cmyk = np.clip(light - ((product >> 8) + product >> 8), 0, 255).astype(np.uint8)  # K - C K / 255, rounded
    turned = Image.Exif()
    turned[0x0112] = 6  # rotated by 90 degrees
    bits = RGB[..., 0] > 127
    grey = np.repeat(RGB[..., :1], 3, axis=-1)
    return {
        "rgb image": (Image.fromarray(RGB), RGB),
        "png bytes": (encoded(Image.fromarray(RGB), "PNG"), RGB),
        "grey": (Image.fromarray(RGB[..., 0]), grey),
        "grey array": (RGB[..., 0], grey),
        "black and white": (Image.fromarray(bits), np.repeat(bits[..., None], 3, axis=-1).astype(np.uint8) * 255),
        "alpha is dropped": (encoded(Image.fromarray(RGBA), "PNG"), RGBA[..., :3].copy()),
        "clear pixels keep their colour": (np.dstack([RGB, np.zeros((31, 23), np.uint8)]), RGB),
        "palette": (encoded(palette, "PNG"), colours[np.asarray(palette)]),
        "cmyk": (Image.fromarray(CMYK, "CMYK"), cmyk),
        "orientation is not applied": (encoded(Image.fromarray(RGB), "PNG", exif=turned), RGB),
        "one pixel": (RGB[:1, :1].copy(), RGB[:1, :1]),
        "tall": (np.repeat(RGB[:, :1], 20, axis=0), np.repeat(RGB[:, :1], 20, axis=0)),
        "wide": (np.tile(RGB[:3], (1, 30, 1)), np.tile(RGB[:3], (1, 30, 1))),
        "large": (np.kron(RGB, np.ones((9, 7, 1), np.uint8)), np.kron(RGB, np.ones((9, 7, 1), np.uint8))),
    }


@pytest.mark.parametrize("mode", modes())
def test_every_kind_of_image_equals_the_written_pipeline(mode, tmp_path):
    source, rgb = modes()[mode]
    np.testing.assert_array_equal(values(source), pipeline(np.ascontiguousarray(rgb), TINY))
    if isinstance(source, bytes):
        (tmp_path / "image").write_bytes(source)
        for path in (tmp_path / "image", str(tmp_path / "image")):
            np.testing.assert_array_equal(values(path), values(source))


def gradient(width, height):
    y, x = np.mgrid[:height, :width]
    waves = 127.5 + 127.5 * np.sin(0.11 * x + 0.07 * y)
    return (
        np.stack([255 * x / max(width - 1, 1), 255 * y / max(height - 1, 1), waves], axis=-1).round().astype(np.uint8)
    )


def bicubic(x, size):
    """Catmull-Rom of a = -1/2 along axis 0, widened by the factor when shrinking; rounded to whole levels."""
    scale = len(x) / size
    wide = max(scale, 1.0)
    centre = (np.arange(size)[:, None] + 0.5) * scale
    t = np.abs((np.arange(len(x)) + 0.5 - centre) / wide)
    weight = np.where(t < 1, (1.5 * t - 2.5) * t * t + 1, np.where(t < 2, ((-0.5 * t + 2.5) * t - 4) * t + 2, 0))
    weight /= weight.sum(axis=1, keepdims=True)
    return np.clip(np.tensordot(weight, x, 1), 0, 255).round()


@pytest.mark.parametrize(("width", "height"), [(640, 480), (47, 999), (113, 251)])
def test_gradients_are_resized_by_pillows_bicubic_kernel(width, height):  # tensor libraries' bicubic differs
    rgb = gradient(width, height)
    np.testing.assert_array_equal(values(rgb, FLASH), pipeline(rgb, FLASH))
    best_w, best_h, _, _ = rule(width, height, FLASH)
    scale = min(best_w / width, best_h / height)
    inner_w, inner_h = min(best_w, round(width * scale)), min(best_h, round(height * scale))
    across = bicubic(rgb.astype(float).swapaxes(0, 1), inner_w).swapaxes(0, 1)
    canvas = np.full((best_h, best_w, 3), 127.0)
    top, left = round((best_h - inner_h) / 2), round((best_w - inner_w) / 2)
    canvas[top : top + inner_h, left : left + inner_w] = bicubic(across, inner_h)
    patches = values(rgb, FLASH).reshape(best_h // 14, best_w // 14, 3, 14, 14)
    levels = (patches.transpose(0, 3, 1, 4, 2).reshape(best_h, best_w, 3) + 1) * 127.5
    assert np.abs(levels - canvas).max() <= 1.5  # one level, and half of one for bfloat16


def bomb():
    """A PNG that claims 40000 x 40000 pixels."""
    small = bytearray(encoded(Image.new("RGB", (1, 1)), "PNG"))
    small[16:24] = (40000).to_bytes(4, "big") * 2
    small[29:33] = zlib.crc32(bytes(small[12:29])).to_bytes(4, "big")
    return bytes(small)


PNG = encoded(Image.fromarray(RGB), "PNG")
BAD = {
    "empty": b"",
    "text": b"this is not an image\nat all",
    "truncated": PNG[: len(PNG) // 2],
    "damaged": PNG[:60] + bytes(40) + PNG[100:],
    "bomb": bomb(),
    "missing": "/no/such/file.png",
    "a directory": "/",
    "no pixels": np.zeros((0, 4, 3), np.uint8),
    "five channels": np.zeros((4, 4, 5), np.uint8),
    "complex": np.zeros((4, 4, 3), np.complex64),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_image_raises_one_line(name):
    with pytest.raises(images.ImageError, match=r"^[^\n]+$"):
        images.preprocess(BAD[name], TINY)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_damage_anywhere_raises_nothing_but_an_image_error(form):
    whole, rng = encoded(Image.fromarray(RGB), form), np.random.default_rng(3)
    for trial in range(150):
        data = bytearray(whole[: int(rng.integers(4, len(whole)))] if trial % 3 == 0 else whole)
        for place in rng.integers(0, min(len(data), 300), 4):
            data[place] = rng.integers(0, 256)
        with contextlib.suppress(images.ImageError):
            images.open_image(bytes(data))


def test_windows_of_a_4_by_5_grid_are_channel_major_with_zeros_past_the_edge(tiny):
    plan, grid = images.Plan(20, 16, 2, 2), 100 * np.arange(4)[:, None] + np.arange(5)
    padded = np.pad(grid + 50.0, ((0, 2), (0, 1)))
    expected = np.stack([padded[r : r + 3, c : c + 3].ravel() for r in (0, 3) for c in (0, 3)])
    assert (expected[0] - 50).tolist() == [0, 1, 2, 100, 101, 102, 200, 201, 202]
    aligner = copy.deepcopy(tiny.params.aligner)
    width = TINY.hidden_size
    aligner.w1.bias[...] = aligner.w2.bias[...] = jnp.zeros(width, jnp.bfloat16)
    aligner.w2.weight[...] = jnp.eye(width, dtype=jnp.bfloat16)
    aligner.w1.weight[...] = jnp.zeros((width, 576), jnp.bfloat16).at[:18].set(jnp.eye(18, 576, 27, jnp.bfloat16))
    x = np.zeros((20, 64), np.float32)  # w1 passes on channels 3 and 4; gelu leaves 50 and more as it is
    x[:, 3], x[:, 4] = grid.ravel() + 50, grid.ravel() + 1050
    got = aligner(jnp.asarray(x), jnp.asarray(images.window_patches(plan, 4, 3)), numerics_by_name("float32"))
    np.testing.assert_allclose(got[:, :9], expected, atol=1e-3)
    np.testing.assert_allclose(got[:, 9:18], np.where(expected > 0, expected + 1000, 0), atol=1e-3)


def test_rotary_pairs_channel_j_with_j_plus_half_over_rows_then_columns():  # the text's rotary pairs neighbours
    rng, width = np.random.default_rng(4), 16
    places, x = rng.integers(0, 60, (9, 2)).astype(np.int32), rng.standard_normal((9, 2, width)).astype(np.float32)
    f = 10000.0 ** (-2 * np.arange(width // 4) / (width // 2))
    turn = np.exp(1j * np.concatenate([places[:, :1] * f, places[:, 1:] * f], axis=1))[:, None]
    pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
    got = vision.rotate_2d(jnp.asarray(x), jnp.asarray(places), 10000.0)
    np.testing.assert_allclose(got, np.concatenate([pairs.real, pairs.imag], axis=-1), atol=2e-5)
    unit = jnp.zeros((1, 2, width), jnp.float32).at[0, 0, 0].set(1).at[0, 1, width // 4].set(1)
    row, column = np.asarray(vision.rotate_2d(unit, jnp.array([[3, 5]], jnp.int32), 10000.0))[0]
    np.testing.assert_allclose([row[0], row[8], column[4], column[12]], [np.cos(3), np.sin(3), np.cos(5), np.sin(5)])


@pytest.fixture(scope="module")
def pictures():
    return [images.preprocess(GIVEN[f"d_img{k}_rgb"], TINY) for k in range(3)]


@pytest.mark.parametrize("k", range(3))
def test_golden_tower_and_aligner(tiny, pictures, k):
    features, aligned = tiny.engine.image_features(pictures[k])
    np.testing.assert_allclose(features, RELEASED[f"d/vit{k}"], atol=1e-4)
    np.testing.assert_allclose(aligned, RELEASED[f"d/aligned{k}"], atol=1e-4)


@pytest.mark.parametrize("filler", [0.0, 3e4, np.nan], ids=["zeros", "large", "nan"])
@pytest.mark.parametrize("bucket", [64, 128])
def test_padded_patches_are_seen_by_nobody(tiny, pictures, bucket, filler):
    image, live = pictures[1], 30
    values = np.full((bucket, 48), filler, image.values.dtype)
    places, windows = np.full((bucket, 2), 7, np.int32), np.full((bucket, 9), -1, np.int32)
    values[:live], places[:live] = image.values, images.patch_places(image.plan, 4)
    windows[:4] = images.window_patches(image.plan, 4, 3)
    features, aligned = tiny.engine.programs.image(values, places, windows, np.int32(live))
    np.testing.assert_allclose(features[:live], RELEASED["d/vit1"], atol=1e-4)
    np.testing.assert_allclose(aligned[:4], RELEASED["d/aligned1"], atol=1e-4)


D, LENGTH = GIVEN["d_ids"], int(GIVEN["d_prefill_len"])


def steps(model, ids, image, cuts):
    """Logits of calls that end at `cuts`, and the cache."""
    cache, pieces = model.init_cache(2, 128), []
    for first, end in zip([0, *cuts], cuts, strict=False):
        logits, cache, _ = model.step(ids[:, first:end], cache, image=image.part(first, end))
        pieces.append(np.asarray(logits))
    return np.concatenate(pieces, axis=1), cache


@pytest.fixture(scope="module")
def prefilled(tiny, pictures):
    image = tiny.embed_images(D[:, :LENGTH], [pictures[:1], pictures[1:]])
    return image, *steps(tiny, D[:, :LENGTH], image, [LENGTH])


def test_golden_logits_of_prompts_with_images(tiny, prefilled):
    image, logits, cache = prefilled
    np.testing.assert_array_equal(image.mask, GIVEN["d_token_types"][:, :LENGTH] >= 0)
    np.testing.assert_allclose(logits, RELEASED["d/prefill_logits"], atol=1e-4)
    cache = cache.copy()
    for at in range(LENGTH, D.shape[1]):
        logits, cache, _ = tiny.step(D[:, at : at + 1], cache)
        np.testing.assert_allclose(logits[:, 0], RELEASED["d/decode_logits"][:, at - LENGTH], atol=1e-4)


@pytest.mark.parametrize("cuts", [(8, 17, 26, 39), (6, 7, 15, 20, 30, 39), (5, 14, 27, 39)])
def test_a_boundary_inside_an_image_changes_nothing(tiny, prefilled, cuts):
    image, logits, cache = prefilled
    chunked, after = steps(tiny, D[:, :LENGTH], image, cuts)
    np.testing.assert_allclose(chunked, logits, atol=1e-5)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


@pytest.mark.parametrize("offset", range(1, 5))
def test_images_at_even_and_odd_offsets_may_be_cut(tiny, pictures, offset):
    one = [40 + i for i in range(offset)] + [4] * 8 + [50 + i for i in range(8 - offset)]
    ids = np.array([one, [*one[1:], 60]])
    image = tiny.embed_images(ids, [pictures[1:2]] * 2)
    whole, _ = steps(tiny, ids, image, [16])
    for cut in (offset + 2, offset + 5):
        np.testing.assert_allclose(steps(tiny, ids, image, [cut, 16])[0], whole, atol=1e-5)


def test_features_on_a_second_call_equal_pixels(tiny, pictures, prefilled):  # features kept from an earlier call lost
    pixels = [GIVEN[f"d_img{k}_rgb"] for k in range(3)]
    for given in ([pixels[:1], pixels[1:]], [pictures[:1], pictures[1:]]):
        np.testing.assert_array_equal(tiny(D[:, :LENGTH], images=given).logits, prefilled[1])
    np.testing.assert_array_equal(steps(tiny, D[:, :LENGTH], prefilled[0], [LENGTH])[0], prefilled[1])


def test_each_placeholder_is_expanded_once(tiny, pictures):  # expanded again in every later turn
    ids = [0, 4, 9, 9, 4, 7]
    once = tiny.expand_images(ids, pictures[:2])
    assert once == [0, *[4] * 22, 9, 9, *[4] * 8, 7]
    assert tiny.expand_images(once, pictures[:2]) == once
    longer = [*once, 4, 8]  # a later turn with one more image
    assert tiny.expand_images(longer, pictures) == [*once, *[4] * 7, 8]
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=r"^images: [^\n]+$"):
            tiny.expand_images(ids, [pictures[0]] * count)
    for wrong in (once, once[:5] + once[6:], [4, *once]):
        images = [pictures[:2][::-1]] if wrong is once else [pictures[:2]]
        with pytest.raises(ValueError, match=r"^images: [^\n]+$"):
            tiny.embed_images([wrong], images)


@contextmanager
def changed(model, *parts):
    """Other values, while the body runs, in every parameter of the backbone whose name holds one of `parts`."""
    before, rng = model.params, np.random.default_rng(6)

    def value(path, leaf):
        name = f".{'.'.join(map(str, path))}."
        if path[0] != "layers" or not any(part in name for part in parts):
            return leaf[...]
        return jnp.asarray(rng.permutation(np.asarray(leaf[...]).ravel()).reshape(leaf.shape))

    model.params = map_parameters(value, before)
    try:
        yield model
    finally:
        model.params = before


def test_the_visual_bias_acts_on_spans_alone(tiny, prefilled):
    image, logits, _ = prefilled
    with changed(tiny, ".bias_vl.") as other:
        moved, _ = steps(other, D[:, :LENGTH], image, [LENGTH])
    for row, first in ((0, 5), (1, 3)):
        np.testing.assert_array_equal(moved[row, :first], logits[row, :first])
        assert np.abs(moved[row, first:] - logits[row, first:]).max(axis=-1).min() > 1e-4


def test_engram_and_the_text_bias_do_not_act_on_spans(tiny, pictures):
    ids, text = np.full((2, 16), 4), np.arange(32).reshape(2, 16) + 40
    spans = tiny.embed_images(ids, [pictures[1:2] * 2] * 2)
    none = vision.ImageInput(jnp.zeros_like(spans.mask), spans.embeddings)
    plain = [steps(tiny, *given, [16])[0] for given in ((ids, spans), (text, none))]
    for part in (".engram.", ".gate.bias."):
        with changed(tiny, part) as other:
            on_spans, on_text = (steps(other, *given, [16])[0] for given in ((ids, spans), (text, none)))
        np.testing.assert_array_equal(on_spans, plain[0])
        assert np.abs(on_text - plain[1]).max() > 1e-2
