"""How many drafted tokens to verify: adaptive verification (DSpark, arXiv 2607.05147; costs as in vLLM 0.33).

    survival_j   product of the confidences up to draft j: the chance that the prefix stands
    budget       argmax over B of (requests + the B largest survivals) / (draft cost + verify cost of requests + B)
    offered      the B slots of largest current survival; survival falls along a row, so they are prefixes

The budget comes from confidences of an EARLIER step. Choosing it from the block at hand would let a draft's own value
decide whether it is verified, and bias the output: with target (0.7, 0.3), drafts from (0.5, 0.5), and verification of
the first token only when its follower looks good, 0.85 of the first tokens come out, not 0.7.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from dsv41_jax import atomic


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a step: `verify[i]` for `tokens[i]` tokens in all, and `draft` for drafting.

    A step pads to a measured size, so the cost is a step function up to the largest; beyond it the last slope goes on.
    """

    tokens: tuple[int, ...]
    verify: tuple[float, ...]
    draft: float

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.verify) or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(
                f"cost table: tokens {self.tokens} and {len(self.verify)} costs are not an ascending table"
            )
        if self.tokens[0] < 1 or not all(0 < cost < math.inf for cost in self.verify) or not 0 <= self.draft < math.inf:
            raise ValueError(
                f"cost table: tokens {self.tokens}, costs {self.verify}, draft {self.draft} must be positive"
            )

    @classmethod
    def read(cls, path: Path) -> "CostTable":
        """From a file that `write` made."""
        try:
            document = json.loads(path.read_text())
            return cls(tuple(document["tokens"]), tuple(document["verify"]), document["draft"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: is not a cost table ({error})") from None

    def write(self, path: Path) -> None:
        """As JSON; complete or not at all."""
        with atomic.file(path) as stream:
            stream.write(json.dumps(asdict(self)).encode())

    def cost(self, tokens: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Seconds of drafting and verifying this many tokens; never falling."""
        sizes, costs = np.array(self.tokens), np.maximum.accumulate(self.verify)
        at = np.searchsorted(sizes, tokens)
        slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else costs[-1] / sizes[-1]
        beyond = costs[-1] + slope * (np.asarray(tokens) - sizes[-1])
        return self.draft + np.where(at < len(sizes), costs[np.minimum(at, len(sizes) - 1)], beyond)


def survival(confidence: Float[np.ndarray, "B K"]) -> Float[np.ndarray, "B K"]:
    """Running product of sigmoid(confidence logit)."""
    return np.cumprod(0.5 + 0.5 * np.tanh(0.5 * np.asarray(confidence, np.float64)), axis=1)


def budget(stale: Float[np.ndarray, "B K"], cost: CostTable) -> int:
    """How many drafts to verify in all, from survivals of an earlier step; the smaller of equals.

    >>> flat = CostTable((2, 12), (1.0, 1.0), 0.1)
    >>> budget(np.array([[0.9, 0.8], [0.5, 0.1]]), flat)  # more tokens cost nothing: verify all
    4
    >>> budget(np.array([[0.9, 0.8], [0.5, 0.1]]), CostTable((2, 3, 4, 5, 6), (1.0, 1.1, 1.2, 1.9, 2.6), 0.0))
    2
    """
    requests = len(stale)
    expected = requests + np.concatenate([[0.0], np.cumsum(np.sort(stale, axis=None)[::-1])])
    return int(np.argmax(expected / cost.cost(requests + np.arange(stale.size + 1))))


def allocate(current: Float[np.ndarray, "B K"], total: int) -> Int[np.ndarray, " B"]:
    """Drafts offered for each row: the `total` slots of largest survival, earlier positions and rows first in ties."""
    falling = np.minimum.accumulate(current, axis=1)
    position = np.broadcast_to(np.arange(current.shape[1]), current.shape)
    order = np.lexsort((position.ravel(), -falling.ravel()))[:total]
    return np.bincount(order // current.shape[1], minlength=len(current)).astype(np.int32)
