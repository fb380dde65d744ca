"""A named shape of an operation: what its tests and its benchmark share.

Each `<op>/cases.py` has two tuples of them: SMALL runs on a CPU in interpret mode, MODEL has the sizes that the model
runs and is timed on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
