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
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench.check import check
from pallas_kernels.bench.clock import (
    NO_GRAPHS,
    SERIAL,
    Clock,
    calls_of,
    ceilings,
    chain,
    compiled,
    floor_us,
    rotating,
)
from pallas_kernels.bench.dump import command_buffers, dump
from pallas_kernels.bench.peers import time_peers
from pallas_kernels.bench.table import line, table
from pallas_kernels.case import Case, selected


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


if __name__ == "__main__":
    raise SystemExit(main())
