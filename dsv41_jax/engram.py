"""Engram: rows of a huge table, found by hashing the last tokens, gated into the streams (paper 2.4.2).

    id_t       compressed id of token t: equal for tokens whose normalized text is equal
    r_n        XOR over s < n of id_{t-s} * multiplier_s                               64-bit integers
    row        r_n mod prime[n, head] + offset[n, head]                                n = 2.., heads of each
    key, value (rows of all n and heads, side by side) Wkv                             M keys and one value of width D
    d_m        sum(X_m q_m k_m key_m) rsqrt(mean X_m^2 + eps) rsqrt(mean key_m^2 + eps) D^-0.5
    gate_m     sigmoid(sign(d_m) sqrt(max(|d_m|, 1e-6)));   X_m += gate_m * value

Ids before the start, and at or behind an image token, count as the pad token's; once one look-back is blocked all
longer ones are. Products exceed 2^62, and JAX has 32-bit integers by default: hashing is NumPy on the host. Engram
layers get the rows that a call needs, as the bytes of the checkpoint.

A table has one of four places, and gives the same rows from each:

    mmap      the checkpoint's file: a lookup touches the pages of its rows
    host      host memory
    device    whole on every device, looked up there by row number
    sharded   its rows split over all devices of a mesh (whole rows, padded with zeros to a multiple of the devices);
              each device answers for its own and the sum over devices is the answer
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Int64, UInt8
from tokenizers import Regex, Tokenizer, normalizers

from dsv41_jax.config import Config, ConfigError
from dsv41_jax.linear import QuantizedLinear, parameter
from dsv41_jax.quant import Numerics, unpack_fp8
from pallas_kernels.formats import cast

NONE = -1  # in a history: no token there, or one at or behind an image
PLACEMENTS = ("mmap", "host", "device", "sharded")


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


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
    most = np.iinfo(np.int64).max // vocabulary // 2
    return np.random.default_rng(10007 * layer).integers(0, most, count, np.int64) * 2 + 1


@lru_cache(maxsize=8)
def layouts(cfg: Config) -> tuple[Layout, ...]:
    """The layout of each Engram layer, derived and checked against engram_num_embeddings.

    Layer by layer, each n-gram size restarts at engram_vocab_size - 1 and takes the next primes that nobody has taken.
    """
    taken: set[int] = set()
    found = []
    for slot, layer in enumerate(cfg.engram_layer_ids):
        primes = []
        for _ in range(cfg.engram_max_ngram_size - 1):
            n = cfg.engram_vocab_size - 1
            for _ in range(cfg.engram_n_heads):
                n += 1
                while n in taken or not _is_prime(n):
                    n += 1
                taken.add(n)
                primes.append(n)
        array = np.array(primes, np.int64)
        odd = multipliers(layer, cfg.engram_max_ngram_size, cfg.engram_compressed_vocab_size)
        layout = Layout(odd, array, np.cumsum(array) - array)
        if layout.rows != cfg.engram_num_embeddings[slot]:
            given = f"text_config.engram_num_embeddings: {cfg.engram_num_embeddings[slot]} for layer {layer}"
            raise ConfigError(f"{given} is not {layout.rows}, the sum of its primes")
        found.append(layout)
    return tuple(found)


_LONE_SPACE = "\ue000"
_NORMALIZER = normalizers.Sequence(
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


def compressed_ids(tokenizer: Tokenizer, cfg: Config) -> Int32[np.ndarray, " V"]:
    """The compressed id of every token: tokens of equal normalized text share one, numbered by first appearance.

    A token that is part of a UTF-8 sequence counts by its vocabulary string, one whose text normalizes to nothing by
    its text. Raises ConfigError when the tokenizer does not have the config's vocabulary or number of ids.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size < cfg.vocab_size:
        raise ConfigError(f"text_config.vocab_size: {cfg.vocab_size} exceeds the tokenizer's {size} tokens")
    seen: dict[str, int] = {}
    ids = np.empty(cfg.vocab_size, np.int32)
    for token in range(cfg.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else _NORMALIZER.normalize_str(text) or text
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
    primes = layout.primes.reshape(rolling.shape[-1], -1)
    rows = rolling[..., None] % primes + layout.offsets.reshape(primes.shape)
    return rows.reshape(*back.shape[:2], -1)


def check_placement(placement: str, mesh: Mesh | None) -> None:
    """Raise ValueError unless tables can be placed so: one of PLACEMENTS, and a mesh for "sharded"."""
    if placement not in PLACEMENTS:
        raise ValueError(f"engram: {placement!r} is not one of {', '.join(map(repr, PLACEMENTS))}")
    if placement == "sharded" and mesh is None:
        raise ValueError("engram: 'sharded' splits the tables over a mesh, and mesh is None")


def _refuse_nan(at: Int[np.ndarray, "*at"], scale: UInt8[np.ndarray, "*at groups"]) -> None:
    bad = (scale == 255).any(axis=-1)
    if bad.any():
        raise ValueError(f"Engram table: row {at[bad][0]} has a scale of E8M0 byte 255, which is NaN")


@dataclass(frozen=True)
class Table:
    """One layer's rows on the host, usually memory-mapped: E4M3 bytes [rows, width] and E8M0 bytes [rows, width/32]."""

    weight: UInt8[np.ndarray, "rows width"]
    scale: UInt8[np.ndarray, "rows groups"]

    def read(self, at: Int64[np.ndarray, "*at"]) -> tuple[UInt8[Array, "*at width"], UInt8[Array, "*at groups"]]:
        """(weight, scale) of the rows `at`. Raises ValueError for one whose scale is NaN."""
        weight, scale = self.weight[at], self.scale[at]
        _refuse_nan(at, scale)
        return jnp.asarray(weight), jnp.asarray(scale)


def own_rows(
    piece: UInt8[Array, "rows width"], at: Int32[Array, "*at"], first: Int32[Array, ""] | int
) -> UInt8[Array, "*at width"]:
    """The rows `at` of a table of which `piece` holds those from number `first` on; zeros for all others."""
    place = at - first
    mine = (place >= 0) & (place < piece.shape[0])
    return jnp.where(mine[..., None], piece[jnp.where(mine, place, 0)], jnp.uint8(0))


@partial(jax.jit, static_argnames="mesh")
def _look_up(
    weight: UInt8[Array, "rows width"], scale: UInt8[Array, "rows groups"], at: Int32[Array, "*at"], mesh: Mesh | None
) -> tuple[UInt8[Array, "*at width"], UInt8[Array, "*at groups"], Bool[Array, ""]]:
    """(weight, scale, whether a scale is NaN); with a mesh, of tables whose rows are split over all its devices."""

    def answer(piece: UInt8[Array, "rows width"], at: Int32[Array, "*at"]) -> UInt8[Array, "*at width"]:
        first = jax.lax.axis_index(mesh.axis_names) * piece.shape[0]
        return jax.lax.psum(own_rows(piece, at, first), mesh.axis_names)

    if mesh is None:
        found = [own_rows(table, at, 0) for table in (weight, scale)]
    else:
        specs = (P(mesh.axis_names), P())
        found = [
            jax.shard_map(answer, mesh=mesh, in_specs=specs, out_specs=P())(table, at) for table in (weight, scale)
        ]
    return found[0], found[1], (found[1] == 255).any()


@dataclass(frozen=True)
class DeviceTable:
    """One layer's rows on devices: whole on each, or split over all of a mesh, then padded with rows of zeros."""

    weight: UInt8[Array, "rows width"]
    scale: UInt8[Array, "rows groups"]

    def read(self, at: Int64[np.ndarray, "*at"]) -> tuple[UInt8[Array, "*at width"], UInt8[Array, "*at groups"]]:
        """As `Table.read`; only row numbers and one flag pass between host and devices."""
        sharding = self.weight.sharding
        split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
        mesh = sharding.mesh if split else None  # type: ignore[attr-defined]
        weight, scale, bad = _look_up(self.weight, self.scale, at.astype(np.int32), mesh)
        if bad:
            _refuse_nan(at, np.asarray(scale))
        return weight, scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngramRows:
    """What a call needs of one table: the row of each column, as stored, and which positions may use it."""

    weight: UInt8[Array, "B T columns width"]
    scale: UInt8[Array, "B T columns groups"]
    ids: Int32[Array, "B T columns"]


class Memory:
    """The host side of Engram: token map, layouts and tables, and the lookup that `Model.step` makes."""

    def __init__(self, cfg: Config, token_map: Int32[np.ndarray, " V"], tables: tuple[Table | DeviceTable, ...]):
        self.token_map, self.tables, self.layouts = token_map, tables, layouts(cfg)
        self.pad = int(token_map[cfg.engram_pad_token_id])

    @property
    def on_host(self) -> bool:
        """Whether `read` looks rows up on the host, and so may run in a thread beside a step. Two threads may not start
        programs of a mesh: devices would get them in different orders, and wait for each other."""
        return all(isinstance(table, Table) for table in self.tables)

    def read(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: Int[np.ndarray, " B"],
        start: Int[np.ndarray, " B"],
        history: Int32[np.ndarray, "B ring"],
        image: Bool[np.ndarray, "B T"] | None = None,
    ) -> tuple[tuple[EngramRows, ...], Int32[np.ndarray, "B ring"]]:
        """(rows of each table, the ring of ids after `count` tokens from position `start` on). Positions where `image`
        is set block what follows."""
        ids = self._ids(tokens, image)
        past = np.asarray(start)[:, None] - np.arange(len(self.layouts[0].multipliers) - 1, 0, -1)
        before = np.take_along_axis(history, past % history.shape[1], axis=1)
        back = look_back(ids, np.where(past < 0, NONE, before), self.pad)
        rows = []
        for layout, table in zip(self.layouts, self.tables, strict=True):
            at = hash_rows(back, layout)
            rows.append(EngramRows(*table.read(at), jnp.asarray(at.astype(np.int32))))
        return tuple(rows), self._remember(history, ids, start, count)

    def recall(
        self,
        tokens: Int32[np.ndarray, "B T"],
        count: Int[np.ndarray, " B"],
        history: Int32[np.ndarray, "B ring"],
        image: Bool[np.ndarray, "B T"] | None = None,
    ) -> Int32[np.ndarray, "B ring"]:
        """The ring of ids after the first `count` of `tokens`, which start at position 0."""
        return self._remember(history, self._ids(tokens, image), np.zeros(len(tokens), np.int32), count)

    def _ids(self, tokens: Int32[np.ndarray, "B T"], image: Bool[np.ndarray, "B T"] | None) -> Int32[np.ndarray, "B T"]:
        """Compressed ids, NONE at image positions."""
        bad = tokens[(tokens < 0) | (tokens >= len(self.token_map))]
        if bad.size:
            raise ValueError(f"tokens: id {bad[0]} is outside 0..{len(self.token_map) - 1}")
        ids = self.token_map[tokens]
        return ids if image is None else np.where(image, NONE, ids)

    @staticmethod
    def _remember(
        history: Int32[np.ndarray, "B ring"],
        ids: Int32[np.ndarray, "B T"],
        start: Int[np.ndarray, " B"],
        count: Int[np.ndarray, " B"],
    ) -> Int32[np.ndarray, "B ring"]:
        """The ring with the newest of `count` ids from position `start` on."""
        history = history.copy()
        for row, (first, live) in enumerate(zip(start, count, strict=True)):
            newest = np.arange(max(0, live - history.shape[1]), live)
            history[row, (first + newest) % history.shape[1]] = ids[row, newest]
        return history

    def sample(self, count: int) -> list[np.ndarray]:
        """The token map, and up to `count` evenly spaced rows of each table as stored: what tells two memories of one
        config apart, as far as so many rows can."""
        picked = [self.token_map]
        for layout, table in zip(self.layouts, self.tables, strict=True):
            at = np.linspace(0, layout.rows - 1, min(count, layout.rows)).astype(np.int64)
            picked += map(np.asarray, table.read(at))
        return picked


def gates(
    x: Float[Array, "B T M D"],
    key: Float[Array, "B T M D"],
    q_weight: Float[Array, "M D"],
    k_weight: Float[Array, "M D"],
    *,
    eps: float,
) -> Float32[Array, "B T M"]:
    """gate_m, in float32. -0 counts as negative; the gradient at d = 0 is zero, not infinite."""
    x, key = x.astype(jnp.float32), key.astype(jnp.float32)
    weight = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    rms = [jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps) for v in (x, key)]
    d = jnp.sum(x * weight * key, axis=-1) * rms[0] * rms[1] * x.shape[-1] ** -0.5
    return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(d), 1e-6)), d))


