"""`dsv41 info`, `verify`, `convert`: what a checkpoint holds."""

import sys

import click
from jax.sharding import AbstractMesh
from rich.progress import DownloadColumn
from rich.table import Table

from dsv41_jax.cli.options import described_mesh
from dsv41_jax.cli.terminal import note, progress, say, show, visible
from dsv41_jax.config import Config
from dsv41_jax.engine.tables import PLACEMENTS
from dsv41_jax.files.checkpoint import open_checkpoint
from dsv41_jax.files.directory import LAYOUTS, CheckpointError, locate
from dsv41_jax.files.expected import Expected, expected_tensors
from dsv41_jax.files.inventory import active, device_bytes, table_bytes, totals
from dsv41_jax.nn.transformer import abstract_parameters


@click.command()
@click.argument("ckpt")
@click.option("--mesh", "mesh_text", help="bytes on each device of a mesh, e.g. data=1,expert=8; it need not exist")
def info(ckpt: str, mesh_text: str | None) -> None:
    """Layer plan, parameters and bytes of CKPT, if all its tensors are there: from headers alone, so files may end
    behind them. `flash` is the released config, without any files."""
    mesh = None if mesh_text is None else described_mesh(mesh_text)
    if not ckpt:
        raise ValueError("CKPT: '' is no checkpoint")
    if ckpt == "flash":
        cfg = Config.flash()
        expected = expected_tensors(cfg)
    else:
        stored = open_checkpoint(ckpt, headers_only=True)
        cfg, expected = stored.config, stored.check()
    shares = None if mesh is None else device_table(cfg, mesh)
    show(plan_table(cfg))
    show(parts_table(expected))
    if shares is not None:
        show(shares)
    decode, prefill = active(expected, cfg)
    say(f"\nparameters that a generated token uses: {decode:,}; a prompt token: {prefill:,}")
    if cfg.unknown_keys:
        say(f"config keys kept but not known: {', '.join(cfg.unknown_keys)}")


@click.command()
@click.argument("ckpt")
def verify(ckpt: str) -> None:
    """Check names, shapes, dtypes, sizes and shards of CKPT against its config, and of an Orbax checkpoint every byte
    against its manifest: a line a deviation, then exit 1."""
    directory, arrays, nbytes = locate(ckpt), 0, 0
    try:
        stored = open_checkpoint(directory)
        problems, (arrays, nbytes) = stored.verify(), stored.held()
    except CheckpointError as error:
        problems = list(error.problems)
    for problem in problems:
        say(problem)
    say(f"{directory}: {arrays:,} tensors, {nbytes:,} bytes, {len(problems)} deviations")
    sys.exit(1 if problems else 0)


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--to", type=click.Choice(LAYOUTS), help="default: the layout that SRC is not in")
@click.option("--overwrite", is_flag=True, help="replace the checkpoint DST once the new one is complete")
def convert(src: str, dst: str, to: str | None, overwrite: bool) -> None:
    """Write checkpoint SRC as DST: from the released layout to Orbax, or from Orbax back, byte for byte."""
    from dsv41_jax.files.convert import convert_checkpoint  # Orbax takes seconds to import

    with progress("converting", DownloadColumn()) as advance:
        convert_checkpoint(src, dst, to, overwrite=overwrite, on_progress=advance)
    note(f"{dst}: complete")


def plan_table(cfg: Config) -> Table:
    """The layer plan: what each layer is and where it reads."""
    table = Table(box=None, pad_edge=False, title="Layer plan", title_justify="left")
    headings = ("layer", "mode", "ratio", "KV\nfrom", "ids\nfrom", "candidates", "Engram\ntable", "draft")
    for heading in headings:  # 60 columns in all
        table.add_column(heading, justify="right" if heading in ("layer", "ratio") else "left", no_wrap=True)
    for plan in cfg.layers:
        pool = "publishes" if plan.publishes_candidates else "obeys" if plan.obeys_candidates else ""
        sources = ("" if source is None else str(source) for source in (plan.kv_source, plan.index_source))
        slot = "" if plan.engram_slot is None else str(plan.engram_slot)
        table.add_row(
            str(plan.id), plan.mode, str(plan.ratio), *sources, pool, slot, "yes" if plan.draft_feature else ""
        )
    return table


def parts_table(expected: dict[str, Expected]) -> Table:
    """Parameters and stored bytes by part."""
    counts, sizes = totals(expected)
    table = Table(box=None, pad_edge=False, title="\nParts", title_justify="left")
    for heading in ("part", "parameters", "bytes"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part in sorted(counts, key=counts.get, reverse=True):
        table.add_row(visible(part), f"{counts[part]:,}", f"{sizes[part]:,}")
    table.add_row(f"all {len(expected):,} tensors", f"{counts.total():,}", f"{sizes.total():,}")
    return table


def device_table(cfg: Config, mesh: AbstractMesh) -> Table:
    """Bytes on each device of a mesh: the parameters by part, then the Engram tables for each of their places."""
    sizes = device_bytes(abstract_parameters(cfg), mesh)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    table = Table(box=None, pad_edge=False, title=f"\nOn each of {mesh.size} devices ({axes})", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for part, size in sizes.most_common():
        table.add_row(visible(part), f"{size:,}")
    table.add_row("all parameters", f"{sizes.total():,}")
    for placement in PLACEMENTS if cfg.engram_layer_ids else ():
        device, host = table_bytes(cfg, placement, mesh.size)
        on_host = f", and {host:,} in host memory" if host else ""
        table.add_row(f"engram tables, {placement!r}", f"{device:,}{on_host}")
    return table
