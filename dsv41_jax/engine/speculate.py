"""Generation with drafts: every step verifies what the drafter guessed and drafts again (DSpark, arXiv 2607.05147).

Rows of a batch accept different numbers of drafts in the same compiled step. What fails is taken back by length alone.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.engine.generate import OnStep, OnToken, Rows, Sampling, Start, sample
from dsv41_jax.engine.schedule import CostTable, allocate, budget, survival
from dsv41_jax.engine.steps import Steps
from dsv41_jax.nn.cache import Cache


class Speculation:
    """A model, a verification rule (greedy, standard, block) and, for adaptive verification, a cost table."""

    def __init__(self, model: Steps, method: str, cost: CostTable | None = None, on_step: OnStep | None = None):
        self.model, self.method, self.cost, self.on_step = model, method, cost, on_step

    def offer(self, current: np.ndarray, stale: np.ndarray, most: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Drafts to verify for each row, at most `most`: all of them, or what pays by the cost table. The budget comes
        from `stale` survivals, of the step before; `current` ones only rank."""
        if self.cost is None:
            return most
        usable = np.arange(current.shape[1]) < most[:, None]
        total = budget(np.where(usable, stale, 0.0)[alive], self.cost)
        return np.minimum(allocate(np.where(usable, current, -1.0), total), most)

    def generate(
        self,
        start: Start,
        count: int,
        sampling: Sampling,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        """As `generate.generate`."""
        model, pad = self.model, self.model.config.pad_token_id
        rows = Rows(count, sampling, on_token)
        if not rows.alive.any():
            return rows.tokens
        key, greedy = jax.random.key(sampling.seed), self.method == "greedy"
        warmth, top_p = jnp.float32(sampling.temperature or 1.0), jnp.float32(sampling.top_p)
        logits, cache = start()
        token = np.asarray(sample(logits, key, 0, warmth, top_p, greedy=greedy))
        for row, first in enumerate(token.tolist()):
            rows.add(row, first)
        leaves, number = model.programs.leaves, 1
        drafts = model.programs.draft(leaves, cache, token, key, number, warmth, top_p, greedy=greedy)
        stale = np.ones(drafts.ids.shape)  # a new request counts as certain
        while rows.alive.any():
            number += 1
            left = np.array([rows.left(row) - 1 for row in range(count)])
            most = np.where(rows.alive, np.clip(left, 0, drafts.ids.shape[1]), 0)
            current = survival(np.asarray(drafts.confidence))
            offered = self.offer(current, stale, most, rows.alive).astype(np.int32)
            # One width, so one compilation; only a cost table makes narrower steps worth their own.
            width = drafts.ids.shape[1] if self.cost is None else max(1, int(offered.max()))
            guesses = np.asarray(drafts.ids)[:, :width]
            tokens = np.concatenate([np.where(rows.alive, token, pad)[:, None], guesses], axis=1).astype(np.int32)
            memory, cache = model.engram_rows(tokens, np.where(rows.alive, 1 + offered, 0), cache)
            accepted, token, drafts, cache = model.programs.speculate(
                leaves,
                tokens,
                drafts.logits,
                offered,
                rows.alive,
                memory,
                cache,
                key,
                number,
                warmth,
                top_p,
                method=self.method,
            )
            stands, token, stale = np.asarray(accepted), np.asarray(token), current
            if self.on_step is not None:
                self.on_step(offered[rows.alive], stands[rows.alive])
            for row in np.flatnonzero(rows.alive).tolist():
                for new in (*guesses[row, : stands[row]].tolist(), token[row].item()):
                    rows.add(row, new)
        return rows.tokens


def measure_costs(model: Steps, batch: int, repeats: int) -> CostTable:
    """Time verification of 1 .. K drafts a row, and drafting: median seconds of compiled programs on this machine."""
    if batch < 1 or repeats < 1:
        raise ValueError(f"batch, repeats: {batch}, {repeats} are not both at least 1")
    cfg, programs = model.config, model.programs
    if not cfg.num_nextn_predict_layers:
        raise ValueError("profile: this model has no draft stages (num_nextn_predict_layers 0)")
    key, one, token = jax.random.key(0), jnp.float32(1), np.zeros(batch, np.int32)
    prompt = np.full((batch, cfg.sliding_window), cfg.bos_token_id)

    def fresh() -> Cache:
        return model.step(prompt, model.init_cache(batch, 2 * cfg.sliding_window + 64))[1]

    def median(run: Callable[[], object]) -> float:
        run()  # compiles
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    cache = fresh()
    drafting = median(lambda: programs.draft(programs.leaves, cache, token, key, 0, one, one, greedy=True))
    drafts = programs.draft(programs.leaves, cache, token, key, 0, one, one, greedy=True)
    verifying = []
    for width in range(1, cfg.dspark_block_size + 1):
        tokens = np.zeros((batch, 1 + width), np.int32)
        offered = np.full(batch, width, np.int32)
        state = fresh()
        memory, state = model.engram_rows(tokens, 1 + offered, state)

        def verify(tokens=tokens, offered=offered, memory=memory) -> object:
            nonlocal state
            *found, state = programs.speculate(
                programs.leaves,
                tokens,
                drafts.logits,
                offered,
                np.ones(batch, bool),
                memory,
                state.rewind(jnp.full((batch,), cfg.sliding_window, jnp.int32)),
                key,
                0,
                one,
                one,
                method="greedy",
            )
            return found

        verifying.append(max(median(verify) - drafting, 1e-9))
    return CostTable(tuple(batch * (1 + w) for w in range(1, cfg.dspark_block_size + 1)), tuple(verifying), drafting)
