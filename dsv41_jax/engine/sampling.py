"""How a token is drawn from logits: once, for plain decoding, for drafts and for their verification."""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Key


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when a row ends. Raises ValueError unless max_new_tokens >= 0, temperature >= 0 and
    finite (0: greedy), and 0 < top_p <= 1."""

    max_new_tokens: int
    eos: int
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise ValueError(f"{name}: {value!r} is not an integer")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: {self.max_new_tokens} is negative")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed: {self.seed} does not fit in 64 bits")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: {self.temperature} is not a finite number of at least 0")
        if self.temperature and not np.finfo(np.float32).tiny <= self.temperature <= np.finfo(np.float32).max:
            raise ValueError(f"temperature: {self.temperature} is no normal float32; 0 is greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Draws:
    """What the draws of one step are made of. A row's draw depends on the key, the step and the row's number, not on
    the rows beside it."""

    key: Key[Array, ""]
    step: Int32[Array, ""] | int
    temperature: Float32[Array, ""] | float
    top_p: Float32[Array, ""] | float
    greedy: bool = field(metadata={"static": True})

    @classmethod
    def first(cls, sampling: Sampling) -> "Draws":
        """Those of step 0."""
        greedy = sampling.temperature == 0
        return cls(
            key=jax.random.key(sampling.seed),
            step=0,
            temperature=1.0 if greedy else float(sampling.temperature),
            top_p=float(sampling.top_p),
            greedy=greedy,
        )

    def next(self) -> "Draws":
        """Those of the step behind."""
        return replace(self, step=self.step + 1)

    def keys(self, rows: int) -> Key[Array, " B"]:
        """A key for each row."""
        return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(self.key, row), self.step))(jnp.arange(rows))


def nucleus(logits: Float32[Array, "*lead V"], top_p: float | Float32[Array, ""]) -> Float32[Array, "*lead V"]:
    """Logits with -inf outside the smallest set of most probable tokens whose probability reaches top_p."""
    order = jnp.argsort(-logits, axis=-1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < top_p
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, logits, -jnp.inf)


def probabilities(logits: Float32[Array, "*lead V"], draws: Draws) -> Float32[Array, "*lead V"]:
    """What is sampled from: softmax of logits / temperature within the nucleus of top_p."""
    return jax.nn.softmax(nucleus(logits / draws.temperature, draws.top_p), axis=-1)


def draw(logits: Float32[Array, "B V"], keys: Key[Array, " B"]) -> Int32[Array, " B"]:
    """A token of each row from softmax(logits)."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def choose(logits: Float32[Array, "B V"], keys: Key[Array, " B"], draws: Draws) -> Int32[Array, " B"]:
    """One token a row: the arg max (the lower id of equals), or a draw from what `probabilities` gives."""
    if draws.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return draw(nucleus(logits / draws.temperature, draws.top_p), keys)


@jax.jit
def sample(logits: Float32[Array, "B V"], draws: Draws) -> Int32[Array, " B"]:
    """One token a row, compiled by itself."""
    return choose(logits, draws.keys(logits.shape[0]), draws)
