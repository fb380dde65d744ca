"""A named shape of an operation: what its tests and its benchmark share.

Each `<op>/cases.py` has two tuples of them: SMALL runs on a CPU in interpret mode, MODEL has the sizes that the model
runs and is timed on a GPU.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """`inputs(seed)` makes fresh ones; with jax.random, `jax.eval_shape` has their shapes without making them.
    `kernel` and `reference` take the arrays of `inputs`; `kernel` also takes `tile=` and `interpret=`.

    `problems(inputs, output)` compares an output with float64 arithmetic in NumPy, or exactly where the result is
    codes or ids, and says what is wrong, a line each; an empty list passes. `flops` and `nbytes` are the least work:
    each input read once, each output written once. `repeatable`: equal inputs give equal bits, else the op says why.
    """

    name: str
    inputs: Callable[[int], tuple[Any, ...]]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    problems: Callable[[tuple[Any, ...], Any], list[str]]
    flops: float = 0.0
    nbytes: float = 0.0
    repeatable: bool = True


def operations() -> list[str]:
    """Names of the ops that have cases."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/cases.py"))


def selected(wanted: Sequence[str], size: str = "MODEL") -> Iterator[tuple[str, Case]]:
    """(op, case) for `op` or `op/case` words, all without one; a word that fits nothing is an error."""
    modules = {op: importlib.import_module(f"pallas_kernels.{op}.cases") for op in operations()}
    found = [(op, case) for op, module in modules.items() for case in getattr(module, size)]
    for word in wanted:
        if not any(word in (op, f"{op}/{case.name}") for op, case in found):
            raise SystemExit(f"{word!r} is not one of {', '.join(sorted({op for op, _ in found}))} or op/case")
    yield from ((op, c) for op, c in found if not wanted or op in wanted or f"{op}/{c.name}" in wanted)
