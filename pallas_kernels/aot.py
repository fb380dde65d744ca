"""Compile every kernel and tile to machine code without a GPU: `make kernels-aot`.

    python -m pallas_kernels.aot [op[/case] ...] [--target sm_90] [--spill-limit BYTES]

Each case of `<op>/cases.py`'s MODEL is compiled by XLA for a described H200 (sm_90a) and B300 (sm_103a), a process for
each, with the tile that the target chooses. Printed for every kernel: registers, bytes spilled, shared memory, and
where its launch sits (`graph`: inside a command buffer). Fails on a compile error, which is what too much shared or
tensor memory gives, and on a spill above the limit. It needs JAX's CUDA plugin and the compiler wheels that
`make kernels-aot` installs, and no driver.

What it cannot see: autotuned choices of XLA's own kernels, and time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pallas_kernels.target import multiprocessors

SPILL_LIMIT = 64  # bytes a thread: what ptxas spills around a call or a loop entry, not in an inner loop
SHARED_LIMIT = 232448  # bytes a block can ask for on both
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "0",  # XLA's log of ptxas -v
    "TF_CPP_VMODULE": "subprocess_compilation=5",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_RESOURCES": "1",
}
DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: {cores}  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2}  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
GPUS = {
    "sm_90": DESCRIPTION.format(
        name="NVIDIA H200",
        cores=multiprocessors("sm_90"),
        bandwidth=4_800_000_000_000,
        l2=62914560,
        memory=150_754_820_096,
        major=9,
        minor=0,
    ),
    "sm_103": DESCRIPTION.format(
        name="NVIDIA B300",
        cores=multiprocessors("sm_103"),
        bandwidth=8_000_000_000_000,
        l2=132644864,
        memory=288_000_000_000,
        major=10,
        minor=3,
    ),
}


def ptxas_report(log: str) -> dict[str, dict[str, int]]:
    """{kernel: {registers, spill}} from ptxas -v; of several kernels of one name, the worst. A kernel's own lines
    follow the line that names it; functions that it calls are reported before their registers."""
    kernels: dict[str, dict[str, int]] = {}
    name = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(.+?)'", line):
            name = found[1]
            kernels.setdefault(name, {"registers": 0, "spill": 0})
        elif name and (found := re.search(r"bytes stack frame, (\d+) bytes spill stores", line)):
            kernels[name]["spill"] = max(kernels[name]["spill"], int(found[1]))
        elif name and (found := re.search(r"Used (\d+) registers", line)):
            kernels[name]["registers"] = max(kernels[name]["registers"], int(found[1]))
    return kernels


def shared_memory(thunks: str, log: str) -> dict[str, int]:
    """{kernel: bytes of shared memory a block} from XLA's launch list; Mosaic's own report has no names ("")."""
    shared: dict[str, int] = {}
    for name, size in re.findall(r"\] (\S+) grid: .*shared_memory: (\d+) bytes", thunks):
        shared[name] = max(shared.get(name, 0), int(size))
    mosaic = [int(size) for size in re.findall(r"smem_scratch_bytes=(\d+)", log)]
    return shared | ({"": max(mosaic)} if mosaic else {})


def failures(record: dict[str, Any], spill_limit: int) -> list[str]:
    """What is wrong with one compiled case."""
    if "error" in record:
        return [record["error"]]
    found = []
    for name, kernel in record["kernels"].items():
        for part, limit in (("spill", spill_limit), ("shared", SHARED_LIMIT)):
            if kernel[part] > limit:
                found.append(f"{name}: {part} {kernel[part]} bytes, the limit is {limit}")
    return found


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send this process's standard output and error, those of the compiler's threads too, to a file."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def compile_case(function: Callable[..., Any], shapes: Any, place: Callable[[Any], Any], folder: Path) -> dict:
    """{kernels: {name: {registers, spill, shared}}} or {error} of `function` compiled for `shapes`."""
    import jax

    from pallas_kernels.bench.dump import command_buffers, dump

    log = folder / "log"
    options = dump(folder) | {"xla_gpu_graph_min_graph_size": 1}
    try:
        with output_to(log):
            jax.jit(function).lower(*jax.tree.map(place, shapes)).compile(compiler_options=options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}
    text = log.read_text(errors="replace")
    thunks = "\n".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    shared = shared_memory(thunks, text)
    kernels = ptxas_report(text)
    for name, kernel in kernels.items():
        kernel["shared"] = shared.get(name, shared.get("", 0))
    placed = command_buffers(folder)
    return {"kernels": kernels, "graph": placed["inside"] > 0 and not placed["outside"]}


def compile_all(target: str, wanted: Sequence[str]) -> None:
    """Compile the cases for one target in this process; a line of JSON each."""
    import jax
    from jax.experimental import topologies

    from pallas_kernels.case import selected

    topology = topologies.get_topology_desc(platform="cuda", target_config=GPUS[target], topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for op, case in selected(wanted):
        shapes = jax.eval_shape(lambda case=case: case.inputs(0))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tempfile.TemporaryDirectory() as folder:
            record = compile_case(
                case.kernel,
                shapes,
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                Path(folder),
            )
        print(json.dumps({"op": op, "case": case.name, "target": target} | record), flush=True)


def report(record: dict[str, Any]) -> Iterator[str]:
    """The lines of one case."""
    title = f"{record['target']:7} {record['op']}/{record['case']}"
    for name, kernel in record.get("kernels", {}).items():
        size = f"{kernel['registers']:3} registers, {kernel['spill']:4} spilled, {kernel['shared']:6} shared"
        yield f"{title:52} {name:36} {size}{', graph' if record['graph'] else ''}"


def main(words: Sequence[str] | None = None) -> int:
    """Compile for every target, print, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description="Compile without a GPU.")
    parser.add_argument("ops", nargs="*", metavar="op[/case]")
    parser.add_argument("--target", choices=list(GPUS), action="append")
    parser.add_argument("--spill-limit", type=int, default=SPILL_LIMIT)
    parser.add_argument("--child", choices=list(GPUS), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        compile_all(options.child, options.ops)
        return 0
    command = [sys.executable, "-m", "pallas_kernels.aot", *options.ops, "--child"]
    children = [
        (target, subprocess.Popen([*command, target], env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True))
        for target in options.target or GPUS
    ]
    wrong = []
    for target, child in children:
        for line in child.stdout:
            record = json.loads(line)
            print(*report(record), sep="\n", flush=True)
            wrong += [
                f"{target} {record['op']}/{record['case']}: {text}" for text in failures(record, options.spill_limit)
            ]
        if child.wait():
            wrong.append(f"{target}: the compiling process ended with status {child.returncode}")
    for text in wrong:
        print(f"FAILED {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
