"""Check and time the kernels on a GPU: `python -m pallas_kernels.bench [op[/case] ...]`.

For each case of `<op>/cases.py`'s MODEL (or SMALL), with inputs drawn from a fresh seed:

    checked     outputs written over buffers full of NaN and -1, compared by the case's own float64 `problems`
    repeated    20 runs, compared bit by bit, unless the case says that they may differ
    timed       device time per call: `count` calls in one compiled program, one after the other, on rotating copies of
                the inputs so that the L2 cache holds none of them. A long copy is queued before the programs, so that
                the host has queued them all when the first one starts: time = (long queue - short queue) / calls
    placed      whether the calls sit inside command buffers (CUDA graphs), read from XLA's own dump of the program, and
                the time without command buffers

Ceilings of the same run: a copy of 1 GiB (bytes read and written) and an 8192^3 bf16 product; `floor` is the larger of
nbytes / copy and flops / product. The reference is timed under jit in the same way.

    --check-only         no timing            --repeats N   timings of each program, default 7
    --small              not the model's sizes but the edges that the tests run, on the GPU: uneven, empty, ties, NaN
    --no-reference       only the kernels     --seed N      default: the clock
    --out FILE.json      everything measured, rewritten after every case; other cases that the same day, device and JAX
                         left in it stay, each with its own ceilings
    --table FILE.json    no run: print the README's table from such a file
    --peers DIR          time other implementations too; may be given several times

A peer is a Python file DIR/<op>.py with one function, `peers(case, inputs)`, that returns {name: run} for the cases it
knows, else {}. `inputs` are the case's JAX arrays (DLPack hands them to torch). `run(n)` executes the operation n times
on the device, back to back, and returns when they are done; replay a captured CUDA graph where the framework has them.
It is timed as (run(3n) - run(n)) / 2n. `parity/peers` has torch.compile of the formulas; for others, build the library
yourself (for FlashMLA: its sparse kernels with a C entry point, called through ctypes with the arrays' pointers) and
name the folder that holds your file.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case

Run = Callable[[int], None]
HERE = Path(__file__).parent
L2_BYTES = 160 << 20  # inputs rotate over more than this: several times what a GPU's L2 cache keeps
COPY = Case(
    name="copy",
    inputs=lambda _: (jnp.ones(1 << 28, jnp.float32),),
    kernel=lambda x: x + 1,
    reference=lambda x: x + 1,
    problems=lambda _, __: [],
)
SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}  # no call overlaps the one before it
REPEATS = {True: "ok", None: "ok, runs may differ", False: "runs differ"}
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


def operations() -> list[str]:
    """Names of the ops that have cases."""
    return sorted(path.parent.name for path in HERE.glob("*/cases.py"))


def selected(wanted: Sequence[str], size: str = "MODEL") -> Iterator[tuple[str, Case]]:
    """(op, case) for `op` or `op/case` words, all without one; a word that fits nothing is an error."""
    modules = {op: importlib.import_module(f"pallas_kernels.{op}.cases") for op in operations()}
    found = [(op, case) for op, module in modules.items() for case in getattr(module, size)]
    for word in wanted:
        if not any(word in (op, f"{op}/{case.name}") for op, case in found):
            raise SystemExit(f"bench: {word!r} is not one of {', '.join(sorted({op for op, _ in found}))} or op/case")
    yield from ((op, c) for op, c in found if not wanted or op in wanted or f"{op}/{c.name}" in wanted)


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


def dump(folder: Path | str) -> dict[str, Any]:
    """Compiler options: XLA's text of the program goes to `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


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


