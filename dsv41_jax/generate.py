"""Generation: prefill in chunks, then one token a step for every unfinished row (facts 6).

The stepping function pads each chunk to one of `BUCKETS` lengths, so that no prompt length and no new token compiles
anything once the buckets that a batch size needs are compiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Key

from dsv41_jax.cache import Cache
from dsv41_jax.vision import ImageInput

BUCKETS = (1, 16, 128, 512)

Step = Callable[[np.ndarray, Cache, np.ndarray, ImageInput | None], tuple[Array, Cache]]
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


def chunks(tokens: int) -> list[tuple[int, int]]:
    """(first, bucket) of the calls that cover `tokens`: full largest buckets, then the smallest that holds the rest."""
    cover, first = [], 0
    while first < tokens:
        bucket = next((b for b in BUCKETS if b >= tokens - first), BUCKETS[-1])
        cover.append((first, bucket))
        first += bucket
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


def padded(prompts: Sequence[Sequence[int]], pad: int) -> Int32[np.ndarray, "B T"]:
    """Prompts of any lengths in one array, padded on the right."""
    rows = np.full((len(prompts), max(map(len, prompts))), pad, np.int32)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = prompt
    return rows


def prefill(
    step: Step, prompts: Sequence[Sequence[int]], cache: Cache, pad: int, image: ImageInput | None = None
) -> tuple[Array, Cache]:
    """(logits [B, V] after each row's last prompt token, cache). Rows may differ in length; none is empty."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = padded(prompts, pad)
    newest: Array | None = None
    for first, bucket in chunks(tokens.shape[1]):
        part = None if image is None else image.part(first, first + bucket)
        logits, cache = step(tokens[:, first : first + bucket], cache, np.clip(lengths - first, 0, bucket), part)
        done = (lengths > first)[:, None]
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
    step: Step,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    pad: int,
    sampling: Sampling,
    on_token: OnToken | None = None,
    image: ImageInput | None = None,
) -> list[list[int]]:
    """New token ids of each row, up to and including EOS. `step(tokens, cache, count, image)` gives the logits behind
    each row's last live token; `image` holds the image spans of the prompts.

    `on_token(row, id)` is called for every new token as soon as it is known, rows in order within a step.
    """
    rows = Rows(len(prompts), sampling, on_token)
    if not rows.alive.any():
        return rows.tokens
    logits, cache = prefill(step, prompts, cache, pad, image)
    key, greedy = jax.random.key(sampling.seed), sampling.temperature == 0
    number = 0
    while True:
        drawn = np.asarray(sample(logits, key, number, sampling.temperature or 1.0, sampling.top_p, greedy=greedy))
        for row in np.flatnonzero(rows.alive):
            rows.add(int(row), int(drawn[row]))
        if not rows.alive.any():
            return rows.tokens
        tokens = np.where(rows.alive, drawn, pad)[:, None].astype(np.int32)
        logits, cache = step(tokens, cache, rows.alive.astype(np.int32), None)
        number += 1
