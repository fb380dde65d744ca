"""What a sequence remembers: a pytree that goes into every step and comes out new (paper 3.2).

    window      ring of latent rows a layer, the last W and `spare` more; position p stands in slot p % rows
    main        compressed entries of a Full layer, entry j at row j, S = capacity / ratio rows
    index_keys  their index keys
    open_kv,    rings of a Full layer's last tokens, for its unfinished group (ratio - 1 rows and `spare` more, float32,
      open_gate before the gate's softmax; none at ratio 1)
    drafts      rings of the draft stages, written from what the drafter reads of each token
    history     ring of the last compressed token ids for Engram; -1: no token, or one at or behind an image
    length      tokens seen, for each row of the batch

`length` and `history` need no device: between calls they lie on the host, which knows them without asking.
Rows of a batch may have different lengths. A call of T tokens carries `count` live ones a row; the rest is padding on
the right, computes values that nobody reads and writes nothing. Rows of window, main and index keys are values or, with
the numerics `fast`, bytes (`numerics.Storage`).

Everything is found by position, so a sequence is taken back by lowering its `length` (`rewind`): entries past it are
dead, and the spare rows keep the last `spare` tokens from having overwritten anything that is still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from dsv41_jax.config import Config
from dsv41_jax.numerics import Numerics, Storage
from pallas_kernels.pack import pack, turned

HostOrDevice = Array | np.ndarray
LARGEST_BATCH = 1 << 20  # a larger number is a mistake, found before it fills the memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's state; only Full layers have more than the window."""

    window: Shaped[Array, "B W window_row"]
    main: Shaped[Array, "B S main_row"] | None = None
    index_keys: Shaped[Array, "B S index_row"] | None = None
    open_kv: Float32[Array, "B rest H"] | None = None
    open_gate: Float32[Array, "B rest H"] | None = None
    ratio: int = field(default=0, metadata={"static": True})  # tokens to an entry; 0: there are none


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """The state of a batch of sequences, of fixed `capacity` in tokens."""

    length: Int32[HostOrDevice, " B"]
    history: Int32[HostOrDevice, "B past"]
    layers: tuple[LayerCache, ...]
    drafts: tuple[Shaped[Array, "B W row"], ...]
    capacity: int = field(metadata={"static": True})

    def copy(self) -> Cache:
        """An independent copy: `Model.step` consumes the cache it is given, so copy before you fork."""
        return jax.tree.map(lambda leaf: leaf.copy(), self)

    def rewind(self, length: Int32[HostOrDevice, " B"]) -> Cache:
        """The cache as it was at `length`, at most `Config.spare` tokens back in each row (of one call, or decoded)."""
        return replace(self, length=length)

    def take(self, rows: Sequence[int] | np.ndarray | Array) -> Cache:
        """The cache of `rows` of this batch, in that order; rows may repeat."""
        batch, wanted = self.length.shape[0], np.asarray(rows)
        if ((wanted < 0) | (wanted >= batch)).any():
            raise ValueError(f"rows: {wanted.tolist()} are not all in 0..{batch - 1}")
        return jax.tree.map(lambda leaf: leaf[wanted], self)


def init_cache(cfg: Config, batch: int, capacity: int, numerics: Numerics) -> Cache:
    """Empty caches for `batch` sequences of at most `capacity` tokens; no two leaves share a buffer."""
    for name, value, limit in (("batch", batch, LARGEST_BATCH), ("capacity", capacity, cfg.max_position_embeddings)):
        if not 1 <= value <= limit:
            raise ValueError(f"{name}: {value} is not in 1..{limit}")

    def rows(count: int, storage: Storage, channels: int) -> Array:
        width, dtype = storage.row(channels, numerics.dtype)
        return jnp.zeros((batch, count, width), dtype)

    def ring() -> Array:
        return rows(cfg.sliding_window + cfg.spare, numerics.window, cfg.head_dim)

    def layer(ratio: int, owns_kv: bool) -> LayerCache:
        if not owns_kv:
            return LayerCache(window=ring())
        entries, rest = capacity // ratio, (batch, ratio - 1 + cfg.spare if ratio > 1 else 0, cfg.head_dim)
        return LayerCache(
            window=ring(),
            main=rows(entries, numerics.main, cfg.head_dim),
            index_keys=rows(entries, numerics.index, cfg.index_head_dim),
            open_kv=jnp.zeros(rest, jnp.float32),
            open_gate=jnp.zeros(rest, jnp.float32),
            ratio=ratio,
        )

    past = cfg.engram_max_ngram_size - 1 + cfg.spare if cfg.engram_layer_ids else 0
    return Cache(
        length=np.zeros((batch,), np.int32),
        history=np.full((batch, past), -1, np.int32),
        layers=tuple(layer(plan.ratio, plan.owns_kv) for plan in cfg.layers),
        drafts=tuple(ring() for _ in cfg.draft_stages),
        capacity=capacity,
    )


