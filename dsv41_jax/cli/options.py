"""The options that several commands have, and what they stand for."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax
from jax.sharding import AbstractMesh
from rich.progress import MofNCompleteColumn

from dsv41_jax import sharding
from dsv41_jax.cli import number_of
from dsv41_jax.cli.terminal import progress
from dsv41_jax.engine.tables import PLACEMENTS, check_placement
from dsv41_jax.model import Model
from dsv41_jax.numerics import NUMERICS

LARGEST_MESH = 1 << 20  # devices

prefill_option = click.option(
    "--prefill",
    default="full",
    show_default=True,
    type=click.Choice(["full", "replay"]),
    help="replay: an approximation that runs the upper layers on the end of the prompt alone",
)
seed_option = click.option("--seed", default=0, show_default=True, type=click.IntRange(0, (1 << 32) - 1))
MODEL_OPTIONS = (
    click.option(
        "--numerics",
        default="reference",
        show_default=True,
        type=click.Choice(list(NUMERICS)),
        help="arithmetic by name",
    ),
    click.option(
        "--backend",
        default="xla",
        show_default=True,
        type=click.Choice(["xla", "pallas"]),
        help="pallas: the GPU kernels",
    ),
    click.option("--mesh", help="devices to split experts and batches over, e.g. data=1,expert=8"),
    click.option(
        "--engram",
        default="mmap",
        show_default=True,
        type=click.Choice(PLACEMENTS),
        help="where Engram tables lie: the file, host memory, every device, or split over the mesh",
    ),
    click.option(
        "--compile-cache",
        type=click.Path(path_type=Path, file_okay=False),
        help="directory that keeps compiled programs for the next run",
    ),
)
Load = Callable[[str], Model]


class Count(click.ParamType):
    """A number of tokens, for people: `64k`."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """`number_of`."""
        try:
            return value if isinstance(value, int) else number_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `load_model`, checked, as the argument `load`: a function of CKPT."""

    @functools.wraps(command)
    def with_load(*, mesh: str | None, compile_cache: Path | None, **given: Any) -> None:
        how = {name: given.pop(name) for name in ("numerics", "backend", "engram")}
        devices = None if mesh is None else mesh_of_devices(mesh)
        check_placement(how["engram"], devices)
        if compile_cache is not None:
            keep_compiled(compile_cache)
        command(load=functools.partial(load_model, mesh=devices, **how), **given)

    for option in reversed(MODEL_OPTIONS):
        with_load = option(with_load)
    return with_load


def load_model(path: str, numerics: str, **how: Any) -> Model:
    """`Model.from_pretrained` behind a progress bar."""
    if not path or path == "flash":
        raise ValueError(f"CKPT: {path!r} is no checkpoint" + (", but a config without weights" if path else ""))
    with progress("loading", MofNCompleteColumn()) as advance:
        return Model.from_pretrained(path, numerics=numerics, on_progress=advance, **how)


def keep_compiled(directory: Path) -> None:
    """Compiled programs are read from a directory and written to it. Raises OSError where that cannot be."""
    directory.mkdir(parents=True, exist_ok=True)
    check_writable(directory / "program")
    jax.config.update("jax_compilation_cache_dir", str(directory))


def check_writable(path: Path) -> None:
    """Raise ValueError unless a file of this name can be written: asked before a model is loaded."""
    if path.is_dir():
        raise ValueError(f"{path}: is a directory")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: its directory does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: its directory is not writable")


def mesh_of_devices(text: str) -> jax.sharding.Mesh:
    """The mesh of `data=1,expert=8` over the first devices. Raises ValueError where they are too few."""
    mesh, devices = described_mesh(text), jax.devices()
    if mesh.size > len(devices):
        raise ValueError(f"mesh: {text!r} takes {mesh.size} devices, there are {len(devices)}")
    sizes = tuple(mesh.shape.values())
    return jax.make_mesh(sizes, mesh.axis_names, axis_types=mesh.axis_types, devices=devices[: mesh.size])


def described_mesh(text: str) -> AbstractMesh:
    """The mesh of `data=1,expert=8`; it needs no devices. Raises ValueError."""
    devices = 1
    for part in text.split(","):
        size = part.partition("=")[2].strip()
        devices *= int(size) if size.isdecimal() else 1
        if devices > LARGEST_MESH:
            raise ValueError(f"mesh: {text!r} is of more than {LARGEST_MESH:,} devices")
    return sharding.parse_mesh(text)
