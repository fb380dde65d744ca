"""`Model`: a checkpoint made runnable: load, then call, step, generate, chat."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.typing import ArrayLike

from dsv41_jax.ablation import ablated
from dsv41_jax.config import Config
from dsv41_jax.engine.chat import ChatError, Codec, OnDelta, Reply
from dsv41_jax.engine.chunks import Tokens, checked_lengths, padded
from dsv41_jax.engine.decode import Drafted, OnStep, OnToken, decode
from dsv41_jax.engine.engine import Engine, Images
from dsv41_jax.engine.images import ImageSource, Patches
from dsv41_jax.engine.ngrams import Tokenizer, compressed_ids
from dsv41_jax.engine.sampling import Sampling
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.engine.snapshot import Snapshot
from dsv41_jax.engine.tables import EngramLookup, check_placement
from dsv41_jax.engine.verify import REJECTION
from dsv41_jax.files.checkpoint import open_checkpoint
from dsv41_jax.files.directory import CheckpointError, Progress
from dsv41_jax.files.load import Loaded
from dsv41_jax.files.snapshot import fingerprint, identity, read_snapshot, write_snapshot
from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.dspark import Drafts
from dsv41_jax.nn.random import random_parameters
from dsv41_jax.nn.transformer import Output, Transformer
from dsv41_jax.nn.vision import ImageInput
from dsv41_jax.numerics import Numerics, check_backend, numerics_by_name


class Model:
    """DeepSeek-V4.1-Flash, or any model of its config, as a function from tokens to logits.

    >>> model = Model.from_pretrained("tiny", numerics="float32")
    >>> logits, _, seen = model([[0, 3, 40, 41]], taps=["layers.3.index_topk"])
    >>> logits.shape, seen["layers.3.index_topk"][0, 3].tolist()
    ((1, 4, 288), [0, 1, -1, -1, -1, -1, -1, -1])
    >>> cache = model.step([[0, 3, 40]], model.init_cache(batch=1, capacity=16)).cache
    >>> last = model.step([[41]], cache)
    >>> bool(np.allclose(last.logits[0, 0], logits[0, 3], atol=1e-4)), last.cache.length.tolist()
    (True, [4])
    >>> len(model.generate([[0, 3, 40, 41]], 5)[0])
    5
    >>> model.ablate(roles={6: "full"})
    Traceback (most recent call last):
    ValueError: config: layer 6 as full needs layers.6.attn.compressor.norm.weight [64], and the model has none

    `numerics` is a name of `numerics.NUMERICS`, or a `Numerics` with its backend. `params` may be edited or replaced:
    the next call runs over what they then are, and refuses what does not fit the config.
    """

    def __init__(
        self,
        config: Config,
        params: Transformer,
        *,
        numerics: str | Numerics = "reference",
        backend: str = "xla",
        engram: EngramLookup | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        how = numerics_by_name(numerics, backend) if isinstance(numerics, str) else numerics
        self.engine = Engine(config, params, how, engram=engram)
        self.tokenizer = tokenizer
        self._fingerprint: tuple[object, str] = (None, "")

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        *,
        config: Config | None = None,
        numerics: str = "reference",
        backend: str = "xla",
        mesh: jax.sharding.Mesh | None = None,
        engram: str = "mmap",
        on_progress: Progress | None = None,
        loaded: Loaded | None = None,
    ) -> Model:
        """Load a checkpoint directory in the released layout, one that `dsv41 convert` or `save` made with Orbax, one
        of the Hugging Face hub (`hf://owner/name@revision`), or the bundled one by its name, `tiny`.

        config: another than the checkpoint's own to run its parameters with (`ablate`). numerics: "reference" (as
        released: bfloat16, FP8 activations, quantized caches), "float32" (nothing quantized but the weights),
        "cachequant" (float32 with quantized caches), "fast" ("reference" with caches packed to bytes: 890 a token),
        "fast-fp8", "fast-bf16". backend: "xla", or "pallas" for the kernels, on one GPU that has tiles and in bfloat16.
        mesh: with axes `data` and `expert`; experts and batches are split over them (`sharding`), and a process reads
        only its part. engram: where the tables lie, "mmap", "host", "device" or "sharded" over the mesh.
        `on_progress(done, total, name)` follows the load; `loaded`, a dict, fills during it, and given again after an
        error or an interrupt spares what is in it.
        Raises ConfigError, CheckpointError, BackendError or, for the mesh, ValueError, in one line that says why.
        """
        check_placement(engram, mesh)
        numerics_by_name(numerics, backend)
        check_backend(backend, 1 if mesh is None else mesh.size)
        stored = open_checkpoint(path_or_name)
        params = stored.parameters(mesh, on_progress=on_progress, loaded=loaded)
        own, config = stored.config, config or stored.config
        tokenizer = read_tokenizer(stored.path, required=bool(own.engram_layer_ids))
        lookup = None
        if tokenizer is not None and config.engram_layer_ids:
            tables = stored.tables(engram, mesh, on_progress=on_progress, loaded=loaded)
            lookup = EngramLookup(own, compressed_ids(tokenizer, own), tables)
        return cls(config, params, numerics=numerics, backend=backend, engram=lookup, tokenizer=tokenizer)

    @classmethod
    def random(
        cls, config: Config, seed: int = 0, *, numerics: str | Numerics = "reference", backend: str = "xla"
    ) -> Model:
        """A model of random parameters and Engram tables, without a tokenizer: for tests and benchmarks."""
        lookup = EngramLookup.random(config, seed) if config.engram_layer_ids else None
        params = random_parameters(config, seed)
        return cls(config, params, numerics=numerics, backend=backend, engram=lookup)

    def save(self, path: str | Path, *, overwrite: bool = False, on_progress: Progress | None = None) -> None:
        """Write config, parameters, Engram tables and tokenizer as an Orbax checkpoint that `from_pretrained` reads.

        `path` appears whole or not at all; an existing one is refused, or with `overwrite` replaced in one step. Raises
        CheckpointError for parameters that are not those of the config, FileExistsError.
        """
        from dsv41_jax.files.orbax_writer import save

        files = {} if self.tokenizer is None else {"tokenizer.json": self.tokenizer.to_str().encode()}
        tables = () if self.engram is None else self.engram.tables
        save(self.params, path, self.config, tables=tables, files=files, overwrite=overwrite, on_progress=on_progress)

    def ablate(
        self,
        *,
        roles: Mapping[int, str] | None = None,
        candidates: bool = True,
        engram: bool = True,
        window_only: Sequence[int] = (),
        cache: str | None = None,
    ) -> Model:
        """A model over the same parameters in which layers have other roles: `roles={6: "reuse"}` gives layers another
        mode, `candidates=False` lets every index source score all entries, `engram=False` looks nothing up,
        `window_only` layers attend to their window alone (and still publish), `cache` keeps caches in another format:
        "exact", "fp4" (as released), "fp8" or "bf16".

        Raises ValueError in one line for roles that do not fit together or lack parameters (a Reuse layer has no
        compressor: it cannot be Full).
        """
        cfg = ablated(self.config, roles=roles, candidates=candidates, engram=engram, window_only=window_only)
        numerics = self.numerics if cache is None else self.numerics.with_cache(cache)
        lookup = self.engram if cfg.engram_layer_ids else None
        return Model(cfg, self.params, numerics=numerics, engram=lookup, tokenizer=self.tokenizer)

    @property
    def config(self) -> Config:
        """The config that calls obey."""
        return self.engine.config

    @property
    def numerics(self) -> Numerics:
        """The arithmetic."""
        return self.engine.numerics

    @property
    def engram(self) -> EngramLookup | None:
        """The Engram tables."""
        return self.engine.engram

    @property
    def params(self) -> Transformer:
        """The parameters; edits are seen by the next call."""
        return self.engine.params

    @params.setter
    def params(self, params: Transformer) -> None:
        self.engine.params = params

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` sequences of at most `capacity` tokens."""
        return self.engine.init_cache(batch, capacity)

    def __call__(self, tokens: Tokens, taps: Sequence[str] = (), images: Images | None = None) -> Output:
        """Logits [B, T, V] in float32 of every position, the cache behind them, and the intermediates named by `taps`.

        Taps are `final_norm`, `main_hidden` and, as `layers.N.NAME`: out, pre_mix, attn_in, attn_out, ffn_out,
        moe_experts, moe_weights, and where the layer has them index_topk, candidate_blocks, latent, main_kv,
        index_keys, engram_hash_ids, engram_gate, engram_out, draft_feature. Axis 1 counts tokens, but compressed
        entries for latent, main_kv and index_keys. Ids that are -1 are empty places. `images` are each row's images in
        order; the row's ids hold their spans (`expand_images`).
        """
        array = self.engine.checked(tokens)
        batch, width = array.shape
        cache = self.init_cache(batch, self.engine.capacity(width))
        image = None if images is None else self.embed_images(array, images)
        return self.engine.append(array, cache, np.full(batch, width, np.int32), tuple(taps), image)

    def step(
        self,
        tokens: Tokens,
        cache: Cache,
        lengths: ArrayLike | Sequence[int] | None = None,
        taps: Sequence[str] = (),
        image: ImageInput | None = None,
    ) -> Output:
        """Logits [B, T, V] of these tokens and the cache after them, whatever the chunking.

        `lengths` [B] says how many of the T tokens of each row are live; logits past them mean nothing. `taps` as in a
        plain call; `image` is the part of `embed_images` that belongs to these tokens. The cache is consumed (its
        buffers are reused): go on with the returned one, or `copy()` before. Raises ValueError, and changes nothing,
        when a token id is out of range or a row would outgrow the capacity.
        """
        array = self.engine.checked(tokens)
        count = checked_lengths(lengths, *array.shape)
        self.engine.check_cache(cache, count)
        return self.engine.append(array, cache, count, tuple(taps), image)

    def prefill(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        cache: Cache,
        *,
        image: ImageInput | None = None,
        mode: str = "full",
    ) -> Output:
        """Logits [B, V] behind each prompt's last token, and the cache. Prompts are token ids and may differ in length.

        mode "replay" is Bounded Replay, an APPROXIMATION that is exact for prompts of at most sliding_window tokens:
        the layers from the last Full one up run on each prompt's last sliding_window tokens alone (`nn/replay.py`;
        `python -m parity replay` measures what it changes). It starts from an empty cache. `image` is
        `embed_images` of the padded prompts. Consumes the cache. Raises ValueError as `step` does.
        """
        return self.engine.prefill(prompts, cache, image=image, mode=mode)

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
        (`nn/replay.py`), and what later tokens compress depends on where the prefix ended. `tokens` must be those that
        the snapshot was taken behind. `image` is `embed_images` of all of them. Raises ValueError when a length
        is not in 1..T, when the snapshot is shorter, or was not taken with this config and numerics.
        """
        return self.engine.restore(snapshot, tokens, lengths, capacity=capacity, image=image)

    def draft(self, tokens: ArrayLike | Sequence[int], cache: Cache) -> Drafts:
        """Greedy guesses behind `tokens` [B], the next token of each row, which the cache has not seen yet. The cache
        is read, not consumed."""
        return self.engine.greedy_draft(tokens, cache)

    def expand_images(self, ids: Sequence[int], images: Sequence[ImageSource | Patches]) -> list[int]:
        """Ids in which every image placeholder is as long as its image's span; spans that already are stay as they
        are. Raises ValueError when the number of placeholders is not the number of images."""
        return self.engine.expand_images(ids, images)

    def embed_images(self, tokens: Tokens, images: Images) -> ImageInput:
        """Run the vision tower over each row's images and lay their spans over the placeholders of `tokens` [B, T]."""
        return self.engine.embed_images(tokens, images)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        max_new_tokens: int,
        *,
        temperature: float | int = 0.0,
        top_p: float | int = 1.0,
        seed: int = 0,
        on_token: OnToken | None = None,
        images: Images | None = None,
        draft: bool = False,
        verify: str = "block",
        cost: CostTable | None = None,
        on_step: OnStep | None = None,
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
        engine, eos = self.engine, self.config.eos_token_id
        engine.check_prefill(prefill)
        sampling = Sampling(max_new_tokens=max_new_tokens, eos=eos, temperature=temperature, top_p=top_p, seed=seed)
        if draft and not self.config.num_nextn_predict_layers:
            raise ValueError("draft: True, but this model has no draft stages (num_nextn_predict_layers 0)")
        if verify not in REJECTION:
            raise ValueError(f"verify: {verify!r} is not one of {', '.join(map(repr, REJECTION))}")
        ids = [self.tokenize(p) if isinstance(p, str) else [int(i) for i in p] for p in prompts]
        if not ids or not all(ids):
            raise ValueError(f"prompts: {'none given' if not ids else f'number {ids.index([])} is empty'}")
        image = None
        if images is not None:
            if len(images) != len(ids):
                raise ValueError(f"images: lists for {len(images)} prompts, there are {len(ids)}")
            patches = [[engine.patches(source) for source in sources] for sources in images]
            ids = [self.expand_images(prompt, own) for prompt, own in zip(ids, patches, strict=True)]
            image = self.embed_images(padded(ids, self.config.pad_token_id), patches)
        engine.checked([[i for prompt in ids for i in prompt]])
        capacity = engine.capacity(max(map(len, ids)) + max_new_tokens)

        def start() -> Output:
            return self.prefill(ids, self.init_cache(len(ids), capacity), image=image, mode=prefill)

        step = Drafted(engine, verify if temperature else "greedy", cost, on_step) if draft else None
        return decode(engine, start, len(ids), sampling, step, on_token)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        max_new_tokens: int = 1024,
        *,
        thinking: bool = True,
        temperature: float | int | None = None,
        top_p: float | int | None = None,
        seed: int = 0,
        on_delta: OnDelta | None = None,
        draft: bool = False,
        prefill: str = "full",
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        response_format: Mapping[str, object] | None = None,
    ) -> Reply:
        """Answer a conversation in the chat-completions form: content, reasoning, tool calls, why it ended.

        The last four fields are those of a chat-completions request. An image is a message part {"type": "image",
        "image": Pillow image, array, bytes or file} or an image_url with base64 data. Sampling is the one that
        DeepSeek's encoder resolves unless temperature or top_p is given. `on_delta(kind, text)` streams
        "reasoning_content" and "content". Raises ChatError.
        """
        prompt = self.codec.encode(
            messages,
            thinking=thinking,
            reasoning_effort=reasoning_effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
        )
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

    def tokenize(self, text: str) -> list[int]:
        """BOS and the tokens of `text`. Raises ValueError when the checkpoint came without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("prompts: text needs a tokenizer.json, and this checkpoint has none; pass token ids")
        return [self.config.bos_token_id, *self.tokenizer.encode(text, add_special_tokens=False).ids]

    def snapshot(self, cache: Cache) -> Snapshot:
        """The global entries of a cache, on the host: 890 bytes a token packed. The cache is read, not consumed."""
        return Snapshot.of(cache)

    @property
    def fingerprint(self) -> str:
        """SHA-256 that tells these parameters from another checkpoint's (`files.snapshot.fingerprint`)."""
        leaves = self.engine.programs.leaves
        if self._fingerprint[0] is not leaves:
            self._fingerprint = (leaves, fingerprint(self.params, self.engram))
        return self._fingerprint[1]

    def export_snapshot(self, snapshot: Snapshot, path: str | Path) -> None:
        """Write a cache's snapshot to a file, checksummed; killed at any moment, the old or the new file stands."""
        write_snapshot(Path(path), snapshot, self.config, self._identity())

    def import_snapshot(self, path: str | Path) -> Snapshot:
        """Read a snapshot. Raises SnapshotError when the file is damaged or belongs to another model, config or
        numerics."""
        return read_snapshot(Path(path), self.config, self._identity())

    def _identity(self) -> Mapping[str, str]:
        return identity(self.config, self.numerics, self.fingerprint)


def read_tokenizer(directory: Path, *, required: bool) -> Tokenizer | None:
    """`tokenizer.json` of a checkpoint; None where there is none and nothing needs it."""
    file = directory / "tokenizer.json"
    if not file.exists() and not required:
        return None
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(directory, [f"tokenizer.json: cannot be read ({error})"]) from None
