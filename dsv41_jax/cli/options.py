"""The options that several commands have, and what they stand for."""

from collections.abc import Callable

import click
from jax.sharding import AbstractMesh
from rich.progress import MofNCompleteColumn

from dsv41_jax import sharding
from dsv41_jax.cli.terminal import progress
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
numerics_option = click.option(
    "--numerics", default="reference", show_default=True, type=click.Choice(list(NUMERICS)), help="arithmetic by name"
)
backend_option = click.option(
    "--backend", default="xla", show_default=True, type=click.Choice(["xla", "pallas"]), help="pallas: the GPU kernels"
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `load_model` takes."""
    return numerics_option(backend_option(command))


def load_model(path: str, numerics: str, backend: str = "xla") -> Model:
    """`Model.from_pretrained` behind a progress bar."""
    with progress("loading", MofNCompleteColumn()) as advance:
        return Model.from_pretrained(path, numerics=numerics, backend=backend, on_progress=advance)


def described_mesh(text: str) -> AbstractMesh:
    """The mesh of `data=1,expert=8`; it needs no devices. Raises ValueError."""
    devices = 1
    for part in text.split(","):
        size = part.partition("=")[2].strip()
        devices *= int(size) if size.isdecimal() else 1
        if devices > LARGEST_MESH:
            raise ValueError(f"mesh: {text!r} is of more than {LARGEST_MESH:,} devices")
    return sharding.parse_mesh(text)
