"""A call as the host makes it: tokens checked, cut into chunks, each padded to one of a few widths.

    prompt of 700 tokens:  chunk 0 is tokens 0 .. 511 in a bucket of 512, chunk 1 tokens 512 .. 699 in one of 512
    one decoded token:     a bucket of 1

so no prompt length and no new token compiles anything once the buckets that a batch size needs are compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int32

from dsv41_jax.nn.cache import Cache
from dsv41_jax.nn.transformer import Call

BUCKETS = (1, 16, 128, 512)
Tokens = ArrayLike | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Chunk:
    """What one run is given: a call padded to its bucket, with `count` live tokens of each row, of which `live` columns
    are no padding of the bucket, and the ring of ids for Engram behind it."""

    call: Call
    count: Int32[np.ndarray, " B"]
    live: int
    history: Int32[np.ndarray, "B ring"]


def bucket(tokens: int) -> int:
    """The smallest bucket that holds so many tokens, or their number where none does."""
    return next((b for b in BUCKETS if b >= tokens), tokens)


def cuts(tokens: int) -> list[tuple[int, int]]:
    """(first, bucket) of the chunks that cover `tokens`: full largest buckets, then the least that holds the rest."""
    found, first = [], 0
    while first < tokens:
        found.append((first, bucket(min(tokens - first, BUCKETS[-1]))))
        first += found[-1][1]
    return found


def ahead[Item, Made](make: Callable[[Item], Made], items: Sequence[Item], *, thread: bool) -> Iterator[Made]:
    """make(item) for each item in turn, with `thread` made one ahead of the caller, who works on the last one."""
    if not thread or len(items) == 1:
        yield from map(make, items)
        return
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(make, items[0])
        for item in items[1:]:
            ready = coming.result()
            coming = pool.submit(make, item)
            yield ready
        yield coming.result()


def padded(prompts: Sequence[Sequence[int] | np.ndarray], pad: int) -> Int32[np.ndarray, "B T"]:
    """Prompts of any lengths in one array, padded on the right."""
    array = np.full((len(prompts), max(map(len, prompts))), pad, np.int32)
    for row, prompt in enumerate(prompts):
        array[row, : len(prompt)] = prompt
    return array


def checked_prompt(prompt: object, number: int) -> list[int]:
    """The token ids of prompt `number`. Raises ValueError unless it is a sequence of at least one integer."""
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, str | bytes | bytearray):
        raise ValueError(f"prompts: number {number} is a {type(prompt).__name__}, neither text nor token ids")
    if len(prompt) == 0:
        raise ValueError(f"prompts: number {number} is empty")
    for one in prompt:
        if not isinstance(one, int | np.integer) or isinstance(one, bool):
            raise ValueError(f"prompts: number {number} holds {one!r}, which is no token id")
    return [int(one) for one in prompt]


def checked_tokens(tokens: Tokens, vocabulary: int) -> Int32[np.ndarray, "B T"]:
    """Token ids as an array. Raises ValueError unless they are integers [B, T] in 0 .. vocabulary - 1."""
    array = np.asarray(tokens)
    if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"tokens: {array.dtype} of shape {array.shape} are not integers [B, T] with B, T >= 1")
    bad = array[(array < 0) | (array >= vocabulary)]
    if bad.size:
        raise ValueError(f"tokens: id {bad[0]} is outside 0..{vocabulary - 1}")
    return array.astype(np.int32)


def checked_lengths(
    lengths: ArrayLike | Sequence[int] | None, batch: int, width: int, minimum: int = 0
) -> Int32[np.ndarray, " B"]:
    """How many tokens of each row are live (None: all). Raises ValueError for one outside minimum .. width."""
    found = np.full(batch, width) if lengths is None else np.asarray(lengths)
    whole = np.issubdtype(found.dtype, np.integer) and found.shape == (batch,)
    if not whole or (found < minimum).any() or (found > width).any():
        raise ValueError(f"lengths: {found.tolist()} is not one number in {minimum}..{width} for each of {batch} rows")
    return found.astype(np.int32)


def check_room(cache: Cache, count: Int32[np.ndarray, " B"]) -> None:
    """Raise ValueError when a cache was consumed, has another batch, or no room for `count` more tokens of each row."""
    if cache.layers[0].window.is_deleted():
        raise ValueError("cache: was consumed by an earlier step; use the cache which that step returned")
    if cache.length.shape != count.shape:
        raise ValueError(f"cache: holds {cache.length.shape[0]} rows, tokens have {count.shape[0]}")
    length = np.asarray(cache.length)
    full = np.flatnonzero(length + count > cache.capacity)
    if full.size:
        row = int(full[0])
        raise ValueError(
            f"cache: row {row} holds {length[row]} tokens, {count[row]} more exceed capacity {cache.capacity}"
        )
