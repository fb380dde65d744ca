"""`Model`: a checkpoint made runnable. Host work (checks, Engram lookups, padding) around the compiled forward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32
from tokenizers import Tokenizer

from dsv41_jax import generate as generation
from dsv41_jax.cache import Cache, init_cache
from dsv41_jax.checkpoint import Checkpoint, CheckpointError, Progress, load
from dsv41_jax.config import Config
from dsv41_jax.dspark import Drafts
from dsv41_jax.encoding import ChatError, Codec, OnDelta, Reply
from dsv41_jax.engram import EngramRows, Memory, compressed_ids
from dsv41_jax.model import Transformer
from dsv41_jax.programs import REJECTION, Programs
from dsv41_jax.quant import numerics as numerics_named
from dsv41_jax.schedule import CostTable
from dsv41_jax.speculate import Speculation
from dsv41_jax.vision import (
    ImageInput,
    ImageSource,
    Patches,
    expand_placeholders,
    patch_places,
    preprocess,
    span_rows,
    span_starts,
    window_patches,
)
from pallas_kernels import require_xla

Tokens = ArrayLike | Sequence[Sequence[int]]
# Taps whose axis 1 counts the compressed entries that a call finishes; that of all others counts tokens.
ENTRY_TAPS = ("latent", "main_kv", "index_keys")


class Model:
    """DeepSeek-V4.1-Flash, or any model of its config, as a function from tokens to logits.

    >>> model = Model.from_pretrained("tiny", numerics="float32")
    >>> logits, seen = model([[0, 3, 40, 41]], taps=["layers.3.index_topk"])
    >>> logits.shape, seen["layers.3.index_topk"][0, 3].tolist()
    ((1, 4, 288), [0, 1, -1, -1, -1, -1, -1, -1])
    >>> cache = model.init_cache(batch=1, capacity=16)
    >>> first, cache = model.step([[0, 3, 40]], cache)
    >>> last, cache = model.step([[41]], cache)
    >>> bool(jnp.allclose(last[0, 0], logits[0, 3], atol=1e-4)), int(cache.length[0])
    (True, 4)
    >>> len(model.generate([[0, 3, 40, 41]], 5)[0])
    5
    """

    def __init__(
        self,
        config: Config,
        params: Transformer,
        *,
        numerics: str = "reference",
        backend: str = "xla",
        memory: Memory | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        if config.engram_layer_ids and memory is None:
            raise ValueError(f"memory: None, but layers {config.engram_layer_ids} read Engram tables")
        self.config, self.params, self.memory, self.tokenizer = config, params, memory, tokenizer
        require_xla("this model", backend)
        self.numerics = numerics_named(numerics, backend)
        self.programs = Programs(config, params, self.numerics)

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        *,
        numerics: str = "reference",
        backend: str = "xla",
        mesh: jax.sharding.Mesh | None = None,
        on_progress: Progress | None = None,
    ) -> Model:
        """Load a checkpoint directory in the released layout, or the bundled one by its name, `tiny`.

        numerics: "reference" (as released: bfloat16, FP8 activations, quantized caches), "float32" (nothing
        quantized but the weights), "cachequant" (float32 with quantized caches), "fast" ("reference" with caches
        packed to bytes: 890 a token), "fast-fp8", "fast-bf16". backend: "xla". Raises ConfigError or CheckpointError
        with one line that names everything wrong. `on_progress(done, total, name)` follows the load.
        """
        if mesh is not None:
            raise NotImplementedError("mesh: loading onto a mesh is not built yet; pass mesh=None")
        numerics_named(numerics)
        require_xla("this model", backend)
        checkpoint = Checkpoint(path_or_name)
        cfg = checkpoint.config
        params = load(checkpoint, on_progress=on_progress)
        tokenizer = read_tokenizer(checkpoint.path, required=bool(cfg.engram_layer_ids))
        memory = None
        if tokenizer is not None and cfg.engram_layer_ids:
            memory = Memory(cfg, compressed_ids(tokenizer, cfg), checkpoint.tables())
        return cls(cfg, params, numerics=numerics, backend=backend, memory=memory, tokenizer=tokenizer)

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

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        max_new_tokens: int,
        *,
        temperature: float | int = 0.0,
        top_p: float | int = 1.0,
        seed: int = 0,
        on_token: generation.OnToken | None = None,
        images: Sequence[Sequence[ImageSource | Patches]] | None = None,
        draft: bool = False,
        verify: str = "block",
        cost: CostTable | None = None,
        on_step: generation.OnStep | None = None,
    ) -> list[list[int]]:
        """New token ids of each prompt, up to `max_new_tokens` or EOS (kept as the last id).

        A prompt is token ids, or text that is tokenized behind a BOS; prompts may differ in length. temperature 0 is
        greedy. `on_token(row, id)` is called as each token is known. `images` are each prompt's images in order; its
        ids hold a placeholder, or the whole span, for each.

        `draft` lets the drafter guess ahead: a sampled output keeps its distribution, and a greedy one is the same up
        to the last bits of a sum (in float32 token by token; bfloat16 numerics can turn a near tie either way).
        `verify` is the rejection rule of sampling, "standard" or "block". With a `cost` table (`dsv41 profile`) each
        step verifies only as many drafts as pay. `on_step(offered, accepted)` gets the counts of the rows of each step.
        """
        generation.check_sampling(max_new_tokens, temperature, top_p)
        if draft and not self.config.num_nextn_predict_layers:
            raise ValueError("draft: True, but this model has no draft stages (num_nextn_predict_layers 0)")
        if verify not in REJECTION:
            raise ValueError(f"verify: {verify!r} is not one of {', '.join(map(repr, REJECTION))}")
        rows = [self.encode(p) if isinstance(p, str) else [int(i) for i in p] for p in prompts]
        if not rows or not all(rows):
            raise ValueError(f"prompts: {'none given' if not rows else f'number {rows.index([])} is empty'}")
        image = None
        if images is not None:
            if len(images) != len(rows):
                raise ValueError(f"images: lists for {len(images)} prompts, there are {len(rows)}")
            patches = [[self._patches(source) for source in sources] for sources in images]
            rows = [self.expand_images(row, own) for row, own in zip(rows, patches, strict=True)]
            image = self.embed_images(generation.padded(rows, self.config.pad_token_id), patches)
        self._checked([[i for row in rows for i in row]])
        cache = self.init_cache(len(rows), self._capacity(max(map(len, rows)) + max_new_tokens))
        sampling = generation.Sampling(max_new_tokens, self.config.eos_token_id, temperature, top_p, seed)
        if draft:
            engine = Speculation(self, verify if temperature else "greedy", cost, on_step)
            return engine.generate(rows, cache, sampling, on_token, image)
        return generation.generate(self.last_logits, rows, cache, self.config.pad_token_id, sampling, on_token, image)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 1024,
        *,
        thinking: bool = True,
        temperature: float | int | None = None,
        top_p: float | int | None = None,
        seed: int = 0,
        on_delta: OnDelta | None = None,
        draft: bool = False,
        **request: Any,
    ) -> Reply:
        """Answer a conversation in the chat-completions form: content, reasoning, tool calls, why it ended.

        `request` takes reasoning_effort, tools, tool_choice and response_format; an image is a message part
        {"type": "image", "image": Pillow image, array, bytes or file} or an image_url with base64 data. Sampling is the
        one that DeepSeek's encoder resolves unless temperature or top_p is given. `on_delta(kind, text)` streams
        "reasoning_content" and "content". Raises ChatError.
        """
        prompt = self.codec.encode(messages, thinking=thinking, **request)
        parser = self.codec.parser(prompt, on_delta)

        def push(_: int, token: int) -> None:
            if token != self.config.eos_token_id:
                parser.push(token)

        (ids,) = self.generate(
            [prompt.ids],
            max_new_tokens,
            temperature=prompt.temperature if temperature is None else temperature,
            top_p=prompt.top_p if top_p is None else top_p,
            seed=seed,
            on_token=push,
            images=[prompt.images] if prompt.images else None,
            draft=draft,
        )
        return parser.finish(length=not ids or ids[-1] != self.config.eos_token_id)

    @functools.cached_property
    def codec(self) -> Codec:
        """The conversation encoder over this checkpoint's tokenizer."""
        if self.tokenizer is None:
            raise ChatError("messages: need a tokenizer.json, and this checkpoint has none")
        return Codec(self.tokenizer)

    def last_logits(
        self, tokens: np.ndarray, cache: Cache, count: np.ndarray, image: ImageInput | None = None
    ) -> tuple[Array, Cache]:
        """(logits [B, V] behind each row's last live token, cache) of one chunk, at most the largest bucket long."""
        logits, cache, _ = self._run(tokens, cache, count, last_only=True, image=image)
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

    def encode(self, text: str) -> list[int]:
        """BOS and the tokens of `text`. Raises ValueError when the checkpoint came without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("prompts: text needs a tokenizer.json, and this checkpoint has none; pass token ids")
        return [self.config.bos_token_id, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def _checked(self, tokens: Tokens) -> Int32[np.ndarray, "B T"]:
        array = np.asarray(tokens)
        if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"tokens: {array.dtype} of shape {array.shape} are not integers [B, T] with B, T >= 1")
        bad = array[(array < 0) | (array >= self.config.vocab_size)]
        if bad.size:
            raise ValueError(f"tokens: id {bad[0]} is outside 0..{self.config.vocab_size - 1}")
        return array.astype(np.int32)

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
        pieces = []
        for first, bucket in generation.chunks(tokens.shape[1]):
            here = np.clip(count - first, 0, bucket).astype(np.int32)
            part = None if image is None else image.part(first, first + bucket)
            logits, cache, seen = self._run(tokens[:, first : first + bucket], cache, here, taps, image=part)
            pieces.append({"": logits} | seen)
        joined = {name: jnp.concatenate([piece[name] for piece in pieces], axis=1) for name in pieces[0]}
        return joined.pop(""), cache, joined

    def _run(
        self,
        tokens: Int32[np.ndarray, "B T"],
        cache: Cache,
        count: Int32[np.ndarray, " B"],
        taps: tuple[str, ...] = (),
        *,
        last_only: bool = False,
        image: ImageInput | None = None,
    ) -> tuple[Array, Cache, dict[str, Array]]:
        """One chunk, padded to its bucket and cut back."""
        live = tokens.shape[1]
        bucket = next(b for b in generation.BUCKETS if b >= live)
        short = ((0, 0), (0, bucket - live))
        padded = np.pad(tokens, short, constant_values=self.config.pad_token_id)
        if image is not None:
            image = ImageInput(jnp.pad(image.mask, short), jnp.pad(image.rows, (*short, (0, 0))))
        start = np.array(cache.length) if taps else None  # a copy: the step consumes the cache
        rows, cache = self.engram_rows(padded, count, cache, None if image is None else np.asarray(image.mask))
        logits, cache, seen = self.programs.step(
            self.programs.leaves, padded, count, rows, image, cache, taps=taps, last_only=last_only
        )
        seen = {name: value[:, : self._places(name, start, count, live)] for name, value in seen.items()}
        return logits if last_only else logits[:, :live], cache, seen

    def _places(self, name: str, start: np.ndarray, count: np.ndarray, live: int) -> int:
        """How much of a tap's axis 1 is no padding: the tokens, or the most entries that a row finishes."""
        _, layer, kind = name.split(".", 2) if name.startswith("layers.") else ("", "0", name)
        ratio = self.config.layers[int(layer)].ratio
        return live if kind not in ENTRY_TAPS else int(((start + count) // ratio - start // ratio).max())


def read_tokenizer(directory: Path, *, required: bool) -> Tokenizer | None:
    """`tokenizer.json` of a checkpoint; None where there is none and nothing needs it."""
    file = directory / "tokenizer.json"
    if not file.exists() and not required:
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(directory, [f"tokenizer.json: cannot be read ({error})"]) from None
