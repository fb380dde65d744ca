"""Generation: prefill in chunks, then one token a step for every unfinished row.

The stepping function pads each chunk to one of `BUCKETS` lengths, so that no prompt length and no new token compiles
anything once the buckets that a batch size needs are compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Key

from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.vision import ImageInput

BUCKETS = (1, 16, 128, 512)

Read = Callable[[np.ndarray, np.ndarray, np.ndarray | None], Any]
Step = Callable[["Piece", Cache], tuple[Array, Cache]]
Start = Callable[[], tuple[Array, Cache]]
OnToken = Callable[[int, int], None]
OnStep = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when a row ends."""

    max_new_tokens: int
    eos: int
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    seed: int = 0


def bucket(tokens: int) -> int:
    """The smallest bucket that holds so many tokens, or their number where none does."""
    return next((b for b in BUCKETS if b >= tokens), tokens)


def chunks(tokens: int) -> list[tuple[int, int]]:
    """(first, bucket) of the calls that cover `tokens`: full largest buckets, then the smallest that holds the rest."""
    cover, first = [], 0
    while first < tokens:
        cover.append((first, bucket(min(tokens - first, BUCKETS[-1]))))
        first += cover[-1][1]
    return cover


def nucleus(logits: Float32[Array, "B V"], top_p: float | int | Float32[Array, ""]) -> Float32[Array, "B V"]:
    """Logits with -inf outside the smallest set of most probable tokens whose probability reaches top_p."""
    order = jnp.argsort(-logits, axis=-1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < top_p
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, logits, -jnp.inf)


def row_keys(key: Key[Array, ""], rows: int, step: int | Int32[Array, ""]) -> Key[Array, " B"]:
    """A key for each row of a step: a row's draws do not depend on the rows beside it."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(jnp.arange(rows))


@partial(jax.jit, static_argnames="greedy")
def sample(
    logits: Float32[Array, "B V"],
    key: Key[Array, ""],
    step: int | Int32[Array, ""],
    temperature: float | int | Float32[Array, ""],
    top_p: float | int | Float32[Array, ""],
    *,
    greedy: bool,
) -> Int32[Array, " B"]:
    """One token a row: the arg max (the lower id of equals), or a draw from softmax(logits / temperature) within
    top_p. A row's draw depends on the key, the step and the row number, not on the other rows."""
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = row_keys(key, logits.shape[0], step)
    noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:]))(keys)
    return jnp.argmax(nucleus(logits / temperature, top_p) + noise, axis=-1).astype(jnp.int32)


def check_sampling(max_new_tokens: int, temperature: float | int, top_p: float | int) -> None:
    """Raise ValueError unless max_new_tokens >= 0, temperature >= 0 and finite, 0 < top_p <= 1."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is negative")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: {temperature} is not a finite number of at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: {top_p} is not in (0, 1]")


def padded(prompts: Sequence[Sequence[int] | np.ndarray], pad: int) -> Int32[np.ndarray, "B T"]:
    """Prompts of any lengths in one array, padded on the right."""
    rows = np.full((len(prompts), max(map(len, prompts))), pad, np.int32)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = prompt
    return rows


@dataclass(frozen=True)
class Piece:
    """One call of a longer run of tokens, padded to its bucket: tokens [B, bucket], of which `live` columns are not
    padding of the bucket and `count` [B] are live in each row. `memory` is what `read` gave for it."""

    first: int
    live: int
    tokens: Int32[np.ndarray, "B bucket"]
    count: Int32[np.ndarray, " B"]
    image: ImageInput | None
    memory: Any


def pieces(
    tokens: Int32[np.ndarray, "B T"],
    lengths: np.ndarray,
    pad: int,
    image: ImageInput | None = None,
    read: Read | None = None,
    *,
    ahead: bool = True,
    whole: bool = False,
) -> Iterator[Piece]:
    """The calls that cover `tokens`, of which each row's first `lengths` are live; `whole`: a single call.

    `read(tokens, count, mask)` looks up what the host holds for a piece. It depends on tokens alone, so the next
    piece's is read in a thread while the caller's device works on this one, unless `ahead` is off.
    """

    def piece(cover: tuple[int, int], memory: Any) -> Piece:
        first, width = cover
        live = min(width, tokens.shape[1] - first)
        rows = np.pad(tokens[:, first : first + width], ((0, 0), (0, width - live)), constant_values=pad)
        part = None if image is None else image.part(first, first + width)
        return Piece(first, live, rows, np.clip(lengths - first, 0, width).astype(np.int32), part, memory)

    def look_up(one: Piece) -> Piece:
        mask = None if one.image is None else np.asarray(one.image.mask)
        return replace(one, memory=read(one.tokens, one.count, mask))

    covers = [(0, bucket(tokens.shape[1]))] if whole else chunks(tokens.shape[1])
    plain = (piece(cover, None) for cover in covers)
    if read is None or not ahead or len(covers) == 1:
        yield from plain if read is None else map(look_up, plain)
        return
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(look_up, next(plain))
        for following in plain:
            ready = coming.result()
            coming = thread.submit(look_up, following)
            yield ready
        yield coming.result()


def prefill(step: Step, parts: Iterable[Piece], lengths: np.ndarray, cache: Cache) -> tuple[Array, Cache]:
    """(logits [B, V] after each row's last live token, cache)."""
    newest: Array | None = None
    for part in parts:
        logits, cache = step(part, cache)
        done = (lengths > part.first)[:, None]
        newest = logits if newest is None else jnp.where(done, logits, newest)
    assert newest is not None
    return newest, cache


class Rows:
    """The new tokens of each row, and which rows go on."""

    def __init__(self, count: int, sampling: Sampling, on_token: OnToken | None):
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.alive = np.full(count, sampling.max_new_tokens > 0)
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


def generate(
    step: Callable[[np.ndarray, Cache, np.ndarray], tuple[Array, Cache]],
    start: Start,
    count: int,
    pad: int,
    sampling: Sampling,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """New token ids of `count` rows, up to and including EOS. `start()` prefills; `step(tokens [B, 1], cache, count)`
    gives the logits behind the living rows' new tokens.

    `on_token(row, id)` is called for every new token as soon as it is known, rows in order within a step.
    """
    rows = Rows(count, sampling, on_token)
    if not rows.alive.any():
        return rows.tokens
    logits, cache = start()
    key, greedy = jax.random.key(sampling.seed), sampling.temperature == 0
    number = 0
    while True:
        drawn = np.asarray(sample(logits, key, number, sampling.temperature or 1.0, sampling.top_p, greedy=greedy))
        for row in np.flatnonzero(rows.alive):
            rows.add(int(row), int(drawn[row]))
        if not rows.alive.any():
            return rows.tokens
        tokens = np.where(rows.alive, drawn, pad)[:, None].astype(np.int32)
        logits, cache = step(tokens, cache, rows.alive.astype(np.int32))
        number += 1
