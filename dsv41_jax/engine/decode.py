"""The decoding loop: a first token from the prefill, then steps that each add one token or several to every row.

A step is a function, or an object that is one. `Plain` runs the newest token of each row and samples behind it.
`Drafted` verifies what the drafter guessed and drafts again; rows of a batch accept different numbers of drafts in the
same compiled step, and what fails is taken back by length alone (arXiv 2607.05147).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from dsv41_jax.engine.engine import Engine
from dsv41_jax.engine.sampling import Draws, Sampling, sample
from dsv41_jax.engine.schedule import CostTable, allocate, budget, survival
from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.dspark import Drafts
from dsv41_jax.nn.transformer import Output

OnToken = Callable[[int, int], None]
OnStep = Callable[[np.ndarray, np.ndarray], None]


class Continuations:
    """The new tokens of each row of a batch, and which rows go on."""

    def __init__(self, batch: int, sampling: Sampling, on_token: OnToken | None):
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.alive = np.full(batch, sampling.max_new_tokens > 0)
        self._sampling, self._on_token = sampling, on_token

    def add(self, row: int, token: int) -> None:
        """Append to a living row; EOS (kept) and the limit end it."""
        if not self.alive[row]:
            return
        self.tokens[row].append(token)
        if self._on_token is not None:
            self._on_token(row, token)
        self.alive[row] = token != self._sampling.eos and self.left(row) > 0

    def left(self, row: int) -> int:
        """Tokens that a row may still add."""
        return self._sampling.max_new_tokens - len(self.tokens[row])


class Added(NamedTuple):
    """What a step adds to each row, and the cache behind all but the last of it."""

    tokens: list[list[int]]
    cache: Cache


# Runs each living row's newest token, which the cache has not seen, with the draws of a step; consumes the cache.
Step = Callable[[Int32[np.ndarray, " B"], Continuations, Cache, Draws], Added]


def decode(
    engine: Engine,
    start: Callable[[], Output],
    batch: int,
    sampling: Sampling,
    step: Step | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """New token ids of `batch` rows, up to and including EOS. `start()` prefills: logits [B, V] and the cache.

    `on_token(row, id)` is called for every new token as soon as it is known, rows in order within a step. The draws of
    step n are those of its number: a seed gives the same tokens whatever else runs.
    """
    rows = Continuations(batch, sampling, on_token)
    if not rows.alive.any():
        return rows.tokens
    step, draws = Plain(engine) if step is None else step, Draws.first(sampling)
    logits, cache, _ = start()
    token = np.asarray(sample(logits, draws))
    added = Added([[first] for first in token.tolist()], cache)
    while True:
        for row in np.flatnonzero(rows.alive).tolist():
            for new in added.tokens[row]:
                rows.add(row, new)
        if not rows.alive.any():
            return rows.tokens
        token = np.array([new[-1] for new in added.tokens], np.int32)
        token = np.where(rows.alive, token, engine.config.pad_token_id).astype(np.int32)
        draws = draws.next()
        added = step(token, rows, added.cache, draws)


class Plain:
    """One token a step."""

    def __init__(self, engine: Engine):
        self.engine, self._programs = engine, engine.programs

    def __call__(self, token: Int32[np.ndarray, " B"], rows: Continuations, cache: Cache, draws: Draws) -> Added:
        """A `Step`."""
        count = rows.alive.astype(np.int32)
        chunk = self.engine.chunk(token[:, None], count, np.asarray(cache.length), np.asarray(cache.history))
        logits, cache, _ = self.engine.run(chunk, cache, last_only=True, programs=self._programs)
        return Added([[new] for new in np.asarray(sample(logits, draws)).tolist()], cache)


class Drafted:
    """Verified drafts and one token more a step. `method` is greedy, standard or block; with a `cost` table each step
    verifies only as many drafts as pay. `on_step(offered, accepted)` gets the counts of the living rows."""

    def __init__(self, engine: Engine, method: str, cost: CostTable | None = None, on_step: OnStep | None = None):
        self.engine, self.method, self.cost, self.on_step = engine, method, cost, on_step
        self._programs = engine.programs
        self._drafts: Drafts | None = None
        self._stale: np.ndarray | None = None  # survivals of the step before

    def offer(
        self,
        current: Float[np.ndarray, "B K"],
        stale: Float[np.ndarray, "B K"],
        limit: Int[np.ndarray, " B"],
        alive: Bool[np.ndarray, " B"],
    ) -> Int[np.ndarray, " B"]:
        """Drafts to verify for each row, at most `limit`: all of them, or what pays by the cost table. The budget comes
        from `stale` survivals, of the step before; `current` ones only rank."""
        if self.cost is None:
            return limit
        usable = np.arange(current.shape[1]) < limit[:, None]
        total = budget(np.where(usable, stale, 0.0)[alive], self.cost)
        return np.minimum(allocate(np.where(usable, current, -1.0), total), limit)

    def __call__(self, token: Int32[np.ndarray, " B"], rows: Continuations, cache: Cache, draws: Draws) -> Added:
        """A `Step`. The first one drafts, then verifies."""
        if self._drafts is None:
            self._drafts = self.engine.draft(token, cache, draws)
            self._stale = np.ones(self._drafts.ids.shape)  # a new request counts as certain
        draws = draws.next()  # drafts of step n are verified with the draws of step n + 1
        drafts, current = self._drafts, survival(np.asarray(self._drafts.confidence))
        limit = np.array([rows.left(row) - 1 for row in range(len(token))])
        limit = np.where(rows.alive, np.clip(limit, 0, drafts.ids.shape[1]), 0)
        offered = self.offer(current, self._stale, limit, rows.alive).astype(np.int32)
        # One width, so one compilation; only a cost table makes narrower steps worth their own.
        width = drafts.ids.shape[1] if self.cost is None else max(1, int(offered.max()))
        guesses = np.asarray(drafts.ids)[:, :width]
        tokens = np.concatenate([token[:, None], guesses], axis=1).astype(np.int32)
        found = self.engine.verify(
            tokens, offered, rows.alive, drafts.logits, cache, draws, method=self.method, programs=self._programs
        )
        accepted, self._drafts = np.asarray(found.accepted), found.drafts
        self._stale = current
        if self.on_step is not None:
            self.on_step(offered[rows.alive], accepted[rows.alive])
        last = np.asarray(found.token).tolist()
        return Added([[*guesses[row, :n].tolist(), last[row]] for row, n in enumerate(accepted)], found.cache)
