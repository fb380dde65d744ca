"""Which table rows a token reads: its last tokens, hashed (paper 2.4.2; config keys `engram_*`).

    id_t       compressed id of token t: equal for tokens whose normalized text is equal
    r_n        XOR over s < n of id_{t-s} * multiplier_s                               64-bit integers
    row        r_n mod prime[n, head] + offset[n, head]                                n = 2.., heads of each

Ids before the start, and at or behind an image token, count as the pad token's; once one look-back is blocked all
longer ones are. Products exceed 2^62, and JAX has 32-bit integers by default: hashing is NumPy on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Protocol, runtime_checkable

import numpy as np
from einops import rearrange
from jaxtyping import Int32, Int64

from dsv41_jax.config import Config, ConfigError


@runtime_checkable
class Encoding(Protocol):
    """A text's tokens."""

    @property
    def ids(self) -> list[int]:
        """Their numbers."""


@runtime_checkable
class Tokenizer(Protocol):
    """What this library uses of a `tokenizers.Tokenizer`; that package is imported once there is a file to read."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Encoding:
        """An object whose `ids` are the tokens of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""

    def id_to_token(self, id: int) -> str | None:
        """The vocabulary's string for a token."""

    def token_to_id(self, token: str) -> int | None:
        """The number of one of the vocabulary's strings."""

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """How many tokens there are."""

    def to_str(self) -> str:
        """The content of its file."""


NONE = -1  # in a history: no token there, or one at or behind an image


# No composite below 3.3e24 passes for all of them (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(n: int) -> bool:
    """Whether a number below 3.3e24 is prime, by Miller and Rabin's test: trial division of numbers that a file gives
    takes hours."""
    if n < 2 or any(n % p == 0 for p in _WITNESSES):
        return n in _WITNESSES
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    odd = (n - 1) >> twos

    def passes(witness: int) -> bool:
        x = pow(witness, odd, n)
        if x == 1:
            return True
        for _ in range(twos):  # the square root of 1 that comes before it must be -1
            if x == n - 1:
                return True
            x = x * x % n
        return False

    return all(passes(witness) for witness in _WITNESSES)


@dataclass(frozen=True)
class Layout:
    """Where the hashes of one Engram layer point: `multipliers` [n], `primes` and `offsets` [(n - 1) * heads]."""

    multipliers: Int64[np.ndarray, " n"]
    primes: Int64[np.ndarray, " columns"]
    offsets: Int64[np.ndarray, " columns"]

    @property
    def rows(self) -> int:
        return int(self.primes.sum())


def multipliers(layer: int, count: int, vocabulary: int) -> Int64[np.ndarray, " n"]:
    """Odd draws of numpy's default_rng(10007 * layer), small enough that a product with an id stays below 2^63."""
    limit = np.iinfo(np.int64).max // vocabulary // 2
    return np.random.default_rng(10007 * layer).integers(0, limit, count, np.int64) * 2 + 1


@lru_cache(maxsize=8)
def layouts(cfg: Config) -> tuple[Layout, ...]:
    """The layout of each Engram layer, derived and checked against engram_num_embeddings.

    Layer by layer, each n-gram size takes for each of its heads the next prime from engram_vocab_size on that nobody
    has taken: together, consecutive ones.
    """
    primes = filter(is_prime, count(cfg.engram_vocab_size))
    found = []
    for slot, layer in enumerate(cfg.engram_layer_ids):
        array = np.fromiter(islice(primes, cfg.engram_columns), np.int64, cfg.engram_columns)
        odd = multipliers(layer, cfg.engram_max_ngram_size, cfg.engram_compressed_vocab_size)
        layout = Layout(odd, array, np.cumsum(array) - array)
        if layout.rows != cfg.engram_num_embeddings[slot]:
            given = f"text_config.engram_num_embeddings: {cfg.engram_num_embeddings[slot]} for layer {layer}"
            raise ConfigError(f"{given} is not {layout.rows}, the sum of its primes")
        found.append(layout)
    return tuple(found)


_LONE_SPACE = "\ue000"


def _normalizer() -> Callable[[str], str]:
    """What makes texts equal: compatible forms, accents, case and runs of white space."""
    from tokenizers import Regex, normalizers

    sequence = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    return sequence.normalize_str


def compressed_ids(tokenizer: Tokenizer, cfg: Config) -> Int32[np.ndarray, " V"]:
    """The compressed id of every token: tokens of equal normalized text share one, numbered by first appearance.

    A token that is part of a UTF-8 sequence counts by its vocabulary string, one whose text normalizes to nothing by
    its text. Raises ConfigError when the tokenizer does not have the config's vocabulary or number of ids.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size < cfg.vocab_size:
        raise ConfigError(f"text_config.vocab_size: {cfg.vocab_size} exceeds the tokenizer's {size} tokens")
    normalized = _normalizer()
    seen: dict[str, int] = {}
    ids = np.empty(cfg.vocab_size, np.int32)
    for token in range(cfg.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalized(text) or text
        ids[token] = seen.setdefault(key, len(seen))
    if len(seen) != cfg.engram_compressed_vocab_size:
        given = f"text_config.engram_compressed_vocab_size: {cfg.engram_compressed_vocab_size}"
        raise ConfigError(f"{given} is not {len(seen)}, the number of ids that the tokenizer gives")
    return ids


def look_back(
    ids: Int32[np.ndarray, "B T"], history: Int32[np.ndarray, "B past"], pad: int
) -> Int64[np.ndarray, "B T n"]:
    """id_{t-s} for s = 0..past. `ids` and `history` hold NONE for what may not be seen; blocked ones become `pad`."""
    past, tokens = history.shape[1], ids.shape[1]
    line = np.concatenate([history, ids], axis=1).astype(np.int64)
    back = np.stack([line[:, past - s : past - s + tokens] for s in range(past + 1)], axis=-1)
    blocked = np.logical_or.accumulate(back == NONE, axis=-1)
    return np.where(blocked, pad, back)


def hash_rows(back: Int64[np.ndarray, "B T n"], layout: Layout) -> Int64[np.ndarray, "B T columns"]:
    """Table rows of each position, 2-grams first, heads within each."""
    products = back * layout.multipliers
    rolling = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]
    primes, offsets = (
        rearrange(v, "(n heads) -> n heads", n=rolling.shape[-1]) for v in (layout.primes, layout.offsets)
    )
    return rearrange(rolling[..., None] % primes + offsets, "b t n heads -> b t (n heads)")
