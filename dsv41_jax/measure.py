"""What things cost on this machine: a length of context, the verification of drafts, the steps of a generation."""

import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    cache: int
    peak: int


class StepClock:
    """The speed of decoding steps that compiled nothing. A step adds one token, or those that a drafter guessed: a
    width that was not run before compiles, in whichever step it comes, and such a step is not counted."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._compiled, self._before = clock, 0, 0
        self._last: float | None = None
        self.steps: list[tuple[int, float]] = []  # tokens, seconds
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self._compiled += event.startswith("/jax/core/compile/")

    def step(self, tokens: int) -> None:
        """A step has ended that added so many tokens; the first call ends the prefill."""
        now = self._clock()
        if self._last is not None and self._compiled == self._before:
            self.steps.append((tokens, now - self._last))
        self._last, self._before = now, self._compiled

    def close(self) -> None:
        """Listen no more."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def rate(self) -> float | None:
        """Tokens a second: tokens a step over the median seconds of one; None: every step compiled."""
        if not self.steps:
            return None
        tokens, seconds = zip(*self.steps, strict=True)
        return statistics.mean(tokens) / max(statistics.median(seconds), 1e-9)


def with_positions(model: Model, positions: int) -> Model:
    """The same model for sequences longer than its config allows, for measurements of work alone."""
    if positions <= model.config.max_position_embeddings:
        return model
    cfg = model.config.replace(max_position_embeddings=positions)
    return Model(cfg, model.params, numerics=model.numerics, engram=model.engram, tokenizer=model.tokenizer)


def cache_bytes(model: Model, tokens: int) -> int:
    """Bytes of the global cache of a sequence."""
    return round(nbytes_per_token(model.config, model.numerics) * tokens)


def memory_bytes() -> int:
    """Bytes of memory of the default device; of a CPU, the machine's."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def measure_context(
    model: Model, tokens: int, decoded: int = 64, seed: int = 0, on_phase: Callable[[str], None] | None = None
) -> ContextCost:
    """Prefill `tokens` random tokens and decode `decoded` more, everything compiled before; `on_phase` is told what
    begins. Raises ValueError where the model has no room for them, or the device has not for their cache."""
    if tokens < 1 or decoded < 1:
        raise ValueError(f"tokens, decoded: {tokens}, {decoded} are not both at least 1")
    needed, held = cache_bytes(model, tokens + decoded), memory_bytes()
    if needed > held:
        raise ValueError(f"tokens: the cache of {tokens + decoded} takes {needed:,} bytes, the device has {held:,}")
    told = on_phase or (lambda phase: None)
    told("compiling")
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, tokens + decoded))
    for length in (min(tokens, 512), tokens % 512):  # the buckets that a prefill of so many tokens uses
        if length:
            cache = model.prefill([ids[0, :length]], model.init_cache(1, tokens + decoded)).cache
            jax.block_until_ready(model.step(ids[:, :1], cache).logits)
    told("prefill")
    begin = time.perf_counter()
    logits, cache, _ = jax.block_until_ready(model.prefill([ids[0, :tokens]], model.init_cache(1, tokens + decoded)))
    middle = time.perf_counter()
    told("decoding")
    for position in range(tokens, tokens + decoded):
        logits, cache, _ = model.step(ids[:, position : position + 1], cache)
    jax.block_until_ready(logits)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    prefill, decode = middle - begin, (end - middle) / decoded
    return ContextCost(tokens=tokens, prefill=prefill, decode=decode, cache=cache_bytes(model, tokens), peak=peak)


def measure_costs(
    model: Model, batch: int, repeats: int, on_cost: Callable[[str, float], None] | None = None
) -> CostTable:
    """Time verification of 1 .. K drafts a row, and drafting: median seconds of compiled programs on this machine.
    `on_cost` gets each as it is known: "drafting", or the number of tokens that a step verifies."""
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
    told = on_cost or (lambda what, seconds: None)
    told("drafting", drafting)
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
        told(str(batch * (1 + width)), verifying[-1])
    return CostTable(tuple(batch * (1 + w) for w in range(1, cfg.dspark_block_size + 1)), tuple(verifying), drafting)