class Engram(nnx.Module):
    """The device side: `wkv`, `q_weight`, `k_weight`. The table `embed` of the checkpoint stays with `Memory`."""

    def __init__(self, cfg: Config):
        streams, width = cfg.hc_mult, cfg.hidden_size
        self.eps = cfg.rms_norm_eps
        self.wkv = QuantizedLinear((streams + 1) * width, cfg.engram_columns * cfg.engram_head_dim, ("width", "ngram"))
        self.q_weight = parameter((streams, width), jnp.bfloat16, ("streams", "width"))
        self.k_weight = parameter((streams, width), jnp.bfloat16, ("streams", "width"))

    def __call__(
        self, x: Float[Array, "B T M D"], rows: EngramRows, image: Bool[Array, "B T"] | None, num: Numerics
    ) -> tuple[Float[Array, "B T M D"], dict[str, Array]]:
        """(streams with the memory added, taps). Image positions stay as they are."""
        values = unpack_fp8(jnp.concatenate([rows.weight, rows.scale], axis=-1), num.dtype)
        embedded = values.reshape(*values.shape[:2], -1)
        streams, width = x.shape[-2:]
        kv = self.wkv(embedded, num).reshape(*x.shape[:2], streams + 1, width)
        key, value = kv[..., :streams, :], kv[..., streams:, :]
        gate = gates(x, key, self.q_weight[...], self.k_weight[...], eps=self.eps)
        if image is not None:
            gate = jnp.where(image[..., None], 0.0, gate)
        out = cast(x.astype(jnp.float32) + gate[..., None] * value.astype(jnp.float32), num.dtype)
        return out, {"engram_hash_ids": rows.ids, "engram_gate": gate, "engram_out": out}
