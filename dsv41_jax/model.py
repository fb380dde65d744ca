"""`Model`: a checkpoint made runnable: load, then call, step, generate, chat."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from tokenizers import Tokenizer

from dsv41_jax.config import Config
from dsv41_jax.engine import generate as generation
from dsv41_jax.engine.chat import ChatError, Codec, OnDelta, Reply
from dsv41_jax.engine.images import ImageSource, Patches
from dsv41_jax.engine.ngrams import compressed_ids
from dsv41_jax.engine.programs import REJECTION
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.engine.speculate import Speculation
from dsv41_jax.engine.steps import Steps
from dsv41_jax.engine.tables import Memory, check_placement
from dsv41_jax.files import snapshot as snapshots
from dsv41_jax.files.checkpoint import open_checkpoint
from dsv41_jax.files.directory import CheckpointError, Progress
from dsv41_jax.files.load import Loaded
from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.transformer import Transformer
from dsv41_jax.numerics import numerics as numerics_named
from dsv41_jax.sharding import check_backend


class Model(Steps):
    """DeepSeek-V4.1-Flash, or any model of its config, as a function from tokens to logits.

    >>> model = Model.from_pretrained("tiny", numerics="float32")
    >>> logits, seen = model([[0, 3, 40, 41]], taps=["layers.3.index_topk"])
    >>> logits.shape, seen["layers.3.index_topk"][0, 3].tolist()
    ((1, 4, 288), [0, 1, -1, -1, -1, -1, -1, -1])
    >>> cache = model.init_cache(batch=1, capacity=16)
    >>> first, cache = model.step([[0, 3, 40]], cache)
    >>> last, cache = model.step([[41]], cache)
    >>> bool(np.allclose(last[0, 0], logits[0, 3], atol=1e-4)), int(cache.length[0])
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
        super().__init__(config, params, numerics=numerics, backend=backend, memory=memory)
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        *,
        numerics: str = "reference",
        backend: str = "xla",
        mesh: jax.sharding.Mesh | None = None,
        engram: str = "mmap",
        on_progress: Progress | None = None,
        loaded: Loaded | None = None,
    ) -> Model:
        """Load a checkpoint directory in the released layout, one that `dsv41 convert` made with Orbax, one of the
        Hugging Face hub (`hf://owner/name@revision`), or the bundled one by its name, `tiny`.

        numerics: "reference" (as released: bfloat16, FP8 activations, quantized caches), "float32" (nothing
        quantized but the weights), "cachequant" (float32 with quantized caches), "fast" ("reference" with caches
        packed to bytes: 890 a token), "fast-fp8", "fast-bf16". backend: "xla", or "pallas" for the kernels, on one GPU
        that has tiles and in bfloat16. mesh: with axes `data` and `expert`; experts and batches are split over them
        (`sharding`), and a process reads only its part. engram: where the tables lie, "mmap", "host", "device" or
        "sharded" over the mesh. `on_progress(done, total, name)` follows the load; `loaded`, a dict, fills during it,
        and given again after an error or an interrupt spares what is in it.
        Raises ConfigError, CheckpointError, BackendError or, for the mesh, ValueError, in one line that says why.
        """
        check_placement(engram, mesh)
        numerics_named(numerics, backend)
        check_backend(backend, mesh)
        stored = open_checkpoint(path_or_name)
        params, cfg = stored.parameters(mesh, on_progress=on_progress, loaded=loaded), stored.config
        tokenizer = read_tokenizer(stored.path, required=bool(cfg.engram_layer_ids))
        memory = None
        if tokenizer is not None and cfg.engram_layer_ids:
            tables = stored.tables(engram, mesh, on_progress=on_progress, loaded=loaded)
            memory = Memory(cfg, compressed_ids(tokenizer, cfg), tables)
        return cls(cfg, params, numerics=numerics, backend=backend, memory=memory, tokenizer=tokenizer)

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
        prefill: str = "full",
    ) -> list[list[int]]:
        """New token ids of each prompt, up to `max_new_tokens` or EOS (kept as the last id).

        A prompt is token ids, or text that is tokenized behind a BOS; prompts may differ in length. temperature 0 is
        greedy. `on_token(row, id)` is called as each token is known. `images` are each prompt's images in order; its
        ids hold a placeholder, or the whole span, for each.

        `draft` lets the drafter guess ahead: a sampled output keeps its distribution, and a greedy one is the same up
        to the last bits of a sum (in float32 token by token; bfloat16 numerics can turn a near tie either way).
        `verify` is the rejection rule of sampling, "standard" or "block". With a `cost` table (`dsv41 profile`) each
        step verifies only as many drafts as pay. `on_step(offered, accepted)` gets the counts of the rows of each step.
        `prefill` is "full", or "replay": an approximation for long prompts (`Model.prefill`).
        """
        self._check_prefill(prefill)
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
        capacity, pad = self._capacity(max(map(len, rows)) + max_new_tokens), self.config.pad_token_id
        sampling = generation.Sampling(max_new_tokens, self.config.eos_token_id, temperature, top_p, seed)

        def start() -> tuple[Array, Cache]:
            return self.prefill(rows, self.init_cache(len(rows), capacity), image=image, mode=prefill)

        if draft:
            engine = Speculation(self, verify if temperature else "greedy", cost, on_step)
            return engine.generate(start, len(rows), sampling, on_token)

        def step(tokens: np.ndarray, cache: Cache, count: np.ndarray) -> tuple[Array, Cache]:
            return self.last_logits(next(self.pieces(tokens, count, cache)), cache)

        return generation.generate(step, start, len(rows), pad, sampling, on_token)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 that tells this checkpoint's parameters from another's (`snapshot.fingerprint`)."""
        return snapshots.fingerprint(self.params, self.memory)

    def export_snapshot(self, snapshot: Snapshot, path: str | Path) -> None:
        """Write a cache's snapshot to a file, checksummed; killed at any moment, the old or the new file stands."""
        snapshots.write_snapshot(
            Path(path), snapshot, self.config, snapshots.identity(self.config, self.numerics, self.fingerprint)
        )

    def import_snapshot(self, path: str | Path) -> Snapshot:
        """Read a snapshot. Raises SnapshotError when the file is damaged or belongs to another model, config or
        numerics."""
        return snapshots.read_snapshot(
            Path(path), self.config, snapshots.identity(self.config, self.numerics, self.fingerprint)
        )

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
        prefill: str = "full",
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
            prefill=prefill,
        )
        return parser.finish(length=not ids or ids[-1] != self.config.eos_token_id)

    @functools.cached_property
    def codec(self) -> Codec:
        """The conversation encoder over this checkpoint's tokenizer."""
        if self.tokenizer is None:
            raise ChatError("messages: need a tokenizer.json, and this checkpoint has none")
        return Codec(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """BOS and the tokens of `text`. Raises ValueError when the checkpoint came without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("prompts: text needs a tokenizer.json, and this checkpoint has none; pass token ids")
        return [self.config.bos_token_id, *self.tokenizer.encode(text, add_special_tokens=False).ids]


def read_tokenizer(directory: Path, *, required: bool) -> Tokenizer | None:
    """`tokenizer.json` of a checkpoint; None where there is none and nothing needs it."""
    file = directory / "tokenizer.json"
    if not file.exists() and not required:
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(directory, [f"tokenizer.json: cannot be read ({error})"]) from None
