"""What is compiled: the programs that the host runs, each over the model's parameters.

step       a chunk of tokens of every row, or the last tokens again (replay); the cache is donated
below_cut  a chunk of a prompt through the layers below the cut of a replay; cache and tail are donated
above_cut  the layers above it on the prompt's last tokens, behind `below_cut`
draft      guesses behind a token; writes nothing
verify     judge offered drafts, take back what failed, draft again: one decoding step of any acceptance
image      the vision tower and the aligner on one padded image

Programs take the parameters as a flat list of arrays, so that a step need not walk the modules. On a mesh, where the
parameters lie decides how each program is partitioned; batches are laid on the same mesh.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from dsv41_jax.config import Config
from dsv41_jax.engine.sampling import Draws, choose, probabilities
from dsv41_jax.engine.verify import REJECTION, verify_greedy
from dsv41_jax.nn.block import Split
from dsv41_jax.nn.cache import Cache, HostOrDevice
from dsv41_jax.nn.dspark import Drafts, draft
from dsv41_jax.nn.replay import Tail, run_above_cut, run_below_cut
from dsv41_jax.nn.transformer import Call, Output, Transformer, abstract_parameters
from dsv41_jax.nn.vision import embed_patches
from dsv41_jax.numerics import Numerics, check_backend
from dsv41_jax.sharding import dotted, mesh_of, shard_batch
from pallas_kernels import mhc

Options = Mapping[str, str | int | bool]  # of XLA's compiler


class Verified(NamedTuple):
    """How many drafts of each row stand, the token behind them, new drafts behind that, and the cache."""

    accepted: Int32[HostOrDevice, " B"]
    token: Int32[Array, " B"]
    drafts: Drafts
    cache: Cache


def check_parameters(cfg: Config, params: Transformer) -> None:
    """Raise ValueError unless the tree holds every parameter that the config's plan needs, in its shape. It may hold
    more: a Reuse layer over a Full layer's parameters needs no compressor."""
    held = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(params, nnx.Param))}
    for path, leaf in nnx.to_flat_state(nnx.state(abstract_parameters(cfg), nnx.Param)):
        if held.get(path) != leaf.shape:
            layer = next((plan for plan in cfg.layers if path[:2] == ("layers", plan.id)), None)
            where = "the config" if layer is None else f"layer {layer.id} as {layer.mode}"
            has = f"has it as {list(held[path])}" if path in held else "has none"
            raise ValueError(f"config: {where} needs {dotted(path)} {list(leaf.shape)}, and the model {has}")


def split_for_kernels(params: Transformer) -> Transformer:
    """The same parameters, and beside each `hc_*_fn` the halves that the kernels read, made once and not in every
    step."""
    tree = nnx.merge(*nnx.split(params))
    for block in (*tree.layers, *tree.mtp):
        block.hc_attn_split = Split(mhc.split_fn(block.hc_attn_fn[...]))
        block.hc_ffn_split = Split(mhc.split_fn(block.hc_ffn_fn[...]))
    return tree


