"""What is compiled: the programs that the host runs, over the parameters as a flat list of arrays.

step       a chunk of tokens of every row, or the last tokens again (replay); the cache is donated
encode     a chunk of a prompt through the encoder alone; cache and tail are donated
decode     the decoder on the prompt's last tokens, behind `encode`
draft      guesses behind a token; writes nothing
speculate  verify offered drafts, take back what failed, draft again: one decoding step of any acceptance
image      the vision tower and the aligner on one padded image

On a mesh, where the parameters lie decides how each program is partitioned; batches are laid on the same mesh.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from dsv41_jax.config import Config
from dsv41_jax.engine.generate import nucleus, row_keys
from dsv41_jax.engine.verify import verify_block, verify_greedy, verify_standard
from dsv41_jax.nn.block import prepared
from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.dspark import Choose, Drafts, draft
from dsv41_jax.nn.replay import Tail, decode, encode
from dsv41_jax.nn.transformer import Transformer, forward
from dsv41_jax.nn.vision import encode as encode_image
from dsv41_jax.numerics import Numerics
from dsv41_jax.sharding import check_backend, lay, mesh_of

REJECTION = {"standard": verify_standard, "block": verify_block}


def probabilities(logits: Float32[Array, "B K V"], temperature: Array, top_p: Array) -> Float32[Array, "B K V"]:
    """What is sampled from: softmax of logits / temperature within the nucleus of top_p."""
    warm = logits.reshape(-1, logits.shape[-1]) / temperature
    return jax.nn.softmax(nucleus(warm, top_p), axis=-1).reshape(logits.shape)


class Programs:
    """The jitted functions of one model; calling them traces and compiles once for each set of shapes, with XLA's
    `compiler_options` where they are given."""

    def __init__(
        self, cfg: Config, params: Transformer, num: Numerics, *, compiler_options: dict[str, Any] | None = None
    ):
        self.cfg, self.num = cfg, num
        self._jit = functools.partial(jax.jit, compiler_options=compiler_options)
        check_backend(num.backend, mesh_of(jax.tree.leaves(params)))
        params = prepared(params) if num.backend == "pallas" else params
        self.leaves, self._structure = jax.tree.flatten(params)  # flat: a step need not walk the modules
        self.step = self._compiled(self._step, static_argnames=("taps", "last_only", "replay"), donate_argnames="cache")
        self.encode = self._compiled(self._encode, donate_argnames=("cache", "tail"))
        self.decode = self._compiled(self._decode, donate_argnames="cache")
        self.draft = self._compiled(self._draft, static_argnames="greedy")
        self.speculate = self._compiled(self._speculate, static_argnames="method", donate_argnames="cache")
        self.image = self._jit(self._image)

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The jitted function of (leaves, arrays that lead with the rows of a batch); on a mesh, rows go over `data`
        before it and stay so behind it, so that the next call finds its cache in place."""
        mesh = mesh_of(self.leaves)
        if mesh is None:
            return self._jit(function, **options)

        @functools.wraps(function)
        def laid(*args: Any, **static: Any) -> Any:
            return lay(function(*args, **static), mesh, jax.lax.with_sharding_constraint)

        program = self._jit(laid, **options)

        def run(leaves: list[Array], *batch: Any, **static: Any) -> Any:
            return program(leaves, *lay(batch, mesh), **static)

        return run

    def _tree(self, leaves: list[Array]) -> Transformer:
        return jax.tree.unflatten(self._structure, leaves)

    def _step(
        self,
        leaves: list[Array],
        tokens: Int32[Array, "B T"],
        count: Int32[Array, " B"],
        rows: Any,
        image: Any,
        cache: Cache,
        *,
        taps: tuple[str, ...],
        last_only: bool,
        replay: bool = False,
    ) -> tuple[Array, Cache, dict[str, Array]]:
        logits, cache, seen = forward(
            self._tree(leaves),
            tokens,
            cache,
            self.cfg,
            num=self.num,
            count=count,
            rows=rows,
            image=image,
            last_only=last_only,
            replay=replay,
        )
        unknown = [name for name in taps if name not in seen]
        if unknown:
            raise ValueError(f"taps: {unknown[0]!r} is not one of {', '.join(seen)}")
        return logits, cache, {name: seen[name] for name in taps}

    def _encode(
        self,
        leaves: list[Array],
        tokens: Int32[Array, "B T"],
        count: Int32[Array, " B"],
        rows: Any,
        image: Any,
        cache: Cache,
        tail: Tail,
    ) -> tuple[Cache, Tail]:
        return encode(
            self._tree(leaves), tokens, cache, tail, self.cfg, num=self.num, count=count, rows=rows, image=image
        )

    def _decode(self, leaves: list[Array], cache: Cache, tail: Tail) -> tuple[Array, Cache]:
        return decode(self._tree(leaves), cache, tail, self.cfg, num=self.num)

    def _guess(self, tree: Transformer, cache: Cache, token: Int32[Array, " B"], choose: Choose) -> Drafts:
        embed, head = tree.embed.weight[...], tree.head.weight[...]
        return draft(tree.mtp, embed, head, cache.drafts, cache.length, token, choose, self.cfg, self.num)

    def _chooser(
        self, keys: Key[Array, " B"], temperature: Array, top_p: Array, greedy: bool
    ) -> Callable[[Float32[Array, "B V"], int], Int32[Array, " B"]]:
        def choose(logits: Float32[Array, "B V"], i: int) -> Int32[Array, " B"]:
            if greedy:
                return jnp.argmax(logits, axis=-1).astype(jnp.int32)
            noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, i), logits.shape[1:]))(keys)
            return jnp.argmax(nucleus(logits / temperature, top_p) + noise, axis=-1).astype(jnp.int32)

        return choose

    def _draft(
        self,
        leaves: list[Array],
        cache: Cache,
        token: Int32[Array, " B"],
        key: Key[Array, ""],
        number: Int32[Array, ""] | int,
        temperature: Array,
        top_p: Array,
        *,
        greedy: bool,
    ) -> Drafts:
        keys = row_keys(key, token.shape[0], number)
        return self._guess(self._tree(leaves), cache, token, self._chooser(keys, temperature, top_p, greedy))

    def _speculate(
        self,
        leaves: list[Array],
        tokens: Int32[Array, "B T"],
        draft_logits: Float32[Array, "B K V"],
        offered: Int32[Array, " B"],
        alive: Bool[Array, " B"],
        rows: Any,
        cache: Cache,
        key: Key[Array, ""],
        number: Int32[Array, ""] | int,
        temperature: Array,
        top_p: Array,
        *,
        method: str,
    ) -> tuple[Int32[Array, " B"], Int32[Array, " B"], Drafts, Cache]:
        """(accepted drafts, the token behind them, new drafts, cache). `tokens` are the last token and its drafts, of
        which each living row offers `offered`."""
        tree, start = self._tree(leaves), cache.length
        count = jnp.where(alive, 1 + offered, 0)
        logits, cache, _ = forward(tree, tokens, cache, self.cfg, num=self.num, count=count, rows=rows)
        keys = row_keys(key, tokens.shape[0], number)
        verifying, drawing, guessing = (jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys) for i in range(3))
        drafts = tokens[:, 1:]
        if method == "greedy":
            accepted, token = verify_greedy(logits, drafts, offered)
        else:
            width = drafts.shape[1]
            target = probabilities(logits, temperature, top_p)
            drawn_from = probabilities(draft_logits[:, :width], temperature, top_p)
            uniforms = jax.vmap(lambda k: jax.random.uniform(k, (width,)))(verifying)
            accepted, token = REJECTION[method](target, drawn_from, drafts, offered, uniforms, drawing)
        cache = cache.rewind(start + jnp.where(alive, 1 + accepted, 0))
        choose = self._chooser(guessing, temperature, top_p, method == "greedy")
        return accepted, token, self._guess(tree, cache, token, choose), cache

    def _image(self, leaves: list[Array], *image: Array) -> tuple[Array, Array]:
        tree = self._tree(leaves)
        return encode_image(tree.vision, tree.aligner, *image, num=self.num)
