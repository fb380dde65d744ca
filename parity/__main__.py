"""`python -m parity golden DIR [DIR ...]`, `python -m parity replay CKPT`, `python -m parity backend`."""

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from rich.console import Console

from dsv41_jax import Model
from dsv41_jax.cli import STDERR, fail, lengths_of
from dsv41_jax.nn.random import random_parameters
from dsv41_jax.numerics import NUMERICS, numerics_by_name
from pallas_kernels import BackendError
from pallas_kernels.bench.clock import Clock
from parity.backend import compare, decode_step, released
from parity.golden import compare_directory
from parity.replay import measure, show_replay
from parity.table import FAIL, Row, show
from parity.units import compare_units


@click.group()
def app() -> None:
    """Compare this library with the released program and with other implementations."""


def tables(directory: Path) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of everything in a directory: single operations, and a model under each numerics."""
    present = [(directory / name).exists() for name in ("units.npz", "inputs.npz")]
    if not any(present):
        raise FileNotFoundError(f"{directory}: has neither inputs.npz nor units.npz")
    if present[0]:
        yield f"{directory.name}: single operations", compare_units(directory)
    if present[1]:
        yield from compare_directory(directory)


@app.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
def golden(directories: tuple[Path, ...]) -> None:
    """Run directories of golden vectors and print a table of every array; exit 1 if any differs."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    bad = False
    for directory in directories:
        for title, rows in tables(directory):
            show(title, rows, console)
            bad |= any(row.verdict == FAIL for row in rows)
    sys.exit(1 if bad else 0)


@app.command()
@click.argument("ckpt")
@click.option("--tokens", default="", help="comma-separated prompt lengths; default: 1/2, 1, 2, 3, 6 windows")
@click.option("--prompts", default=16, show_default=True, help="random prompts of each length")
@click.option("--numerics", default="float32", show_default=True, type=click.Choice(list(NUMERICS)))
def replay(ckpt: str, tokens: str, prompts: int, numerics: str) -> None:
    """Measure what Bounded Replay changes in the logits behind prompts of CKPT."""
    model = Model.from_pretrained(ckpt, numerics=numerics)
    window = model.config.sliding_window
    lengths = lengths_of(tokens) if tokens else [window // 2, *(k * window for k in (1, 2, 3, 6))]
    show_replay(measure(model, lengths, prompts), Console())


@app.command()
@click.option("--numerics", default="fast", show_default=True, type=click.Choice(list(NUMERICS)))
@click.option("--prompt", default=300, show_default=True, type=click.IntRange(1, 512), help="tokens of each prompt")
@click.option("--experts", default=16, show_default=True, help="routed experts of a layer")
@click.option("--batch", default=(1, 64), show_default=True, multiple=True, type=click.IntRange(min=1), help="decoded")
def backend(numerics: str, prompt: int, experts: int, batch: tuple[int, ...]) -> None:
    """On a GPU: the model on the kernels against XLA, and the time of a decode step; exit 1 if they are further off."""
    numerics_by_name(numerics, "pallas")
    cfg = released(n_routed_experts=experts)
    params = random_parameters(cfg, 0, on_device=True)
    with STDERR.status("comparing three models, compiling decode steps"), ThreadPoolExecutor() as pool:
        steps = {
            (sequences, name): pool.submit(decode_step, cfg, params, numerics_by_name(numerics, name), sequences)
            for sequences, name in itertools.product(batch, ("pallas", "xla"))
        }
        rows = compare(cfg, params, numerics, prompt=prompt, decoded=3, batch=8)
    show(f"five layers, {experts} experts, {numerics}: error against float32", rows, Console(width=160))
    clock = Clock(5)
    for (sequences, name), step in steps.items():
        once, placed = step.result()
        timed = clock(once, 1)
        places = f"{placed['inside']} launches in command buffers, {placed['outside']} outside"
        print(f"decode step of {sequences:3}, {name:6}: {timed['us'] / 1e3:.3f} ms +-{timed['spread']:.0%}; {places}")
    sys.exit(1 if any(row.verdict == FAIL for row in rows) else 0)


if __name__ == "__main__":
    try:
        app.main(standalone_mode=False)
    except click.ClickException as error:
        fail(error.format_message())
    except (ValueError, OSError, KeyError, BackendError) as error:
        fail(str(error))
