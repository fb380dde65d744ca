"""torch.topk, which is a kernel of its own; the lengths are whole in the model's cases."""

from collections.abc import Callable
from typing import Any

from parity.peers.graphs import captured


def peers(case: Any, inputs: tuple[Any, ...]) -> dict[str, Callable[[int], None]]:
    """The benchmark's interface."""
    count = int(case.name.split()[0])
    return {"torch.topk": captured(lambda x: x.topk(count, sorted=False).indices, inputs[0], compiled=False)}
