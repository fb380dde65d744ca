"""Images: the resize plan, the vision transformer and the aligner (paper 2.1.1).

    plan      grow to min_pixels, round up to whole patches, shrink until the span fits max_image_tokens
    patches   contained on grey 127, (x / 255 - 0.5) / 0.5, patch by patch, each [3, p, p] flattened
    tower     x += attn(norm1 x); x += mlp(norm2 x); all patches of one image see each other; rotary over rows (first
              half of the pairs) and columns (second half), channel j paired with j + width / 2
    aligner   windows of r x r patches, channel-major, zeros past the edge; w2 gelu(w1 x + b1) + b2, the exact gelu
    span      start, then for each row of windows its tokens and a newline, then end: n_h (n_w + 1) + 2 positions

Every norm here has eps 1e-6. Orientation tags of a file are not applied and an alpha channel is dropped, as released.
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32
from PIL import Image, ImageOps

from dsv41_jax.config import Config
from dsv41_jax.linear import Linear, parameter
from dsv41_jax.norm import RMSNorm
from dsv41_jax.quant import Numerics
from dsv41_jax.rope import frequencies
from pallas_kernels.formats import cast

EPS = 1e-6
START, TOKEN, NEWLINE, END = range(4)  # roles of a span's positions
ImageSource = Image.Image | np.ndarray | bytes | str | Path


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
    patch, window, most = cfg.vision_patch_size, cfg.vision_downsample_ratio, cfg.vision_max_image_tokens
    if width * height < cfg.vision_min_pixels:
        grow = math.sqrt(cfg.vision_min_pixels / (width * height))
        width, height = int(width * grow), int(height * grow)

    def plan(best_width: int, best_height: int) -> Plan:
        windows = (-(-(size // patch) // window) for size in (best_height, best_width))
        return Plan(best_width, best_height, *windows)

    whole = plan(-(-width // patch) * patch, -(-height // patch) * patch)
    if whole.tokens <= most:
        return whole
    cell = patch * window
    slope = height / width
    columns = math.sqrt((most - 2) / slope + 0.25) - 0.5
    rows = columns * slope
    if columns < 1:
        return plan(cell, (most - 2) // 2 * cell)
    if rows < 1:
        return plan((most - 3) * cell, cell)
    shrink = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return plan(math.floor(width * shrink / patch) * patch, math.floor(height * shrink / patch) * patch)


@dataclass(frozen=True)
class Patches:
    """A preprocessed image: patch rows [P, 3 p p] in bfloat16, row-major over the grid, and its plan."""

    values: np.ndarray
    plan: Plan


def open_image(source: ImageSource) -> Image.Image:
    """An RGB image from a Pillow image, a uint8 array [H, W], [H, W, 3] or [H, W, 4], encoded bytes or a file."""
    name = str(source) if isinstance(source, str | Path) else "image"
    try:
        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
                raise TypeError(f"array of {source.dtype} {source.shape}, not uint8 [H, W], [H, W, 3] or [H, W, 4]")
            source = Image.fromarray(source)
        elif not isinstance(source, Image.Image):
            with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
                source = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        return source.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{name}: is too large ({error})") from None
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        raise ImageError(f"{name}: is not an image that can be read ({error})") from None


def preprocess(source: ImageSource, cfg: Config) -> Patches:
    """Resize, pad, normalize and cut into patches."""
    image = open_image(source)
    plan = resize_plan(*image.size, cfg)
    fitted = ImageOps.pad(image, (plan.width, plan.height), Image.Resampling.BICUBIC, color=(127, 127, 127))
    pixels = (np.asarray(fitted, np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    p = cfg.vision_patch_size
    grid = pixels.reshape(plan.height // p, p, plan.width // p, p, 3).transpose(0, 2, 4, 1, 3)
    return Patches(grid.reshape(-1, 3 * p * p).astype(ml_dtypes.bfloat16), plan)


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
    return number.reshape(plan.rows * plan.columns, window * window).astype(np.int32)


def rotate_2d(x: Float[Array, "P N H"], places: Int32[Array, "P 2"], theta: float) -> Float[Array, "P N H"]:
    """Rotary over rows and columns, half-split pairing."""
    half = x.shape[-1] // 2
    angles = places.astype(jnp.float32)[..., None] * frequencies(half, theta)
    angles = angles.reshape(places.shape[0], 1, half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return cast(turned, x.dtype)


def _add(x: Float[Array, "P X"], y: Float[Array, "P X"]) -> Float[Array, "P X"]:
    return cast(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


class VisionAttention(nnx.Module):
    def __init__(self, cfg: Config):
        width = cfg.vision_hidden_size
        self.heads, self.theta = cfg.vision_num_attention_heads, cfg.vision_rope_theta
        self.wqkv = Linear(3 * width, width, ("heads", "width"), bias=True)
        self.wo = Linear(width, width, ("width", "heads"), bias=True)

    def __call__(
        self, x: Float[Array, "P X"], places: Int32[Array, "P 2"], live: Bool[Array, " P"], num: Numerics
    ) -> Float[Array, "P X"]:
        qkv = self.wqkv(x, num).reshape(x.shape[0], 3, self.heads, -1)
        q, k = (rotate_2d(qkv[:, part], places, self.theta) for part in (0, 1))
        scores = jnp.einsum("qnh,knh->nqk", q, k, precision="highest", preferred_element_type=jnp.float32)
        p = jax.nn.softmax(jnp.where(live, scores * q.shape[-1] ** -0.5, -jnp.inf), axis=-1)
        values = jnp.where(live[:, None, None], qkv[:, 2].astype(jnp.float32), 0.0)  # 0 * NaN is NaN
        o = jnp.einsum("nqk,knh->qnh", p, values, precision="highest")
        return self.wo(cast(o, num.dtype).reshape(x.shape), num)


class VisionMLP(nnx.Module):
    """`w1` holds the gate's rows, then the up projection's."""

    def __init__(self, width: int, hidden: int):
        self.w1 = Linear(2 * hidden, width, ("hidden", "width"))
        self.w2 = Linear(width, hidden, ("width", "hidden"))

    def __call__(self, x: Float[Array, "P X"], num: Numerics) -> Float[Array, "P X"]:
        gate, up = jnp.split(self.w1(x, num).astype(jnp.float32), 2, axis=-1)
        gate = cast(jax.nn.silu(gate), num.dtype).astype(jnp.float32)
        return self.w2(cast(gate * up, num.dtype), num)


class VisionBlock(nnx.Module):
    def __init__(self, cfg: Config):
        self.norm1 = RMSNorm(cfg.vision_hidden_size, EPS)
        self.attn = VisionAttention(cfg)
        self.norm2 = RMSNorm(cfg.vision_hidden_size, EPS)
        self.mlp = VisionMLP(cfg.vision_hidden_size, cfg.vision_intermediate_size)

    def __call__(
        self, x: Float[Array, "P X"], places: Int32[Array, "P 2"], live: Bool[Array, " P"], num: Numerics
    ) -> Float[Array, "P X"]:
        x = _add(x, self.attn(self.norm1(x, num), places, live, num))
        return _add(x, self.mlp(self.norm2(x, num), num))


class PatchEmbed(nnx.Module):
    def __init__(self, cfg: Config):
        self.proj = Linear(cfg.vision_hidden_size, 3 * cfg.vision_patch_size**2, ("width", "patch"), bias=True)


class Vision(nnx.Module):
    """The tower: patches of one image to one vector each. Padding (not `live`) is seen by nobody."""

    def __init__(self, cfg: Config):
        self.patch_embed = PatchEmbed(cfg)
        self.blocks = nnx.List([VisionBlock(cfg) for _ in range(cfg.vision_num_hidden_layers)])
        self.norm = RMSNorm(cfg.vision_hidden_size, EPS)

    def __call__(
        self, patches: Float[Array, "P K"], places: Int32[Array, "P 2"], live: Bool[Array, " P"], num: Numerics
    ) -> Float[Array, "P X"]:
        x = self.patch_embed.proj(cast(patches, num.dtype), num)
        for block in self.blocks:
            x = block(x, places, live, num)
        return self.norm(x, num)


class Aligner(nnx.Module):
    """Square windows of `downsample_ratio` patches a side become one vector of width D."""

    def __init__(self, cfg: Config):
        window = cfg.vision_hidden_size * cfg.vision_downsample_ratio**2
        self.w1 = Linear(cfg.hidden_size, window, ("width", "patch"), bias=True)
        self.w2 = Linear(cfg.hidden_size, cfg.hidden_size, ("width", "width"), bias=True)

    def __call__(
        self, x: Float[Array, "P X"], windows: Int32[Array, "cells square"], num: Numerics
    ) -> Float[Array, "cells D"]:
        taken = jnp.where((windows >= 0)[..., None], x[jnp.maximum(windows, 0)], jnp.zeros((), x.dtype))
        unfolded = taken.swapaxes(1, 2).reshape(windows.shape[0], -1)
        hidden = jax.nn.gelu(self.w1(unfolded, num).astype(jnp.float32), approximate=False)
        return self.w2(cast(hidden, num.dtype), num)


def delimiter(cfg: Config) -> nnx.Param:
    """One learned vector of the span: `image_start`, `image_newline` or `image_end`."""
    return parameter((cfg.hidden_size,), jnp.bfloat16, ("width",))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ImageInput:
    """Image spans of a call: `mask` marks their positions, `rows` holds their embeddings there."""

    mask: Bool[Array, "B T"]
    rows: Float[Array, "B T D"]

    def part(self, first: int, last: int) -> "ImageInput":
        """Positions first .. last - 1, for a call with a part of the tokens; no image past the end."""
        short = ((0, 0), (0, max(0, last - self.mask.shape[1])))
        mask, rows = self.mask[:, first:last], self.rows[:, first:last]
        return ImageInput(jnp.pad(mask, short), jnp.pad(rows, (*short, (0, 0))))

    def take(self, place: Int32[Array, "B K"] | np.ndarray) -> "ImageInput":
        """The positions `place` of each row."""
        rows = jnp.take_along_axis(self.rows, jnp.asarray(place)[..., None], axis=1)
        return ImageInput(jnp.take_along_axis(self.mask, jnp.asarray(place), axis=1), rows)


def encode(
    vision: Vision,
    aligner: Aligner,
    patches: Float[Array, "P K"],
    places: Int32[Array, "P 2"],
    windows: Int32[Array, "cells square"],
    count: Int32[Array, ""],
    *,
    num: Numerics,
) -> tuple[Float[Array, "P X"], Float[Array, "cells D"]]:
    """(tower output, aligner output) of one image whose first `count` patches are live."""
    features = vision(patches, places, jnp.arange(patches.shape[0]) < count, num)
    return features, aligner(features, windows, num)


def span_rows(
    roles: Sequence[int],
    aligned: Float[Array, "cells D"],
    start: Float[Array, " D"],
    newline: Float[Array, " D"],
    end: Float[Array, " D"],
) -> Float[Array, "span D"]:
    """The embeddings of a span: aligner rows in reading order between the learned delimiters."""
    table = jnp.concatenate([jnp.stack([start, newline, end]).astype(aligned.dtype), aligned])
    kinds = np.array(roles)
    row = np.where(kinds == TOKEN, 2 + np.cumsum(kinds == TOKEN), np.array([0, 0, 1, 2])[kinds])
    return table[row]


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
