"""`dsv41 profile`, `context`: what things cost on this machine."""

from pathlib import Path

import click

from dsv41_jax.cli import lengths_of
from dsv41_jax.cli.options import Load, check_writable, model_options
from dsv41_jax.cli.terminal import row, waiting
from dsv41_jax.measure import measure_context, measure_costs, with_positions


@click.command()
@click.argument("ckpt")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="sequences decoded together")
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(1), help="the median of so many runs counts"
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON file to write")
@model_options
def profile(ckpt: str, batch: int, repeats: int, out: Path, load: Load) -> None:
    """Measure what verifying and drafting cost on this machine, for `generate --cost`."""
    check_writable(out)
    model = load(ckpt)
    headings = ("tokens a step", "milliseconds")
    with waiting("measuring") as spinner:

        def show_cost(what: str, seconds: float) -> None:
            spinner.stop()
            row((what, f"{1e3 * seconds:.2f}"), headings)
            spinner.start()

        row(headings, headings)
        table = measure_costs(model, batch, repeats, show_cost)
    table.write(out)


@click.command()
@click.argument("ckpt")
@click.option(
    "--tokens",
    default="1024,8192,65536",
    show_default=True,
    help="comma-separated lengths, short ones first; 64k is 65536, 1M 1048576",
)
@click.option("--decode", default=64, show_default=True, type=click.IntRange(1), help="tokens decoded behind each")
@model_options
def context(ckpt: str, tokens: str, decode: int, load: Load) -> None:
    """Measure time a token and peak memory at lengths of context, past the config's limit too; a row a length."""
    lengths = lengths_of(tokens)
    model = with_positions(load(ckpt), max(lengths) + decode)
    headings = ("tokens", "prefill s", "ms a token", "decode ms a token", "global cache", "peak memory so far")
    row(headings, headings)
    for length in lengths:
        with waiting(f"{length} tokens") as spinner:
            cost = measure_context(
                model, length, decode, on_phase=lambda phase, n=length: spinner.now(f"{n} tokens: {phase}")
            )
        times = (f"{cost.prefill:.1f}", f"{1e3 * cost.prefill / length:.2f}", f"{1e3 * cost.decode:.1f}")
        row((str(length), *times, f"{cost.cache / 1e6:.2f} MB", f"{cost.peak / 1e9:.2f} GB"), headings)
