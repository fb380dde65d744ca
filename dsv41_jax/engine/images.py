"""From an image file to patches and to its span of token ids (paper 2.1.1; config keys `vision_config.*`).

    plan      grow to min_pixels, round up to whole patches, shrink until the span fits max_image_tokens
    patches   contained on grey 127, (x / 255 - 0.5) / 0.5, patch by patch, each [3, p, p] flattened
    span      start, then for each row of windows its tokens and a newline, then end: n_h (n_w + 1) + 2 positions

Orientation tags of a file are not applied and an alpha channel is dropped, as released.
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int32

from dsv41_jax.config import Config
from dsv41_jax.untrusted import cut, regular_size

START, TOKEN, NEWLINE, END = range(4)  # roles of a span's positions


@runtime_checkable
class PillowImage(Protocol):
    """What is used of a `PIL.Image.Image`, so that this file needs Pillow only once there is an image to open."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""

    def convert(self, mode: str) -> "PillowImage":
        """The image in another mode."""

    def save(self, fp: BinaryIO, format: str) -> None:
        """Encode it."""


ImageSource = PillowImage | np.ndarray | bytes | bytearray | memoryview | str | Path


class ImageError(ValueError):
    """An image cannot be used; one line that says which and why."""


@dataclass(frozen=True)
class Plan:
    """Size in pixels after the resize, and the span's windows: `rows` x `columns`."""

    width: int
    height: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.columns + 1) + 2

    @property
    def roles(self) -> list[int]:
        """START, (TOKEN * columns, NEWLINE) * rows, END."""
        return [START, *([TOKEN] * self.columns + [NEWLINE]) * self.rows, END]


