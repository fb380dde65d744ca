"""What Bounded Replay changes: logits behind prompts, replayed against exact ones.

    decoder   prefill "replay": the layers from the last Full one up run on the last W tokens alone
    encoder   `restore` in the middle of the prompt, then the rest of it as usual

The deviation belongs to a model's weights, and random ones, such as the bundled checkpoint's, forget little over W
tokens: they show that the approximation is one, not what it costs a trained model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from dsv41_jax import Model
from dsv41_jax.engine.snapshot import Snapshot
from parity.table import relative_l2


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Last-token logits of one kind of replay: relative L2 (median, largest), KL of exact from replayed in nats
    (mean), share of prompts whose best token is the same."""

    kind: str
    tokens: int
    median: float
    largest: float
    divergence: float
    same_token: float


def deviation(kind: str, tokens: int, exact: np.ndarray, replayed: np.ndarray) -> Deviation:
    """Compare logits [B, V]."""
    error = relative_l2(replayed, exact)
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (exact, replayed))
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()
    same = (exact.argmax(axis=-1) == replayed.argmax(axis=-1)).mean()
    return Deviation(
        kind=kind,
        tokens=tokens,
        median=float(np.median(error)),
        largest=float(error.max()),
        divergence=float(divergence),
        same_token=float(same),
    )


def measure(model: Model, lengths: Sequence[int], prompts: int, seed: int = 0) -> list[Deviation]:
    """Deviations of random prompts of each length."""
    rng, found = np.random.default_rng(seed), []
    for length in lengths:
        tokens = rng.integers(0, model.config.vocab_size, (prompts, length)).astype(np.int32)

        def behind(mode: str, tokens: np.ndarray = tokens) -> np.ndarray:
            cache = model.init_cache(prompts, tokens.shape[1])
            return np.asarray(model.prefill(list(tokens), cache, mode=mode)[0], np.float64)

        exact, half = behind("full"), max(1, length // 2)
        found.append(deviation("decoder", length, exact, behind("replay")))
        _, cache, _ = model.prefill(list(tokens[:, :half]), model.init_cache(prompts, length))
        cache = model.restore(Snapshot.of(cache), tokens[:, :half], capacity=length)
        resumed = np.asarray(model.prefill(list(tokens[:, half:]), cache)[0], np.float64)
        found.append(deviation(f"encoder, hit at {half}", length, exact, resumed))
    return found


def show_replay(found: Sequence[Deviation], console: Console) -> None:
    """Print a row a measurement."""
    table = Table(box=None, pad_edge=False)
    for heading in ("replay", "tokens", "relative L2, median", "largest", "KL (nats)", "same best token"):
        table.add_column(heading, justify="left" if heading == "replay" else "right")
    for row in found:
        numbers = (f"{value:.2e}" for value in (row.median, row.largest, row.divergence))
        table.add_row(row.kind, str(row.tokens), *numbers, f"{row.same_token:.0%}")
    console.print(table)
