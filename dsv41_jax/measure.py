"""What a length of context costs on this machine: seconds of prefill and of a decoded token, bytes, peak memory."""

import resource
import time
from dataclasses import dataclass

import jax
import numpy as np

from dsv41_jax.model import Model
from dsv41_jax.nn.cache import nbytes_per_token


@dataclass(frozen=True)
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
    cfg, num = model.config.replace(max_position_embeddings=positions), model.numerics
    return Model(cfg, model.params, numerics=num.name, backend=num.backend, memory=model.memory)


def measure_context(model: Model, tokens: int, decoded: int = 64, seed: int = 0) -> ContextCost:
    """Prefill `tokens` random tokens and decode `decoded` more, everything compiled before. Raises ValueError where
    the model has no room for them."""
    if tokens < 1 or decoded < 1:
        raise ValueError(f"tokens, decoded: {tokens}, {decoded} are not both at least 1")
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, tokens + decoded))
    for length in (min(tokens, 512), tokens % 512):  # the buckets that a prefill of so many tokens uses
        if length:
            _, cache = model.prefill([ids[0, :length]], model.init_cache(1, tokens + decoded))
            jax.block_until_ready(model.step(ids[:, :1], cache))
    begin = time.perf_counter()
    logits, cache = jax.block_until_ready(model.prefill([ids[0, :tokens]], model.init_cache(1, tokens + decoded)))
    middle = time.perf_counter()
    for position in range(tokens, tokens + decoded):
        logits, cache = model.step(ids[:, position : position + 1], cache)
    jax.block_until_ready(logits)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    nbytes = nbytes_per_token(model.config, model.numerics) * tokens
    return ContextCost(tokens, middle - begin, (end - middle) / decoded, nbytes, peak)
