"""The host's side of a model: check, pad to buckets, look Engram rows up, run the compiled programs, cut back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int32

from dsv41_jax.config import Config
from dsv41_jax.engine import generate as generation
from dsv41_jax.engine.generate import Piece
from dsv41_jax.engine.images import (
    ImageSource,
    Patches,
    expand_placeholders,
    patch_places,
    preprocess,
    span_rows,
    span_starts,
    window_patches,
)
from dsv41_jax.engine.programs import Programs
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.engine.tables import Memory
from dsv41_jax.nn.cache import Cache, init_cache
from dsv41_jax.nn.dspark import Drafts
from dsv41_jax.nn.engram import EngramRows
from dsv41_jax.nn.replay import cut, init_tail
from dsv41_jax.nn.transformer import Transformer
from dsv41_jax.nn.vision import ImageInput
from dsv41_jax.numerics import numerics as numerics_named

Tokens = ArrayLike | Sequence[Sequence[int]]
# Taps whose axis 1 counts the compressed entries that a call finishes; that of all others counts tokens.
ENTRY_TAPS = ("latent", "main_kv", "index_keys")


class Steps:
    """A model as steps over a cache: tokens in, logits and a new cache out."""

    def __init__(
        self,
        config: Config,
        params: Transformer,
        *,
        numerics: str = "reference",
        backend: str = "xla",
        memory: Memory | None = None,
    ):
        if config.engram_layer_ids and memory is None:
            raise ValueError(f"memory: None, but layers {config.engram_layer_ids} read Engram tables")
        self.config, self.params, self.memory = config, params, memory
        self.numerics = numerics_named(numerics, backend)
        self.programs = Programs(config, params, self.numerics)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` sequences of at most `capacity` tokens."""
        return init_cache(self.config, batch, capacity, self.numerics)

    def __call__(
        self,
        tokens: Tokens,
        taps: Sequence[str] | None = None,
        images: Sequence[Sequence[ImageSource | Patches]] | None = None,
    ) -> Any:
        """Logits [B, T, V] in float32 of every position; with `taps`, (logits, {name: array}) of those intermediates.

        Taps are `final_norm`, `main_hidden` and, as `layers.N.NAME`: out, pre_mix, attn_in, attn_out, ffn_out,
        moe_experts, moe_weights, and where the layer has them index_topk, candidate_blocks, latent, main_kv,
        index_keys, engram_hash_ids, engram_gate, engram_out, draft_feature. Axis 1 counts tokens, but compressed
        entries for latent, main_kv and index_keys. Ids that are -1 are empty places. `images` are each row's images in
        order; the row's ids hold their spans (`expand_images`).
        """
        array = self._checked(tokens)
        cache = self.init_cache(array.shape[0], self._capacity(array.shape[1]))
        image = None if images is None else self.embed_images(array, images)
        logits, _, seen = self._advance(array, cache, np.full(len(array), array.shape[1]), tuple(taps or ()), image)
        return logits if taps is None else (logits, seen)

    def step(
        self,
        tokens: Tokens,
        cache: Cache,
        lengths: ArrayLike | Sequence[int] | None = None,
        taps: Sequence[str] | None = None,
        image: ImageInput | None = None,
    ) -> Any:
        """(logits [B, T, V] of these tokens, the cache after them), whatever the chunking.

        `lengths` [B] says how many of the T tokens of each row are live; logits past them mean nothing. With `taps`,
        a third value as in a plain call; `image` is the part of `embed_images` that belongs to these tokens. The cache
        is consumed (its buffers are reused): go on with the returned one, or `copy()` before. Raises ValueError, and
        changes nothing, when a token id is out of range or a row would outgrow the capacity.
        """
        array = self._checked(tokens)
        batch, width = array.shape
        count = np.full(batch, width) if lengths is None else np.asarray(lengths)
        whole = np.issubdtype(count.dtype, np.integer) and count.shape == (batch,)
        if not whole or (count < 0).any() or (count > width).any():
            raise ValueError(f"lengths: {count.tolist()} is not one number in 0..{width} for each of {batch} rows")
        self._check_room(cache, count)
        logits, cache, seen = self._advance(array, cache, count, tuple(taps or ()), image)
        return (logits, cache) if taps is None else (logits, cache, seen)

    def prefill(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        cache: Cache,
        *,
        image: ImageInput | None = None,
        mode: str = "full",
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """(logits behind each prompt's last token, cache). Prompts are token ids and may differ in length.

        mode "replay" is Bounded Replay, an APPROXIMATION that is exact for prompts of at most sliding_window tokens:
        the layers from the last Full one up run on each prompt's last sliding_window tokens alone (`replay.py`;
        `python -m parity replay` measures what it changes). It starts from an empty cache. `image` is
        `embed_images` of the padded prompts. Consumes the cache. Raises ValueError as `step` does.
        """
        self._check_prefill(mode)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if not lengths.size or not lengths.all():
            raise ValueError(f"prompts: lengths {lengths.tolist()} are not all at least 1")
        tokens = self._checked(generation.padded(prompts, self.config.pad_token_id))
        self._check_room(cache, lengths)
        parts = self.pieces(tokens, lengths, cache, image)
        if mode == "full":
            return generation.prefill(self.last_logits, parts, lengths, cache)
        if np.asarray(cache.length).any():
            raise ValueError(f"prefill: 'replay' starts from an empty cache, this one holds {cache.length.tolist()}")
        tail = init_tail(self.config, len(lengths), self.numerics)
        for part in parts:
            rows, cache = self._remembered(part, cache)
            cache, tail = self.programs.encode(
                self.programs.leaves, part.tokens, part.count, rows, part.image, cache, tail
            )
        logits, cache = self.programs.decode(self.programs.leaves, cache, tail)
        return logits[:, 0], cache

    def restore(
        self,
        snapshot: Snapshot,
        tokens: Tokens,
        lengths: ArrayLike | Sequence[int] | None = None,
        *,
        capacity: int | None = None,
        image: ImageInput | None = None,
    ) -> Cache:
        """A cache that goes on behind the first `lengths` [B] of `tokens` [B, T] (default: all), whose entries are in
        `snapshot`: only their last sliding_window tokens are run again, to rebuild the windows.

        An APPROXIMATION for prefixes longer than sliding_window: the replay's windows begin where it begins
        (`replay.py`), and what later tokens compress depends on where the prefix ended. `tokens` must be those that the
        snapshot was taken behind. `image` is `embed_images` of all of them. Raises ValueError when a length
        is not in 1..T, when the snapshot is shorter, or was not taken with this config and numerics.
        """
        array = self._checked(tokens)
        batch, width = array.shape
        length = np.full(batch, width, np.int32) if lengths is None else np.asarray(lengths, np.int32)
        if length.shape != (batch,) or (length < 1).any() or (length > width).any():
            raise ValueError(f"lengths: {length.tolist()} is not one number in 1..{width} for each of {batch} rows")
        cache = snapshot.cache(self.config, length, capacity or self._capacity(width), self.numerics)
        count = np.minimum(length, self.config.sliding_window)
        place = np.minimum((length - count)[:, None] + np.arange(count.max()), width - 1)
        part = None if image is None else image.take(place)
        if self.memory is not None:
            mask = None if image is None else np.asarray(image.mask)
            history = self.memory.recall(array, length - count, np.array(cache.history), mask)
            cache = replace(cache, history=jnp.asarray(history))
        (piece,) = self.pieces(np.take_along_axis(array, place, axis=1), count, cache, part, start=length - count)
        rows, cache = self._remembered(piece, cache)
        _, cache, _ = self.programs.step(
            self.programs.leaves,
            piece.tokens,
            piece.count,
            rows,
            piece.image,
            cache,
            taps=(),
            last_only=True,
            replay=True,
        )
        return cache

    def pieces(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: np.ndarray,
        cache: Cache,
        image: ImageInput | None = None,
        *,
        start: np.ndarray | None = None,
    ) -> Iterator[Piece]:
        """The calls that append `count` of `tokens` to `cache`, Engram rows read ahead; or with `start` the one call
        that runs them again from there on."""
        read = None
        if self.memory is not None:
            position, history = np.array(cache.length if start is None else start), np.array(cache.history)

            def read(chunk: np.ndarray, live: np.ndarray, mask: np.ndarray | None) -> Any:
                nonlocal position, history
                rows, history = self.memory.read(chunk, live, position, history, mask)
                position = position + live
                return rows, history

        ahead = self.memory is not None and self.memory.on_host
        whole = start is not None
        return generation.pieces(tokens, count, self.config.pad_token_id, image, read, ahead=ahead, whole=whole)

    def _remembered(self, piece: Piece, cache: Cache) -> tuple[tuple[EngramRows, ...], Cache]:
        """(the Engram rows of a piece, the cache with the history of ids behind it)."""
        if piece.memory is None:
            return (), cache
        rows, history = piece.memory
        return rows, replace(cache, history=jnp.asarray(history))

    def last_logits(self, piece: Piece, cache: Cache) -> tuple[Array, Cache]:
        """(logits [B, V] behind each row's last live token, cache) of one call."""
        logits, cache, _ = self._run(piece, cache, last_only=True)
        return logits[:, 0], cache

    def draft(self, tokens: ArrayLike | Sequence[int], cache: Cache) -> Drafts:
        """Greedy guesses behind `tokens` [B], the next token of each row, which the cache has not seen yet. The cache
        is read, not consumed."""
        array = self._checked(np.asarray(tokens)[:, None])[:, 0]
        if not cache.drafts:
            raise ValueError("draft: this model has no draft stages (num_nextn_predict_layers 0)")
        key, one = jax.random.key(0), jnp.float32(1)
        return self.programs.draft(self.programs.leaves, cache, array, key, 0, one, one, greedy=True)

    def engram_rows(
        self, tokens: Int32[np.ndarray, "B T"], count: np.ndarray, cache: Cache, mask: np.ndarray | None = None
    ) -> tuple[tuple[EngramRows, ...], Cache]:
        """(what the Engram layers need of these tokens, the cache with its history of ids moved on)."""
        if self.memory is None:
            return (), cache
        length, history = np.asarray(cache.length), np.asarray(cache.history)
        rows, history = self.memory.read(tokens, count, length, history, mask)
        return rows, replace(cache, history=jnp.asarray(history))

    def expand_images(self, ids: Sequence[int], images: Sequence[ImageSource | Patches]) -> list[int]:
        """Ids in which every image placeholder is as long as its image's span; spans that already are stay as they
        are. Raises ValueError when the number of placeholders is not the number of images."""
        return expand_placeholders(ids, [self._patches(image).plan.tokens for image in images], self.config)

    def embed_images(self, tokens: Tokens, images: Sequence[Sequence[ImageSource | Patches]]) -> ImageInput:
        """Run the vision tower over each row's images and lay their spans over the placeholders of `tokens` [B, T]."""
        array = self._checked(tokens)
        if not self.config.has_vision:
            raise ValueError("images: this model has no vision tower (vision_config.num_hidden_layers 0)")
        if len(images) != len(array):
            raise ValueError(f"images: lists for {len(images)} rows, tokens have {len(array)}")
        mask = np.zeros(array.shape, bool)
        rows = jnp.zeros((*array.shape, self.config.hidden_size), self.numerics.dtype)
        for row, (ids, sources) in enumerate(zip(array, images, strict=True)):
            patches = [self._patches(source) for source in sources]
            starts = span_starts(ids.tolist(), [p.plan.tokens for p in patches], self.config)
            for start, image in zip(starts, patches, strict=True):
                mask[row, start : start + image.plan.tokens] = True
                rows = rows.at[row, start : start + image.plan.tokens].set(self.image_rows(image))
        return ImageInput(jnp.asarray(mask), rows)

    def image_rows(self, image: Patches) -> Float[Array, "span D"]:
        """Embeddings of one image's span, in the activation dtype."""
        _, aligned = self.encode_image(image)
        delimiters = (getattr(self.params, f"image_{part}")[...] for part in ("start", "newline", "end"))
        return span_rows(image.plan.roles, aligned, *delimiters)

    def encode_image(self, image: Patches) -> tuple[Float[Array, "P X"], Float[Array, "cells D"]]:
        """(tower output of each patch, aligner output of each window). Padded to a power of two of patches, so that
        images of any size share a few compilations."""
        cfg, live = self.config, len(image.values)
        bucket = max(64, 1 << (live - 1).bit_length())
        places = patch_places(image.plan, cfg.vision_patch_size)
        windows = window_patches(image.plan, cfg.vision_patch_size, cfg.vision_downsample_ratio)
        pads = [((0, bucket - len(array)), (0, 0)) for array in (image.values, places, windows)]
        features, aligned = self.programs.image(
            self.programs.leaves,
            np.pad(image.values, pads[0]),
            np.pad(places, pads[1]),
            np.pad(windows, pads[2], constant_values=-1),
            np.int32(live),
        )
        return features[:live], aligned[: len(windows)]

    def _patches(self, image: ImageSource | Patches) -> Patches:
        return image if isinstance(image, Patches) else preprocess(image, self.config)

    def _checked(self, tokens: Tokens) -> Int32[np.ndarray, "B T"]:
        array = np.asarray(tokens)
        if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"tokens: {array.dtype} of shape {array.shape} are not integers [B, T] with B, T >= 1")
        bad = array[(array < 0) | (array >= self.config.vocab_size)]
        if bad.size:
            raise ValueError(f"tokens: id {bad[0]} is outside 0..{self.config.vocab_size - 1}")
        return array.astype(np.int32)

    def _check_prefill(self, mode: str) -> None:
        if mode not in ("full", "replay"):
            raise ValueError(f"prefill: {mode!r} is not one of 'full', 'replay'")
        if mode == "replay":
            cut(self.config)

    def _capacity(self, tokens: int) -> int:
        most = self.config.max_position_embeddings
        if tokens > most:
            raise ValueError(f"tokens: {tokens} positions exceed max_position_embeddings {most}")
        return min(most, max(128, 1 << (tokens - 1).bit_length()))

    def _check_room(self, cache: Cache, count: np.ndarray) -> None:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
            raise ValueError("cache: was consumed by an earlier step; use the cache which that step returned")
        if cache.length.shape != count.shape:
            raise ValueError(f"cache: holds {cache.length.shape[0]} rows, tokens have {count.shape[0]}")
        window = cache.layers[0].window
        if (window.shape[-1], window.dtype) != self.numerics.window.row(self.config.head_dim, self.numerics.dtype):
            raise ValueError(
                f"cache: rows of {window.shape[-1]} {window.dtype} are not those of {self.numerics.name!r}"
            )
        length = np.asarray(cache.length)
        full = np.flatnonzero(length + count > cache.capacity)
        if full.size:
            row = int(full[0])
            raise ValueError(
                f"cache: row {row} holds {length[row]} tokens, {count[row]} more exceed capacity {cache.capacity}"
            )

    def _advance(
        self,
        tokens: Int32[np.ndarray, "B T"],
        cache: Cache,
        count: np.ndarray,
        taps: tuple[str, ...],
        image: ImageInput | None = None,
    ) -> tuple[Array, Cache, dict[str, Array]]:
        """Every chunk of a call, joined."""
        found = []
        for piece in self.pieces(tokens, count, cache, image):
            logits, cache, seen = self._run(piece, cache, taps)
            found.append({"": logits} | seen)
        joined = {name: jnp.concatenate([part[name] for part in found], axis=1) for name in found[0]}
        return joined.pop(""), cache, joined

    def _run(
        self, piece: Piece, cache: Cache, taps: tuple[str, ...] = (), *, last_only: bool = False
    ) -> tuple[Array, Cache, dict[str, Array]]:
        """One call, cut back to the tokens that are no padding of its bucket."""
        start = np.array(cache.length) if taps else None  # a copy: the step consumes the cache
        rows, cache = self._remembered(piece, cache)
        logits, cache, seen = self.programs.step(
            self.programs.leaves, piece.tokens, piece.count, rows, piece.image, cache, taps=taps, last_only=last_only
        )
        seen = {name: value[:, : self._places(name, start, piece.count, piece.live)] for name, value in seen.items()}
        return logits if last_only else logits[:, : piece.live], cache, seen

    def _places(self, name: str, start: np.ndarray, count: np.ndarray, live: int) -> int:
        """How much of a tap's axis 1 is no padding: the tokens, or the most entries that a row finishes."""
        _, layer, kind = name.split(".", 2) if name.startswith("layers.") else ("", "0", name)
        ratio = self.config.layers[int(layer)].ratio
        return live if kind not in ENTRY_TAPS else int(((start + count) // ratio - start // ratio).max())