def poison(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """A buffer of NaN, or of -1 (255) where there is none: no kernel writes either by accident."""
    value = jnp.nan if jnp.issubdtype(shape.dtype, jnp.inexact) else -1
    return jnp.full(shape.shape, value, jnp.int32 if value == -1 else shape.dtype).astype(shape.dtype)


@jax.jit
def identical(a: Any, b: Any) -> jax.Array:
    """Whether two trees of arrays have the same bits, NaN included."""

    def bits(x: jax.Array) -> jax.Array:
        return x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return jnp.stack([(bits(x) == bits(y)).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]).all()


def check(case: Case, inputs: tuple[Any, ...], repeats: int = 20) -> dict[str, Any]:
    """Problems of one run over poisoned outputs, and whether `repeats` more give the same bits."""
    shapes = jax.eval_shape(case.kernel, *inputs)
    # Donated and unused, the poison is where outputs are written; freed, it is where the kernel's scratch comes from.
    run = jax.jit(lambda _, *args: case.kernel(*args), donate_argnums=0, keep_unused=True)

    def once() -> Any:
        for _ in range(3):
            jax.block_until_ready(jax.tree.map(poison, shapes))
        return run(jax.tree.map(poison, shapes), *inputs)

    first = once()
    problems = case.problems(inputs, jax.device_get(first))
    same = all(bool(identical(first, once())) for _ in range(repeats)) if case.repeatable else None
    return {"problems": problems, "repeats_identical": same}


def command_buffers(folder: Path) -> dict[str, int]:
    """Kernel launches inside and outside command buffers, from XLA's dump of one program in `folder`."""
    texts = [path.read_text() for path in folder.glob("*thunk_sequence_after_thunk_passes.txt")]
    texts = texts or [path.read_text() for path in folder.glob("*thunk_sequence.txt")]
    lines = [line for text in texts for line in text.splitlines() if "kCustom" in line]
    inside = sum(line.startswith(" ") for line in lines)
    return {"inside": inside, "outside": len(lines) - inside}


def calls_of(case: Case, rates: dict[str, float]) -> int:
    """Calls that fill about 0.3 ms at one and a half times the floor; XLA makes graphs of five launches and more."""
    return max(5, min(32, math.ceil(300 / (1.5 * floor_us(case, rates) + 3))))


def floor_us(case: Case, rates: dict[str, float]) -> float:
    """The larger of bytes over copy bandwidth and operations over matmul rate."""
    return max(case.nbytes / rates["copy_tb_s"], case.flops / rates["matmul_tflop_s"]) / 1e6


def timings(case: Case, inputs: tuple[Any, ...], rates: dict[str, float], clock: Clock, against: bool) -> dict:
    """Times of the kernel with and without command buffers, of the reference, and where the launches sit."""
    count = calls_of(case, rates)
    sets = rotating(inputs, count)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        jobs = {
            "kernel": pool.submit(compiled, chain(case.kernel, count), (sets,), SERIAL | dump(folder)),
            "no_graphs": pool.submit(compiled, chain(case.kernel, count), (sets,), NO_GRAPHS),
        }
        if against:
            jobs["reference"] = pool.submit(compiled, chain(case.reference, 4), (sets,), SERIAL)
        wait(jobs.values())  # the clock is the host's: nothing may compile beside it
        measured: dict[str, Any] = {}
        for name, job in jobs.items():
            try:
                program = job.result()
                measured[name] = clock(lambda p=program: p(sets), 4 if name == "reference" else count)
            except (
                Exception
            ) as error:  # out of memory at a reference's size, most often: the rest is still worth having
                measured[name] = {"error": str(error).splitlines()[0][:200]}
        measured["command_buffers"] = command_buffers(Path(folder))
    return measured


def load_peers(folders: Sequence[Path], op: str) -> list[Callable[[Case, tuple[Any, ...]], dict[str, Run]]]:
    """The `peers` functions of DIR/<op>.py."""
    found: list[Callable[..., dict[str, Run]]] = []
    for path in (folder / f"{op}.py" for folder in folders):
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"peers_{op}_{len(found)}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append(module.peers)
    return found


def time_peers(folders: Sequence[Path], op: str, case: Case, inputs: tuple[Any, ...], clock: Clock, n: int) -> dict:
    """{name: timing} of every peer of this case; one that fails says why and stops nothing."""
    timed: dict[str, Any] = {}
    for peers in load_peers(folders, op):
        try:
            timed |= {name: clock.peer(run, n) for name, run in peers(case, inputs).items()}
        except Exception as error:
            timed[peers.__module__] = {"error": str(error).splitlines()[0][:200]}
    return timed


def measure(op: str, case: Case, options: argparse.Namespace, rates: dict[str, float], clock: Clock | None) -> dict:
    """Everything about one case, as it goes into the file."""
    result: dict[str, Any] = {"op": op, "case": case.name, "seed": options.seed}
    result |= {"flops": case.flops, "nbytes": case.nbytes}
    try:
        inputs = jax.block_until_ready(case.inputs(options.seed))
        result |= check(case, inputs)
        if clock is not None:
            result |= {"ceilings": rates, "floor_us": floor_us(case, rates)}
            result |= timings(case, inputs, rates, clock, not options.no_reference)
            result["peers"] = time_peers(options.peers, op, case, inputs, clock, calls_of(case, rates))
    except Exception as error:  # one case must not hide the others
        result.setdefault("problems", []).append(f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
    return result


def line(result: dict[str, Any]) -> str:
    """One case on one line."""
    verdict = "; ".join(result["problems"]) or "ok"
    verdict += ", repeated runs differ" if result.get("repeats_identical") is False else ""
    kernel = result.get("kernel", {})
    time_ = f"{kernel['us']:9.1f} us +-{kernel['spread']:4.0%}" if "us" in kernel else kernel.get("error", "")
    return f"{result['op']}/{result['case']:28} {time_} {verdict}"


def table(report: dict[str, Any]) -> str:
    """The README's table, in Markdown."""
    rows = []
    for result in report["results"]:
        us = result.get("kernel", {}).get("us")
        if us is None:
            rows.append((result["op"], result["case"], *"-----", "; ".join(result["problems"]) or "-"))
            continue
        work = f"{result['flops'] / us / 1e6:.0f} TFLOP/s" if compute_bound(result) else _bandwidth(result, us)
        others = {"reference": result.get("reference", {})} | result.get("peers", {})
        against = ", ".join(f"{name} {o['us'] / us:.2f} x" for name, o in others.items() if "us" in o)
        graphs = result["command_buffers"]
        state = "; ".join(result["problems"]) or REPEATS[result["repeats_identical"]]
        floor = f"{us / result['floor_us']:.2f} x" if result["floor_us"] else "-"
        place = "yes" if graphs["inside"] and not graphs["outside"] else f"{graphs['outside']} outside"
        if "us" in result["no_graphs"]:
            place += f"; {_time(result['no_graphs']['us'])} without"
        rows.append((result["op"], result["case"], _time(us), work, floor, against or "-", place, state))
    head = ("op", "case", "time", "rate", "of its floor", "others' time over ours", "in CUDA graphs", "check")
    body = "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))
    measured = [result["ceilings"] for result in report["results"] if "ceilings" in result]
    copy, product = ([rates[name] for rates in measured] for name in ("copy_tb_s", "matmul_tflop_s"))
    ceiling = f"copy {_range(copy, '.2f')} TB/s, bf16 matmul {_range(product, '.0f')} TFLOP/s"
    return f"{report['device']}, JAX {report['jax']}, {report['date']}; {ceiling}.\n\n{body}"


def _range(values: Sequence[float], style: str) -> str:
    low, high = (format(bound(values, default=math.nan), style) for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def compute_bound(result: dict[str, Any]) -> bool:
    """Whether arithmetic, not bytes, sets the floor."""
    rates = result["ceilings"]
    return result["flops"] / rates["matmul_tflop_s"] > result["nbytes"] / rates["copy_tb_s"]


def _bandwidth(result: dict[str, Any], us: float) -> str:
    return f"{result['nbytes'] / us / 1e6:.2f} TB/s"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, parsed."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description="Check and time the kernels.")
    parser.add_argument("ops", nargs="*", metavar="op[/case]")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=int(time.time()) % (1 << 31))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", type=Path, action="append", default=[])
    parser.add_argument("--table", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if any case has a problem."""
    options = arguments(words)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return 0
    cases = list(selected(options.ops, "SMALL" if options.small else "MODEL"))
    clock = None if options.check_only else Clock(options.repeats)
    rates = ceilings(clock) if clock is not None else {}
    here = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
    print(here["device"], {name: round(rate, 2) for name, rate in rates.items()}, f"seed {options.seed}", flush=True)
    kept = others(options.out, here, cases)
    results = []
    for op, case in cases:
        results.append(measure(op, case, options, rates, clock))
        print(line(results[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(here | {"results": kept + results}, indent=1))
    return int(any(r["problems"] or r.get("repeats_identical") is False for r in results))


def others(path: Path | None, here: dict[str, str], cases: Sequence[tuple[str, Case]]) -> list[dict[str, Any]]:
    """What a file from the same day, device and JAX holds of cases other than these."""
    report = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if not report.items() >= here.items():
        return []
    again = {(op, case.name) for op, case in cases}
    return [result for result in report["results"] if (result["op"], result["case"]) not in again]


if __name__ == "__main__":
    raise SystemExit(main())
