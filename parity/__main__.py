"""`python -m parity golden DIR [DIR ...]`, `python -m parity replay CKPT`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from dsv41_jax import Model
from dsv41_jax.cli import fail, lengths_of
from dsv41_jax.quant import NUMERICS
from parity import golden as golden_directories
from parity import replay as replays
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
        yield from golden_directories.compare_directory(directory)


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
    replays.show(replays.measure(model, lengths, prompts), Console())


if __name__ == "__main__":
    try:
        app.main(standalone_mode=False)
    except click.ClickException as error:
        fail(error.format_message())
    except (ValueError, OSError, KeyError) as error:
        fail(str(error))
