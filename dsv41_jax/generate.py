"""Generation: prefill in chunks, then one token a step for every unfinished row (facts 6).

The stepping function pads each chunk to one of `BUCKETS` lengths, so that no prompt length and no new token compiles
anything once the buckets that a batch size needs are compiled.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Key

from dsv41_jax.cache import Cache

BUCKETS = (1, 16, 128, 512)

Step = Callable[[np.ndarray, Cache, np.ndarray], tuple[Array, Cache]]
OnToken = Callable[[int, int], None]


def chunks(tokens: int) -> list[tuple[int, int]]:
    """(first, bucket) of the calls that cover `tokens`: full largest buckets, then the smallest that holds the rest."""
    cover, first = [], 0
    while first < tokens:
        bucket = next((b for b in BUCKETS if b >= tokens - first), BUCKETS[-1])
        cover.append((first, bucket))
        first += bucket
    return cover


def nucleus(logits: Float32[Array, "B V"], top_p: float | Float32[Array, ""]) -> Float32[Array, "B V"]:
    """Logits with -inf outside the smallest set of most probable tokens whose probability reaches top_p."""
    order = jnp.argsort(-logits, axis=-1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < top_p
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, logits, -jnp.inf)


@partial(jax.jit, static_argnames="greedy")
def sample(
    logits: Float32[Array, "B V"],
    key: Key[Array, ""],
    step: int | Int32[Array, ""],
    temperature: float | Float32[Array, ""],
    top_p: float | Float32[Array, ""],
    *,
    greedy: bool,
) -> Int32[Array, " B"]:
    """One token a row: the arg max (the lower id of equals), or a draw from softmax(logits / temperature) within
    top_p. A row's draw depends on the key, the step and the row number, not on the other rows."""
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(jnp.arange(logits.shape[0]))
    noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:]))(drawn)
    return jnp.argmax(nucleus(logits / temperature, top_p) + noise, axis=-1).astype(jnp.int32)


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise ValueError unless max_new_tokens >= 0, temperature >= 0 and finite, 0 < top_p <= 1."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is negative")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: {temperature} is not a finite number of at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: {top_p} is not in (0, 1]")


def prefill(step: Step, prompts: Sequence[Sequence[int]], cache: Cache, pad: int) -> tuple[Array, Cache]:
    """(logits [B, V] after each row's last prompt token, cache). Rows may differ in length; none is empty."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.full((len(prompts), int(lengths.max())), pad, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    newest: Array | None = None
    for first, bucket in chunks(padded.shape[1]):
        logits, cache = step(padded[:, first : first + bucket], cache, np.clip(lengths - first, 0, bucket))
        done = (lengths > first)[:, None]
        newest = logits if newest is None else jnp.where(done, logits, newest)
    assert newest is not None
    return newest, cache


def generate(
    step: Step,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    max_new_tokens: int,
    *,
    eos: int,
    pad: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """New token ids of each row, up to and including EOS. `step(tokens, cache, count)` gives last-position logits.

    `on_token(row, id)` is called for every new token as soon as it is known, rows in order within a step.
    """
    check_sampling(max_new_tokens, temperature, top_p)
    rows: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens == 0:
        return rows
    logits, cache = prefill(step, prompts, cache, pad)
    key = jax.random.key(seed)
    alive = np.ones(len(prompts), bool)
    for number in range(max_new_tokens):
        warmth = temperature or 1.0
        drawn = np.asarray(sample(logits, key, number, warmth, top_p, greedy=temperature == 0))
        for row in np.flatnonzero(alive):
            rows[row].append(int(drawn[row]))
            if on_token is not None:
                on_token(int(row), int(drawn[row]))
        alive &= drawn != eos
        if number + 1 == max_new_tokens or not alive.any():
            break
        logits, cache = step(np.where(alive, drawn, pad)[:, None].astype(np.int32), cache, alive.astype(np.int32))
    return rows
