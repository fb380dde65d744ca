"""What things cost on this machine: a length of context, and the verification of drafts."""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from dsv41_jax.engine.sampling import Draws, Sampling
from dsv41_jax.engine.schedule import CostTable
from dsv41_jax.model import Model
from dsv41_jax.nn.cache import nbytes_per_token


@dataclass(frozen=True, kw_only=True)
class ContextCost:
    """Of one sequence: seconds of its whole prefill, seconds of each decoded token, bytes of its global cache, and the
    most memory that this process has held so far (resident, host)."""

    tokens: int
    prefill: float
    decode: float
    cache: float
    peak: int


def with_positions(model: Model, positions: int) -> Model:
    """The same model for sequences longer than its config allows, for measurements of work alone."""
    if positions <= model.config.max_position_embeddings:
        return model
    cfg = model.config.replace(max_position_embeddings=positions)
    return Model(cfg, model.params, numerics=model.numerics, engram=model.engram, tokenizer=model.tokenizer)


def measure_context(model: Model, tokens: int, decoded: int = 64, seed: int = 0) -> ContextCost:
    """Prefill `tokens` random tokens and decode `decoded` more, everything compiled before. Raises ValueError where
    the model has no room for them."""
    if tokens < 1 or decoded < 1:
        raise ValueError(f"tokens, decoded: {tokens}, {decoded} are not both at least 1")
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, tokens + decoded))
    for length in (min(tokens, 512), tokens % 512):  # the buckets that a prefill of so many tokens uses
        if length:
            cache = model.prefill([ids[0, :length]], model.init_cache(1, tokens + decoded)).cache
            jax.block_until_ready(model.step(ids[:, :1], cache).logits)
    begin = time.perf_counter()
    logits, cache, _ = jax.block_until_ready(model.prefill([ids[0, :tokens]], model.init_cache(1, tokens + decoded)))
    middle = time.perf_counter()
    for position in range(tokens, tokens + decoded):
        logits, cache, _ = model.step(ids[:, position : position + 1], cache)
    jax.block_until_ready(logits)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    nbytes = nbytes_per_token(model.config, model.numerics) * tokens
    prefill, decode = middle - begin, (end - middle) / decoded
    return ContextCost(tokens=tokens, prefill=prefill, decode=decode, cache=nbytes, peak=peak)


def measure_costs(model: Model, batch: int, repeats: int) -> CostTable:
    """Time verification of 1 .. K drafts a row, and drafting: median seconds of compiled programs on this machine."""
    if batch < 1 or repeats < 1:
        raise ValueError(f"batch, repeats: {batch}, {repeats} are not both at least 1")
    cfg, engine = model.config, model.engine
    if not cfg.num_nextn_predict_layers:
        raise ValueError("profile: this model has no draft stages (num_nextn_predict_layers 0)")
    window, token, alive = cfg.sliding_window, np.zeros(batch, np.int32), np.ones(batch, bool)
    draws = Draws.first(Sampling(max_new_tokens=0, eos=cfg.eos_token_id))
    prompt = np.full((batch, window), cfg.bos_token_id)

    def median(run: Callable[[], object]) -> float:
        run()  # compiles
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    cache = model.step(prompt, model.init_cache(batch, 2 * window + 64)).cache
    drafting = median(lambda: engine.draft(token, cache, draws))
    drafts, verifying = engine.draft(token, cache, draws), []
    for width in range(1, cfg.dspark_block_size + 1):
        tokens, offered = np.zeros((batch, 1 + width), np.int32), np.full(batch, width, np.int32)
        state = cache.copy()

        def verify(tokens: np.ndarray = tokens, offered: np.ndarray = offered) -> object:
            nonlocal state
            state = state.rewind(np.full(batch, window, np.int32))
            accepted, behind, again, state = engine.verify(
                tokens, offered, alive, drafts.logits, state, draws, method="greedy"
            )
            return accepted, behind, again

        verifying.append(max(median(verify) - drafting, 1e-9))
    return CostTable(tuple(batch * (1 + w) for w in range(1, cfg.dspark_block_size + 1)), tuple(verifying), drafting)
