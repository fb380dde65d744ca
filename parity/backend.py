"""The model on the kernels against the model under XLA, at the released widths: five layers, every mode among them.

Both round where the released program rounds, in another order of sums. So neither is the measure of the other: both
are compared, tap by tap, with the same model whose activations are float32 and whose quantizers stand, and the kernels
may be 1.5 times as far from it as XLA is. A prompt of at most 512 tokens selects all its entries, so that no near tie
decides a comparison; of several prompts the median counts, since one flipped expert outweighs all roundings. Weights
are random: they need no checkpoint, and say nothing about one.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dsv41_jax import Config
from dsv41_jax.engine.engine import Engine
from dsv41_jax.engine.programs import Programs
from dsv41_jax.nn.cache import init_cache
from dsv41_jax.nn.transformer import Call, Transformer
from dsv41_jax.numerics import NUMERICS, Numerics, numerics_by_name
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


def run(cfg: Config, params: Transformer, numerics: Numerics, tokens: np.ndarray, prompt: int) -> dict[str, np.ndarray]:
    """Logits and taps of a prompt and of each token after it, as float32: {"prompt/layers.0.out": ..., ...}."""
    engine = Engine(cfg, params, numerics, compiler_options=UNTUNED)
    cache = engine.init_cache(len(tokens), tokens.shape[1])
    taps = tuple(f"layers.{layer}.{tap}" for layer in range(cfg.num_hidden_layers) for tap in TAPS)
    found: dict[str, np.ndarray] = {}
    for first, last in ((0, prompt), *((t, t + 1) for t in range(prompt, tokens.shape[1]))):
        piece, count = tokens[:, first:last].astype(np.int32), np.full(len(tokens), last - first, np.int32)
        chunk = engine.chunk(piece, count, np.asarray(cache.length), np.asarray(cache.history), width=last - first)
        logits, cache, seen = engine.run(chunk, cache, taps=taps, last_only=True)
        name = "prompt" if first == 0 else f"token {first}"
        seen = {name: np.asarray(value.astype(jnp.float32)) for name, value in (seen | {"logits": logits}).items()}
        found |= {f"{name}/{tap}": value for tap, value in seen.items()}
    return found


def compare(cfg: Config, params: Transformer, name: str, *, prompt: int, decoded: int, batch: int) -> list[Row]:
    """Every tap of random prompts and of `decoded` tokens behind them: the kernels' error against XLA's."""
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (batch, prompt + decoded))
    exact_numerics = replace(NUMERICS[name], dtype=jnp.dtype(jnp.float32))
    with ThreadPoolExecutor(3) as pool:  # most of the time compiles
        exact, xla, pallas = pool.map(
            lambda numerics: run(cfg, params, numerics, tokens, prompt),
            (exact_numerics, numerics_by_name(name), numerics_by_name(name, "pallas")),
        )
    rows = []
    for place, wanted in exact.items():
        theirs, ours = (float(np.median(relative_l2(found[place], wanted))) for found in (xla, pallas))
        verdict = PASS if ours <= RULE * theirs else FAIL
        case, array = place.split("/")
        rows.append(
            Row(
                case=case,
                array=array,
                error=f"{ours:.4f}",
                where="median of rows",
                verdict=verdict,
                rule=f"<= {RULE} x {theirs:.4f}",
            )
        )
    return rows


def decode_step(
    cfg: Config, params: Transformer, numerics: Numerics, batch: int
) -> tuple[Callable[[], Array], dict[str, int]]:
    """A decode step of `batch` sequences behind 2,000 tokens, compiled, and where its launches sit."""
    programs, count = Programs(cfg, params, numerics), jnp.full(batch, 2000, jnp.int32)
    cache = jax.device_put(replace(init_cache(cfg, batch, 4096, numerics), length=count))
    call = Call(jnp.full((batch, 1), 7, jnp.int32), jnp.ones(batch, jnp.int32))
    with tempfile.TemporaryDirectory() as folder:
        lowered, leaves = programs.lower("step", call, cache, taps=(), last_only=True, replay=False)
        step = lowered.compile(compiler_options=dump(folder))
        placed = command_buffers(Path(folder))

    def once() -> Array:
        nonlocal cache
        logits, cache, _ = step(leaves, call, cache)
        return logits

    return once, placed
