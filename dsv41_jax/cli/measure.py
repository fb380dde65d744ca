"""`dsv41 profile`, `context`: what things cost on this machine."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dsv41_jax.cli import lengths_of
from dsv41_jax.cli.options import load_model, model_options
from dsv41_jax.cli.terminal import waiting
from dsv41_jax.measure import measure_context, measure_costs, with_positions


@click.command()
@click.argument("ckpt")
@click.option("--batch", default=1, show_default=True, help="sequences decoded together")
@click.option("--repeats", default=5, show_default=True, help="the median of so many runs counts")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON file to write")
@model_options
def profile(ckpt: str, batch: int, repeats: int, out: Path, numerics: str, backend: str) -> None:
    """Measure what verifying and drafting cost on this machine, for `generate --cost`."""
    model = load_model(ckpt, numerics, backend)
    with waiting("measuring"):
        table = measure_costs(model, batch, repeats)
    table.write(out)
    rows = Table("tokens a step", "milliseconds", box=None, pad_edge=False)
    for tokens, seconds in zip(table.tokens, table.verify, strict=True):
        rows.add_row(str(tokens), f"{1e3 * seconds:.2f}")
    rows.add_row("drafting", f"{1e3 * table.draft:.2f}")
    Console().print(rows)


@click.command()
@click.argument("ckpt")
@click.option(
    "--tokens", default="1024,8192,65536", show_default=True, help="comma-separated lengths, short ones first"
)
@click.option("--decode", default=64, show_default=True, help="tokens decoded behind each")
@model_options
def context(ckpt: str, tokens: str, decode: int, numerics: str, backend: str) -> None:
    """Measure time a token and peak memory at lengths of context, past the config's limit too."""
    lengths = lengths_of(tokens)
    model = with_positions(load_model(ckpt, numerics, backend), max(lengths) + decode)
    table = Table(box=None, pad_edge=False)
    for heading in ("tokens", "prefill s", "ms a token", "decode ms a token", "global cache", "peak memory so far"):
        table.add_column(heading, justify="right")
    for length in lengths:
        with waiting(f"{length} tokens"):
            cost = measure_context(model, length, decode)
        times = (f"{cost.prefill:.1f}", f"{1e3 * cost.prefill / length:.2f}", f"{1e3 * cost.decode:.1f}")
        table.add_row(str(length), *times, f"{cost.cache / 1e6:.2f} MB", f"{cost.peak / 1e9:.2f} GB")
    Console().print(table)