def resize_plan(width: int, height: int, cfg: Config) -> Plan:
    """The size that an image of width x height pixels is shown at, and its span (vision_config)."""
    if width < 1 or height < 1:
        raise ImageError(f"image: {width} x {height} pixels, at least 1 x 1 is needed")
    patch, window, limit = cfg.vision_patch_size, cfg.vision_downsample_ratio, cfg.vision_max_image_tokens
    if width * height < cfg.vision_min_pixels:
        grow = math.sqrt(cfg.vision_min_pixels / (width * height))
        width, height = int(width * grow), int(height * grow)

    def plan(best_width: int, best_height: int) -> Plan:
        windows = (-(-(size // patch) // window) for size in (best_height, best_width))
        return Plan(best_width, best_height, *windows)

    whole = plan(-(-width // patch) * patch, -(-height // patch) * patch)
    if whole.tokens <= limit:
        return whole
    cell = patch * window
    slope = height / width
    columns = math.sqrt((limit - 2) / slope + 0.25) - 0.5
    rows = columns * slope
    if columns < 1:
        return plan(cell, (limit - 2) // 2 * cell)
    if rows < 1:
        return plan((limit - 3) * cell, cell)
    shrink = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    sizes = (max(math.floor(size * shrink / patch), 1) * patch for size in (width, height))  # windows of 1 may vanish
    return plan(*sizes)


@dataclass(frozen=True)
class Patches:
    """A preprocessed image: patch rows [P, 3 p p] in bfloat16, row-major over the grid, and its plan."""

    values: np.ndarray
    plan: Plan


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow has 40 more decoders, one of which starts Ghostscript


def open_image(source: ImageSource) -> PillowImage:
    """An RGB image from a Pillow image, a uint8 array [H, W], [H, W, 3] or [H, W, 4], or the bytes or the file of a
    PNG, JPEG, WebP, GIF or BMP. Raises ImageError."""
    from PIL import Image

    name = cut(" ".join(str(source).split()), 200) if isinstance(source, str | Path) else "image"
    try:
        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
                raise TypeError(f"array of {source.dtype} {source.shape}, not uint8 [H, W], [H, W, 3] or [H, W, 4]")
            return Image.fromarray(source).convert("RGB")
        if isinstance(source, PillowImage):
            return source.convert("RGB")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow thinks of a palette
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(_encoded(source), formats=FORMATS).convert("RGB")  # type: ignore[arg-type]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{name}: is too large ({error})") from None
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        said = getattr(error, "strerror", None) or cut(" ".join(str(error).split()))
        raise ImageError(f"{name}: is not an image that can be read ({said})") from None


def _encoded(source: object) -> io.IOBase | str | Path:
    """What Pillow reads an image of the named formats from."""
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source)
    if isinstance(source, str | Path):
        regular_size(Path(source))
        return source
    if isinstance(source, io.IOBase):
        return source
    raise TypeError(f"a {type(source).__name__}, not a Pillow image, a uint8 array, bytes or a path")


def preprocess(source: ImageSource, cfg: Config) -> Patches:
    """Resize, pad, normalize and cut into patches."""
    from PIL import Image, ImageOps

    image = open_image(source)
    plan = resize_plan(*image.size, cfg)
    fitted = ImageOps.pad(
        image,  # type: ignore[arg-type]
        (plan.width, plan.height),
        Image.Resampling.BICUBIC,
        color=(127, 127, 127),
    )
    pixels = (np.asarray(fitted, np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    p = cfg.vision_patch_size
    patches = rearrange(pixels, "(rows y) (columns x) colour -> (rows columns) (colour y x)", y=p, x=p)
    return Patches(patches.astype(ml_dtypes.bfloat16), plan)


def patch_places(plan: Plan, patch: int) -> Int32[np.ndarray, "P 2"]:
    """(row, column) of each patch."""
    rows, columns = plan.height // patch, plan.width // patch
    return np.stack(np.divmod(np.arange(rows * columns, dtype=np.int32), columns), axis=-1).astype(np.int32)


def window_patches(plan: Plan, patch: int, window: int) -> Int32[np.ndarray, "cells square"]:
    """Patch numbers of each aligner window in reading order, -1 past the edge."""
    rows, columns = plan.height // patch, plan.width // patch
    row = np.arange(plan.rows)[:, None, None, None] * window + np.arange(window)[None, None, :, None]
    column = np.arange(plan.columns)[None, :, None, None] * window + np.arange(window)[None, None, None, :]
    number = np.where((row < rows) & (column < columns), row * columns + column, -1)
    return rearrange(number, "rows columns y x -> (rows columns) (y x)").astype(np.int32)


def span_embeddings(
    roles: Sequence[int],
    aligned: Float[Array, "cells D"],
    start: Float[Array, " D"],
    newline: Float[Array, " D"],
    end: Float[Array, " D"],
) -> Float[Array, "span D"]:
    """The embeddings of a span: aligner rows in reading order between the learned delimiters."""
    table = jnp.concatenate([jnp.stack([start, newline, end]).astype(aligned.dtype), aligned])
    kinds = np.array(roles)
    at = np.where(kinds == TOKEN, 2 + np.cumsum(kinds == TOKEN), np.array([0, 0, 1, 2])[kinds])
    return table[at]


def span_starts(ids: Sequence[int], lengths: Sequence[int], cfg: Config) -> list[int]:
    """Where the spans of these lengths stand in `ids`, in order; every placeholder must belong to one."""
    starts, at = [], 0
    for number, length in enumerate(lengths):
        while at < len(ids) and ids[at] != cfg.image_token_id:
            at += 1
        run = list(ids[at : at + length])
        if len(run) < length or any(i != cfg.image_token_id for i in run):
            held = run.count(cfg.image_token_id)
            raise ValueError(f"images: number {number} takes {length} placeholders, the ids have {held} there")
        starts.append(at)
        at += length
    left = list(ids[at:]).count(cfg.image_token_id)
    if left:
        raise ValueError(f"images: {left} placeholders are left over after {len(lengths)} images")
    return starts


def expand_placeholders(ids: Sequence[int], lengths: Sequence[int], cfg: Config) -> list[int]:
    """`ids` with each image's placeholder repeated to its span's length; a span that has it already is kept."""
    out: list[int] = []
    at = number = 0
    while at < len(ids):
        if ids[at] != cfg.image_token_id:
            out.append(ids[at])
            at += 1
            continue
        if number == len(lengths):
            raise ValueError(f"images: more placeholders than the {len(lengths)} images given")
        length = lengths[number]
        whole = all(i == cfg.image_token_id for i in ids[at : at + length]) and at + length <= len(ids)
        out += [cfg.image_token_id] * length
        at += length if whole else 1
        number += 1
    if number < len(lengths):
        raise ValueError(f"images: {len(lengths)} given, the ids have {number} placeholders")
    return out
