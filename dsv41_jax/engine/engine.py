"""A model as runs over a cache: what is asked is checked, cut into chunks, run and cut back.

1  check     tokens, lengths and room, before anything runs: a call that raises has changed nothing
2  chunk     pad to a bucket, look Engram rows up, one chunk ahead of the device
3  run       one program over one chunk; the host counts the lengths and reads nothing back
4  ask       a call, a step, a prefill, a restored prefix, drafts and their verification: runs, one after the other
5  images    pictures to embeddings, laid over their placeholders
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from dsv41_jax.config import Config
from dsv41_jax.engine.chunks import (
    Chunk,
    Tokens,
    ahead,
    bucket,
    check_room,
    checked_lengths,
    checked_tokens,
    cuts,
    padded,
)
from dsv41_jax.engine.images import (
    ImageSource,
    Patches,
    expand_placeholders,
    patch_places,
    preprocess,
    span_embeddings,
    span_starts,
    window_patches,
)
from dsv41_jax.engine.programs import Options, Programs, Verified
from dsv41_jax.engine.sampling import Draws, Sampling
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.engine.tables import EngramLookup
from dsv41_jax.nn.cache import Cache, init_cache
from dsv41_jax.nn.dspark import Drafts
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.replay import cut, init_tail
from dsv41_jax.nn.transformer import Call, Output, Transformer
from dsv41_jax.nn.vision import ImageInput
from dsv41_jax.numerics import Numerics

# Taps whose axis 1 counts the compressed entries that a call finishes; that of all others counts tokens.
ENTRY_TAPS = ("latent", "main_kv", "index_keys")
Images = Sequence[Sequence[ImageSource | Patches]]
SMALLEST_CAPACITY, SMALLEST_IMAGE = 128, 64  # tokens, patches: smaller ones share a compilation


class ImageFeatures(NamedTuple):
    """What the tower gives for each patch, and the aligner for each window."""

    tower: Float[Array, "P X"]
    aligned: Float[Array, "cells D"]


class Engine:
    """Parameters and the programs over them. Edits of `params` are seen by the next call, in place or not; parameters
    that are not those of the config are refused then."""

    def __init__(
        self,
        config: Config,
        params: Transformer,
        numerics: Numerics,
        *,
        engram: EngramLookup | None = None,
        compiler_options: Options | None = None,
    ):
        held = () if engram is None else engram.layers
        if tuple(config.engram_layer_ids) != held:
            raise ValueError(f"engram: tables of layers {list(held)}, layers {list(config.engram_layer_ids)} read some")
        self.config, self.params, self.numerics, self.engram = config, params, numerics, engram
        self._programs = Programs(config, params, numerics, compiler_options=compiler_options)

    @property
    def programs(self) -> Programs:
        """The compiled programs, over the parameters as they are now."""
        self._programs.bind(self.params)
        return self._programs

    # 1 check

    def checked(self, tokens: Tokens) -> Int32[np.ndarray, "B T"]:
        """Token ids of this vocabulary as an array, or ValueError."""
        return checked_tokens(tokens, self.config.vocab_size)

    def check_prefill(self, mode: str) -> None:
        """Raise ValueError for a mode of prefill that is unknown, or that this config has not."""
        if mode not in ("full", "replay"):
            raise ValueError(f"prefill: {mode!r} is not one of 'full', 'replay'")
        if mode == "replay":
            cut(self.config)

    def capacity(self, tokens: int) -> int:
        """The power of two that holds so many tokens, so that few capacities compile. Raises ValueError past
        max_position_embeddings."""
        limit = self.config.max_position_embeddings
        if tokens > limit:
            raise ValueError(f"tokens: {tokens} positions exceed max_position_embeddings {limit}")
        return min(limit, max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length()))

    def check_cache(self, cache: Cache, count: Int32[np.ndarray, " B"]) -> None:
        """Raise ValueError unless `count` more tokens of each row fit in a cache of this model."""
        check_room(cache, count)
        window = cache.layers[0].window
        if (window.shape[-1], window.dtype) != self.numerics.window.row(self.config.head_dim, self.numerics.dtype):
            raise ValueError(
                f"cache: rows of {window.shape[-1]} {window.dtype} are not those of {self.numerics.name!r}"
            )

    # 2 chunk

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` sequences of at most `capacity` tokens."""
        return init_cache(self.config, batch, capacity, self.numerics)

    def chunk(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: Int32[np.ndarray, " B"],
        start: Int32[np.ndarray, " B"],
        history: Int32[np.ndarray, "B ring"],
        image: ImageInput | None = None,
        *,
        width: int | None = None,
    ) -> Chunk:
        """One run of tokens behind `start` earlier ones, padded to their bucket (or to `width`), with its Engram rows.
        `image` covers the padded width."""
        live, pad = tokens.shape[1], self.config.pad_token_id
        padding = (bucket(live) if width is None else width) - live
        tokens = np.pad(tokens, ((0, 0), (0, padding)), constant_values=pad)
        engram: tuple[EngramRows, ...] = ()
        if self.engram is not None:
            mask = None if image is None else np.asarray(image.mask)
            engram, history = self.engram.read(tokens, count, start, history, mask)
        return Chunk(Call(tokens, count, engram, image), count, live, history)

    def chunks(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: Int32[np.ndarray, " B"],
        cache: Cache,
        image: ImageInput | None = None,
    ) -> Iterator[Chunk]:
        """The runs that append the first `count` of `tokens` to a cache."""
        start, history = np.asarray(cache.length), np.asarray(cache.history)

        def make(place: tuple[int, int]) -> Chunk:
            nonlocal start, history
            first, width = place
            live = np.clip(count - first, 0, width).astype(np.int32)
            part = None if image is None else image.part(first, first + width)
            chunk = self.chunk(tokens[:, first : first + width], live, start, history, part, width=width)
            start, history = start + live, chunk.history
            return chunk

        return ahead(make, cuts(tokens.shape[1]), thread=self.engram is not None and self.engram.on_host)

    # 3 run

    def run(
        self,
        chunk: Chunk,
        cache: Cache,
        *,
        taps: tuple[str, ...] = (),
        last_only: bool = False,
        replay: bool = False,
        programs: Programs | None = None,
    ) -> Output:
        """One chunk, its logits and taps cut back to what is no padding of the bucket. Consumes the cache."""
        start, count = np.asarray(cache.length), chunk.count
        programs = self.programs if programs is None else programs
        logits, cache, seen = programs.step(chunk.call, cache, taps=taps, last_only=last_only, replay=replay)
        seen = {name: value[:, : self._places(name, start, chunk)] for name, value in seen.items()}
        cache = replace(cache, length=start if replay else start + count, history=chunk.history)
        return Output(logits[:, 0] if last_only else logits[:, : chunk.live], cache, seen)

    def _places(self, name: str, start: Int32[np.ndarray, " B"], chunk: Chunk) -> int:
        """How much of a tap's axis 1 is no padding: the tokens, or the most entries that a row finishes."""
        _, layer, kind = name.split(".", 2) if name.startswith("layers.") else ("", "0", name)
        ratio = self.config.layers[int(layer)].ratio
        return chunk.live if kind not in ENTRY_TAPS else int(((start + chunk.count) // ratio - start // ratio).max())

    # 4 ask

    def append(
        self,
        tokens: Int32[np.ndarray, "B T"],
        cache: Cache,
        count: Int32[np.ndarray, " B"],
        taps: tuple[str, ...] = (),
        image: ImageInput | None = None,
    ) -> Output:
        """Logits and taps of all chunks, joined."""
        found, programs = [], self.programs
        for chunk in self.chunks(tokens, count, cache, image):
            logits, cache, seen = self.run(chunk, cache, taps=taps, programs=programs)
            found.append({"": logits} | seen)
        joined = {name: jnp.concatenate([part[name] for part in found], axis=1) for name in found[0]}
        return Output(joined.pop(""), cache, joined)

    def prefill(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        cache: Cache,
        *,
        image: ImageInput | None = None,
        mode: str = "full",
    ) -> Output:
        """Logits [B, V] behind each prompt's last token."""
        self.check_prefill(mode)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if not lengths.size or not lengths.all():
            raise ValueError(f"prompts: lengths {lengths.tolist()} are not all at least 1")
        tokens = self.checked(padded(prompts, self.config.pad_token_id))
        self.check_cache(cache, lengths)
        programs, chunks = self.programs, self.chunks(tokens, lengths, cache, image)
        if mode == "replay":
            return self._prefill_replay(chunks, cache)
        newest: Array | None = None
        for chunk in chunks:
            logits, cache, _ = self.run(chunk, cache, last_only=True, programs=programs)
            newest = logits if newest is None else jnp.where((chunk.count > 0)[:, None], logits, newest)
        return Output(newest, cache, {})

    def _prefill_replay(self, chunks: Iterator[Chunk], cache: Cache) -> Output:
        length = np.asarray(cache.length)
        if length.any():
            raise ValueError(f"prefill: 'replay' starts from an empty cache, this one holds {length.tolist()}")
        tail = init_tail(self.config, len(length), self.numerics)
        for chunk in chunks:
            cache, tail = self._programs.below_cut(chunk.call, cache, tail)
            length, history = length + chunk.count, chunk.history
        logits, cache, _ = self._programs.above_cut(replace(cache, length=length), tail)
        return Output(logits[:, 0], replace(cache, length=length, history=history), {})

    def restore(
        self,
        snapshot: Snapshot,
        tokens: Tokens,
        lengths: ArrayLike | Sequence[int] | None = None,
        *,
        capacity: int | None = None,
        image: ImageInput | None = None,
    ) -> Cache:
        """`Model.restore`."""
        array = self.checked(tokens)
        batch, width = array.shape
        length = checked_lengths(lengths, batch, width, minimum=1)
        cache = snapshot.cache(self.config, length, capacity or self.capacity(width), self.numerics)
        count = np.minimum(length, self.config.sliding_window)
        start = length - count
        place = np.minimum(start[:, None] + np.arange(count.max()), width - 1)
        history = np.asarray(cache.history)
        if self.engram is not None:
            mask = None if image is None else np.asarray(image.mask)
            history = self.engram.recall(array, start, history, mask)
        part = None if image is None else image.take(place).part(0, bucket(place.shape[1]))
        chunk = self.chunk(np.take_along_axis(array, place, axis=1), count, start, history, part)
        return self.run(chunk, cache, last_only=True, replay=True).cache

    def draft(self, token: Int32[np.ndarray, " B"], cache: Cache, draws: Draws) -> Drafts:
        """Guesses behind `token`, which the cache has not seen. The cache is read, not consumed."""
        if not cache.drafts:
            raise ValueError("draft: this model has no draft stages (num_nextn_predict_layers 0)")
        return self.programs.draft(cache, token, draws)

    def greedy_draft(self, tokens: ArrayLike | Sequence[int], cache: Cache) -> Drafts:
        """`Model.draft`."""
        array = self.checked(np.asarray(tokens)[:, None])[:, 0]
        return self.draft(array, cache, Draws.first(Sampling(max_new_tokens=0, eos=self.config.eos_token_id)))

    def verify(
        self,
        tokens: Int32[np.ndarray, "B T"],
        offered: Int32[np.ndarray, " B"],
        alive: Bool[np.ndarray, " B"],
        draft_logits: Float32[Array, "B K V"],
        cache: Cache,
        draws: Draws,
        *,
        method: str,
        programs: Programs | None = None,
    ) -> Verified:
        """Judge the drafts behind each row's last token, of which a living row offers the first `offered`, and draft
        again. Consumes the cache."""
        start, count = np.asarray(cache.length), np.where(alive, 1 + offered, 0).astype(np.int32)
        chunk = self.chunk(tokens, count, start, np.asarray(cache.history), width=tokens.shape[1])
        programs = self.programs if programs is None else programs
        found = programs.verify(chunk.call, cache, draft_logits, alive, draws, method=method)
        accepted = np.asarray(found.accepted)
        length = start + np.where(alive, 1 + accepted, 0).astype(np.int32)
        return found._replace(accepted=accepted, cache=replace(found.cache, length=length, history=chunk.history))

    # 5 images

    def patches(self, image: ImageSource | Patches) -> Patches:
        """A picture's patches, unless it is patches already."""
        return image if isinstance(image, Patches) else preprocess(image, self.config)

    def expand_images(self, ids: Sequence[int], images: Sequence[ImageSource | Patches]) -> list[int]:
        """`Model.expand_images`."""
        return expand_placeholders(ids, [self.patches(image).plan.tokens for image in images], self.config)

    def embed_images(self, tokens: Tokens, images: Images) -> ImageInput:
        """`Model.embed_images`."""
        array = self.checked(tokens)
        if not self.config.has_vision:
            raise ValueError("images: this model has no vision tower (vision_config.num_hidden_layers 0)")
        if len(images) != len(array):
            raise ValueError(f"images: lists for {len(images)} rows, tokens have {len(array)}")
        mask = np.zeros(array.shape, bool)
        embeddings = jnp.zeros((*array.shape, self.config.hidden_size), self.numerics.dtype)
        for row, (ids, sources) in enumerate(zip(array, images, strict=True)):
            pictures = [self.patches(source) for source in sources]
            starts = span_starts(ids.tolist(), [p.plan.tokens for p in pictures], self.config)
            for start, picture in zip(starts, pictures, strict=True):
                end = start + picture.plan.tokens
                mask[row, start:end] = True
                embeddings = embeddings.at[row, start:end].set(self.embed_image(picture))
        return ImageInput(jnp.asarray(mask), embeddings)

    def embed_image(self, image: Patches) -> Float[Array, "span D"]:
        """Embeddings of one image's span, in the activation dtype."""
        delimiters = (self.params.image_start, self.params.image_newline, self.params.image_end)
        return span_embeddings(image.plan.roles, self.image_features(image).aligned, *(d[...] for d in delimiters))

    def image_features(self, image: Patches) -> ImageFeatures:
        """The tower and the aligner on one image, padded to a power of two of patches, so that images of any size share
        a few compilations."""
        cfg, live = self.config, len(image.values)
        padding = max(SMALLEST_IMAGE, 1 << (live - 1).bit_length())
        places = patch_places(image.plan, cfg.vision_patch_size)
        windows = window_patches(image.plan, cfg.vision_patch_size, cfg.vision_downsample_ratio)
        pads = [((0, padding - len(array)), (0, 0)) for array in (image.values, places, windows)]
        tower, aligned = self.programs.image(
            np.pad(image.values, pads[0]),
            np.pad(places, pads[1]),
            np.pad(windows, pads[2], constant_values=-1),
            np.int32(live),
        )
        return ImageFeatures(tower[:live], aligned[: len(windows)])
