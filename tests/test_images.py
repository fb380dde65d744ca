"""What is taken for an image, and what is refused in one line before a decoder sees it."""

import io
import os

import numpy as np
import pytest
from PIL import Image
from test_vision import PNG, RGB, encoded

from dsv41_jax import Config
from dsv41_jax.engine import images


def untyped(source: object):
    """What a caller without type checks gives."""
    return getattr(images.open_image, "__wrapped__", images.open_image)(source)


@pytest.mark.parametrize("form", ["EPS", "TIFF", "PPM", "PDF", "ICNS", "TGA"])
def test_only_five_formats_are_decoded(form, tmp_path):  # EPS starts Ghostscript
    data = io.BytesIO()
    Image.fromarray(np.resize(RGB, (64, 64, 3))).save(data, form)
    (tmp_path / "image.png").write_bytes(data.getvalue())
    for source in (data.getvalue(), tmp_path / "image.png"):
        with pytest.raises(images.ImageError, match=r"^[^\n]*: is not an image that can be read \(cannot identify"):
            images.open_image(source)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
def test_the_five_formats_are_decoded_from_a_path_and_any_kind_of_bytes(form, tmp_path):
    data = encoded(Image.fromarray(RGB), form)
    (tmp_path / "image").write_bytes(data)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    for source in (
        data,
        bytearray(data),
        memoryview(data),
        io.BytesIO(data),
        tmp_path / "image",
        str(tmp_path / "image"),
    ):
        np.testing.assert_array_equal(np.asarray(untyped(source)), wanted)


@pytest.mark.parametrize(
    "source", [None, [[0, 1]], {"image": 3}, 5, 2.5, True, object(), (PNG,)], ids=lambda source: type(source).__name__
)
def test_what_is_no_image_is_one_line_that_names_its_type(source):
    with pytest.raises(images.ImageError, match=rf"a {type(source).__name__}, not a Pillow image[^\n]*$"):
        untyped(source)


def test_files_that_never_end_and_names_that_are_no_files_are_refused_in_a_short_line(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for source in (tmp_path / "fifo", "/dev/zero", "data:image/png;base64," + "A" * 100_000, "a\0b", "a\nb"):
        with pytest.raises(images.ImageError) as caught:
            images.open_image(source)
        assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_what_pillow_warns_of_is_not_the_callers():  # a palette with transparency in bytes
    image = Image.new("P", (4, 4))
    image.putpalette([1, 2, 3] * 256)
    data = io.BytesIO()
    image.save(data, "PNG", transparency=bytes(range(256)))
    assert images.open_image(data.getvalue()).size == (4, 4)


def test_windows_of_one_patch_leave_at_least_one_each_way():  # 84 x 42882 had width 0
    cfg = Config.flash(vision_downsample_ratio=1)
    for width, height in ((84, 42882), (42882, 84), (7, 83), (1, 5000), (60, 30_000), (31, 15_900)):
        plan = images.resize_plan(width, height, cfg)
        assert min(plan.width, plan.height, plan.rows, plan.columns) >= 1, (width, height)
        assert plan.tokens <= cfg.vision_max_image_tokens
