"""Device time of programs: many calls in one of them, on inputs that no cache holds, queued behind a long copy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case

Run = Callable[[int], None]
L2_BYTES = 160 << 20  # inputs rotate over more than this: several times what a GPU's L2 cache keeps
COPY = Case(
    name="copy",
    inputs=lambda _: (jnp.ones(1 << 28, jnp.float32),),
    kernel=lambda x: x + 1,
    reference=lambda x: x + 1,
    problems=lambda _, __: [],
)
SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}  # no call overlaps the one before it
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


def nbytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def chain(function: Callable[..., Any], count: int) -> Callable[..., list[Any]]:
    """`count` calls on rotating inputs, each ordered after the one before. All outputs are returned: none is dead."""

    function = jax.jit(function)  # traced once, not once a call

    def program(sets: list[tuple[Any, ...]]) -> list[Any]:
        outputs: list[Any] = []
        last: Any = ()
        for i in range(count):
            inputs, last = jax.lax.optimization_barrier((sets[i % len(sets)], last))
            outputs.append(last)
            last = function(*inputs)
        return [*outputs, last]

    return program


def compiled(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    """`function` compiled for `args`."""
    return jax.jit(function).lower(*args).compile(compiler_options=options)


def rotating(inputs: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Enough copies of the inputs that a call finds none of them in the L2 cache, at most `count`."""
    copies = min(count, max(1, -(-L2_BYTES // max(nbytes(inputs), 1))))
    return [inputs, *(jax.tree.map(jnp.copy, inputs) for _ in range(copies - 1))]


class Clock:
    """Times programs behind a long copy, which keeps the device busy while the host queues them."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.block = jnp.ones(1 << 28, jnp.float32)
        self.hold = compiled(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: y + 1, x), (self.block,), {})

    def queue(self, program: Callable[[], Any], times: int) -> float:
        """Seconds from an idle device until `times` programs are done."""
        start = time.perf_counter()
        self.hold(self.block)
        for _ in range(times):
            last = program()
        jax.block_until_ready(last)
        return time.perf_counter() - start

    def __call__(self, program: Callable[[], Any], calls: int) -> dict[str, float]:
        """{us, spread}: median microseconds of one of the program's `calls`, and (max - min) / median."""
        self.queue(program, 2)
        one = (self.queue(program, 6) - self.queue(program, 2)) / 4
        more = max(2, min(24, math.ceil(6e-3 / max(one, 1e-6))))  # 6 ms of it, far above the copy's own spread
        differences = [self.queue(program, 2 + more) - self.queue(program, 2) for _ in range(self.repeats)]
        return summary([difference / (more * calls) for difference in differences])

    def peer(self, run: Run, calls: int) -> dict[str, float]:
        """The same of `run(n)`, which returns when n calls are done."""

        def seconds(n: int) -> float:
            start = time.perf_counter()
            run(n)
            return time.perf_counter() - start

        for n in (calls, 3 * calls):  # a peer may capture a graph of each
            seconds(n)
        return summary([(seconds(3 * calls) - seconds(calls)) / (2 * calls) for _ in range(self.repeats)])


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median in microseconds, and the spread of all runs over the median."""
    median = statistics.median(seconds)
    return {"us": median * 1e6, "spread": (max(seconds) - min(seconds)) / median}


def ceilings(clock: Clock) -> dict[str, float]:
    """Copy bandwidth in TB/s and bf16 matmul rate in TFLOP/s of this device, now."""
    x, w = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in (0, 1))
    rates = {}
    for name, function, args, work in (
        ("copy_tb_s", COPY.kernel, COPY.inputs(0), 2 * 4 * 2**28),
        ("matmul_tflop_s", lambda x, w: x @ w, (x, w), 2 * 8192**3),
    ):
        program = compiled(chain(function, 4), ([args],), SERIAL)
        rates[name] = work / clock(lambda p=program, a=args: p([a]), 4)["us"] / 1e6
    return rates


def floor_us(case: Case, rates: dict[str, float]) -> float:
    """The larger of bytes over copy bandwidth and operations over matmul rate."""
    return max(case.nbytes / rates["copy_tb_s"], case.flops / rates["matmul_tflop_s"]) / 1e6


def calls_of(case: Case, rates: dict[str, float]) -> int:
    """Calls that fill about 0.3 ms at one and a half times the floor; XLA makes graphs of five launches and more."""
    return max(5, min(32, math.ceil(300 / (1.5 * floor_us(case, rates) + 3))))
