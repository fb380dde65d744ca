"""The model on the kernels against the model under XLA, at the released widths: five layers, every mode among them.

Both round where the released program rounds, in another order of sums. So neither is the measure of the other: both
are compared, tap by tap, with the same model whose activations are float32 and whose quantizers stand, and the kernels
may be 1.5 times as far from it as XLA is. A prompt of at most 512 tokens selects all its entries, so that no near tie
decides a comparison; of several prompts the median counts, since one flipped expert outweighs all roundings. Weights
are random: they need no checkpoint, and say nothing about one.
"""

import itertools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dsv41_jax import Config
from dsv41_jax.cache import init_cache
from dsv41_jax.linear import map_parameters
from dsv41_jax.model import Transformer, abstract_parameters, spread
from dsv41_jax.programs import Programs
from dsv41_jax.quant import NUMERICS, Numerics, numerics
from pallas_kernels.bench.dump import command_buffers, dump
from parity.table import FAIL, PASS, Row, relative_l2

UNTUNED = {"xla_gpu_autotune_level": 0}  # minutes less for programs that are run once
RULE = 1.5  # error against float32, over XLA's
TAPS = ("attn_out", "ffn_out", "out")


def released(**changes: object) -> Config:
    """Five layers of the released widths: window, Full at both ratios, Reindex, Reuse; no Engram, drafts or images."""
    base = {
        "num_hidden_layers": 5, "compress_ratios": [0, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2, "n_routed_experts": 16,
        "engram_layer_ids": [], "engram_num_embeddings": [], "vision_num_hidden_layers": 0,
        "num_nextn_predict_layers": 0, "dspark_block_size": 0, "dspark_target_layer_ids": [],
        "max_position_embeddings": 65536,
    }  # fmt: skip
    return Config.flash().replace(**(base | changes))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any, centre: float, deviation: float) -> Array:
    return (centre + deviation * jax.random.normal(key, shape)).astype(dtype)


def parameters(cfg: Config, seed: int) -> Transformer:
    """As `model.random_parameters`, drawn on the device: these widths take minutes on a host."""
    numbers = itertools.count()

    def value(path: tuple[Any, ...], leaf: Any) -> Array:
        key, (centre, deviation) = jax.random.fold_in(jax.random.key(seed), next(numbers)), spread(path, leaf)
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        if leaf.dtype == jnp.float8_e8m0fnu:
            return jax.lax.bitcast_convert_type(jnp.full(leaf.shape, centre, jnp.uint8), leaf.dtype)
        return _normal(key, leaf.shape, leaf.dtype, centre, deviation)

    return map_parameters(value, abstract_parameters(cfg))


def run(cfg: Config, params: Transformer, num: Numerics, tokens: np.ndarray, prompt: int) -> dict[str, np.ndarray]:
    """Logits and taps of a prompt and of each token after it, as float32: {"prompt/layers.0.out": ..., ...}."""
    programs = Programs(cfg, params, num, compiler_options=UNTUNED)
    cache = init_cache(cfg, len(tokens), tokens.shape[1], num)
    taps = tuple(f"layers.{layer}.{tap}" for layer in range(cfg.num_hidden_layers) for tap in TAPS)
    found: dict[str, np.ndarray] = {}
    for first, last in ((0, prompt), *((t, t + 1) for t in range(prompt, tokens.shape[1]))):
        piece = jnp.asarray(tokens[:, first:last], jnp.int32)
        count = jnp.full(len(tokens), last - first, jnp.int32)
        logits, cache, seen = programs.step(
            programs.leaves, piece, count, (), None, cache, taps=taps, last_only=True, replay=False
        )
        name = "prompt" if first == 0 else f"token {first}"
        seen = {name: np.asarray(value.astype(jnp.float32)) for name, value in (seen | {"logits": logits}).items()}
        found |= {f"{name}/{tap}": value for tap, value in seen.items()}
    return found


def compare(cfg: Config, params: Transformer, name: str, *, prompt: int, decoded: int, batch: int) -> list[Row]:
    """Every tap of random prompts and of `decoded` tokens behind them: the kernels' error against XLA's."""
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (batch, prompt + decoded))
    exact_num = replace(NUMERICS[name], dtype=jnp.dtype(jnp.float32))
    with ThreadPoolExecutor(3) as pool:  # most of the time compiles
        exact, xla, pallas = pool.map(
            lambda num: run(cfg, params, num, tokens, prompt), (exact_num, numerics(name), numerics(name, "pallas"))
        )
    rows = []
    for place, wanted in exact.items():
        theirs, ours = (float(np.median(relative_l2(found[place], wanted))) for found in (xla, pallas))
        verdict = PASS if ours <= RULE * theirs else FAIL
        case, array = place.split("/")
        rows.append(Row(case, array, f"{ours:.4f}", "median of rows", verdict, f"<= {RULE} x {theirs:.4f}"))
    return rows


def decode_step(
    cfg: Config, params: Transformer, num: Numerics, batch: int
) -> tuple[Callable[[], Array], dict[str, int]]:
    """A decode step of `batch` sequences behind 2,000 tokens, compiled, and where its launches sit."""
    programs = Programs(cfg, params, num)
    cache = replace(init_cache(cfg, batch, 4096, num), length=jnp.full(batch, 2000, jnp.int32))
    tokens, count = jnp.full((batch, 1), 7, jnp.int32), jnp.ones(batch, jnp.int32)
    given = (programs.leaves, tokens, count, (), None)
    jitted: Any = programs.step
    with tempfile.TemporaryDirectory() as folder:
        lowered = jitted.lower(*given, cache, taps=(), last_only=True, replay=False)
        step = lowered.compile(compiler_options=dump(folder))
        placed = command_buffers(Path(folder))

    def once() -> Array:
        nonlocal cache
        logits, cache, _ = step(*given, cache)
        return logits

    return once, placed
