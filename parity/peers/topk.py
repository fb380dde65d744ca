"""torch.topk, which is a kernel of its own. Rows are whole in the model's cases; which of equal values it takes, and in
which order, is left open."""

from collections.abc import Callable
from typing import Any

from parity.peers.graphs import Formula, captured


def formula(case: Any, compile: Callable[[Formula], Formula]) -> Formula:
    """Places of the best, without order."""
    count = int(case.name.split()[0])
    return lambda x, lengths: x.topk(count, sorted=False).indices


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    return {"torch.topk": captured(formula(case, lambda f: f), *inputs)}