def nbytes_per_token(cfg: Config, numerics: Numerics) -> float:
    """Bytes of global cache (main entries and index keys) that a token adds: 890 for the released config packed."""

    def nbytes(storage: Storage, channels: int) -> int:
        width, dtype = storage.row(channels, numerics.dtype)
        return width * dtype.itemsize

    entry = nbytes(numerics.main, cfg.head_dim) + nbytes(numerics.index, cfg.index_head_dim)
    return sum(entry / plan.ratio for plan in cfg.layers if plan.owns_kv)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Span:
    """The tokens of one call: row b holds positions start[b] .. start[b] + count[b] - 1, then padding.

    A `replay` runs tokens again whose compressed entries stand in the caches: it writes none, and its windows begin at
    `start`, since the rows before it are gone (paper 3.2.2)."""

    start: Int32[Array, " B"]
    count: Int32[Array, " B"]
    positions: Int32[Array, "B T"]
    replay: bool = field(default=False, metadata={"static": True})

    @classmethod
    def after(
        cls, length: Int32[HostOrDevice, " B"], count: Int32[HostOrDevice, " B"], tokens: int, *, replay: bool = False
    ) -> Span:
        """The `count` tokens that follow `length` earlier ones, in arrays padded to `tokens`."""
        start, count = jnp.asarray(length), jnp.asarray(count)
        return cls(start, count, start[:, None] + jnp.arange(tokens, dtype=jnp.int32), replay)

    @property
    def end(self) -> Int32[Array, " B"]:
        return self.start + self.count


def stored(
    x: Float[Array, "B K H"],
    norm: Float[Array, " H"] | None,
    positions: Int32[Array, "B K"],
    freqs: Float32[np.ndarray, " pairs"],
    storage: Storage,
    *,
    eps: float,
    numerics: Numerics,
) -> Shaped[Array, "B K row"]:
    """What a cache keeps of x: normed (where it is not yet: `norm` is the weight), rotated, and quantized."""
    if storage.layout is not None:
        layout, backend = storage.layout, numerics.backend
        return pack(x, positions, jnp.asarray(freqs), norm, eps=eps, layout=layout, backend=backend)
    return storage.pack(turned(x, positions, jnp.asarray(freqs), norm, eps=eps))


def window_ids(span: Span, window: int, ring: int) -> Int32[Array, "B T W"]:
    """Rows of [a ring of `ring` rows, this call's rows] that each query sees: itself and the W - 1 positions before
    it, in a replay those from its start on; -1: none."""
    seen = span.positions[..., None] - jnp.arange(window - 1, -1, -1, dtype=jnp.int32)
    start = span.start[:, None, None]
    ids = jnp.where(seen < start, seen % ring, ring + seen - start)
    return jnp.where(seen < (start if span.replay else 0), -1, ids)


def push_ring(ring: Shaped[Array, "B R X"], new: Shaped[Array, "B T X"], span: Span) -> Shaped[Array, "B R X"]:
    """The ring after this call: slot s holds the newest position p with p % R == s. Gathers, so that it cannot write
    a slot twice."""
    rows = ring.shape[1]
    last = span.end[:, None] - 1
    position = last - (last - jnp.arange(rows, dtype=jnp.int32)) % rows
    row = jnp.clip(position - span.start[:, None], 0, new.shape[1] - 1)
    fresh = jnp.take_along_axis(new, row[..., None], axis=1)
    return jnp.where((position >= span.start[:, None])[..., None], fresh, ring)


def write_entries(
    store: Shaped[Array, "B S X"], new: Shaped[Array, "B K X"], first: Int32[Array, " B"], count: Int32[Array, " B"]
) -> Shaped[Array, "B S X"]:
    """Put the first `count` rows of `new` at rows first, first + 1, ...; rows past the capacity are dropped, never
    shifted or clamped onto live ones (`Model.step` raises before that can happen)."""
    number = jnp.arange(new.shape[1], dtype=jnp.int32)
    slots = jnp.where(number < count[:, None], first[:, None] + number, store.shape[1])
    return jax.vmap(lambda rows, slot, value: rows.at[slot].set(value, mode="drop"))(store, slots, new)