class Programs:
    """The jitted functions of one model; calling them traces and compiles once for each set of shapes, with XLA's
    `compiler_options` where they are given. Raises ValueError for parameters that are not those of the config."""

    def __init__(
        self,
        cfg: Config,
        params: Transformer,
        numerics: Numerics,
        *,
        compiler_options: Options | None = None,
    ):
        self.cfg, self.numerics = cfg, numerics
        self._options = None if compiler_options is None else dict(compiler_options)
        self._how: dict[str, Any] = {"cfg": cfg, "numerics": numerics}
        self._bound: tuple[list[Array], jax.tree_util.PyTreeDef] | None = None
        self.bind(params)

    def bind(self, params: Transformer) -> None:
        """Run over these parameters from now on. Arrays that changed serve what is compiled; another tree is compiled
        anew."""
        leaves, structure = jax.tree.flatten(params)
        same = self._bound is not None and structure == self._bound[1]
        if same and all(new is old for new, old in zip(leaves, self._bound[0], strict=True)):
            return
        if not same or any(new.shape != old.shape for new, old in zip(leaves, self._bound[0], strict=True)):
            check_parameters(self.cfg, params)
        mesh = mesh_of(leaves)
        check_backend(self.numerics.backend, 1 if mesh is None else mesh.size)
        if self.numerics.backend == "pallas":
            self._leaves, self._structure = jax.tree.flatten(split_for_kernels(params))
        else:
            self._leaves, self._structure = leaves, structure
        if not same:
            self._compile(mesh)
        self._bound = (leaves, structure)

    @property
    def leaves(self) -> list[Array]:
        """The arrays as they were bound, the same list until they change."""
        return self._bound[0]

    def _compile(self, mesh: jax.sharding.Mesh | None) -> None:
        self._jitted: dict[str, Any] = {}
        program = functools.partial(self._program, mesh)
        self.step: Callable[..., Output] = program(
            "step", self._step, static_argnames=("taps", "last_only", "replay"), donate_argnames="cache"
        )
        self.below_cut: Callable[..., tuple[Cache, Tail]] = program(
            "below_cut", self._below_cut, donate_argnames=("cache", "tail")
        )
        self.above_cut: Callable[..., Output] = program("above_cut", self._above_cut, donate_argnames="cache")
        self.draft: Callable[..., Drafts] = program("draft", self._draft)
        self.verify: Callable[..., Verified] = program(
            "verify", self._verify, static_argnames="method", donate_argnames="cache"
        )
        self.image: Callable[..., tuple[Array, Array]] = program("image", self._image)

    def _program(
        self, mesh: jax.sharding.Mesh | None, name: str, function: Callable[..., Any], **options: Any
    ) -> Callable[..., Any]:
        """The compiled function of arrays that lead with the rows of a batch, the parameters handed to it; on a mesh,
        rows go over `data` before it and stay so behind it, so that the next call finds its cache in place."""
        split = mesh is not None and name != "image"

        @functools.wraps(function)
        def whole(leaves: list[Array], *batch: Any, **static: Any) -> Any:
            found = function(leaves, *batch, **static)
            return shard_batch(found, mesh, jax.lax.with_sharding_constraint) if split else found

        jitted = self._jitted[name] = jax.jit(whole, compiler_options=self._options, **options)

        def run(*batch: Any, **static: Any) -> Any:
            return jitted(self._leaves, *(shard_batch(batch, mesh) if split else batch), **static)

        return run

    def lower(self, name: str, *batch: Any, **static: Any) -> tuple[Lowered, list[Array]]:
        """(the program of this name as XLA is given it, the arrays that a compiled one takes first)."""
        return self._jitted[name].lower(self._leaves, *batch, **static), self._leaves

    def _tree(self, leaves: list[Array]) -> Transformer:
        return jax.tree.unflatten(self._structure, leaves)

    def _step(
        self, leaves: list[Array], call: Call, cache: Cache, *, taps: tuple[str, ...], last_only: bool, replay: bool
    ) -> Output:
        output = self._tree(leaves)(call, cache, last_only=last_only, replay=replay, **self._how)
        unknown = [name for name in taps if name not in output.taps]
        if unknown:
            raise ValueError(f"taps: {unknown[0]!r} is not one of {', '.join(output.taps)}")
        return output._replace(taps={name: output.taps[name] for name in taps})

    def _below_cut(self, leaves: list[Array], call: Call, cache: Cache, tail: Tail) -> tuple[Cache, Tail]:
        return run_below_cut(self._tree(leaves), call, cache, tail, **self._how)

    def _above_cut(self, leaves: list[Array], cache: Cache, tail: Tail) -> Output:
        return run_above_cut(self._tree(leaves), cache, tail, **self._how)._replace(taps={})

    def _guess(
        self, tree: Transformer, cache: Cache, token: Int32[Array, " B"], keys: Key[Array, " B"], draws: Draws
    ) -> Drafts:
        def one(logits: Float32[Array, "B V"], i: int) -> Int32[Array, " B"]:
            return choose(logits, jax.vmap(lambda key: jax.random.fold_in(key, i))(keys), draws)

        embed, head = tree.embed.weight[...], tree.head.weight[...]
        return draft(tree.mtp, embed, head, cache.drafts, cache.length, token, one, **self._how)

    def _draft(self, leaves: list[Array], cache: Cache, token: Int32[Array, " B"], draws: Draws) -> Drafts:
        return self._guess(self._tree(leaves), cache, token, draws.keys(token.shape[0]), draws)

    def _verify(
        self,
        leaves: list[Array],
        call: Call,
        cache: Cache,
        draft_logits: Float32[Array, "B K V"],
        alive: Bool[Array, " B"],
        draws: Draws,
        *,
        method: str,
    ) -> Verified:
        """`call` holds each row's last token and behind it the drafts that a living row offers."""
        tree, start = self._tree(leaves), cache.length
        logits, cache, _ = tree(call, cache, **self._how)
        keys = draws.keys(call.tokens.shape[0])
        verifying, drawing, guessing = (jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys) for i in range(3))
        drafts, offered = jnp.asarray(call.tokens)[:, 1:], jnp.maximum(call.count - 1, 0)
        if method == "greedy":
            accepted, token = verify_greedy(logits, drafts, offered)
        else:
            width = drafts.shape[1]
            target, drawn_from = probabilities(logits, draws), probabilities(draft_logits[:, :width], draws)
            uniforms = jax.vmap(lambda k: jax.random.uniform(k, (width,)))(verifying)
            accepted, token = REJECTION[method](target, drawn_from, drafts, offered, uniforms, drawing)
        cache = cache.rewind(start + jnp.where(alive, 1 + accepted, 0))
        return Verified(accepted, token, self._guess(tree, cache, token, guessing, draws), cache)

    def _image(
        self,
        leaves: list[Array],
        patches: Float[Array, "P K"],
        places: Int32[Array, "P 2"],
        windows: Int32[Array, "cells square"],
        count: Int32[Array, ""],
    ) -> tuple[Float[Array, "P X"], Float[Array, "cells D"]]:
        tree = self._tree(leaves)
        return embed_patches(tree.vision, tree.aligner, patches, places, windows, count, **self._how)
