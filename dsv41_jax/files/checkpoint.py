"""A checkpoint on disk, in whichever of the layouts it is."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from jax.sharding import Mesh

from dsv41_jax.engine.tables import DeviceTable, Table
from dsv41_jax.files.directory import Progress, is_hub, is_orbax, locate
from dsv41_jax.files.load import Loaded, Source
from dsv41_jax.files.safetensors import Checkpoint
from dsv41_jax.nn.transformer import Transformer


@runtime_checkable
class Stored(Source, Protocol):
    """What every layout answers: `safetensors.Checkpoint` and `orbax.OrbaxCheckpoint`."""

    def parameters(
        self, mesh: Mesh | None = None, *, on_progress: Progress | None = None, loaded: Loaded | None = None
    ) -> Transformer:
        """The parameters as stored, on a mesh or on the default device."""

    def tables(
        self,
        placement: str = "mmap",
        mesh: Mesh | None = None,
        *,
        on_progress: Progress | None = None,
        loaded: Loaded | None = None,
    ) -> tuple[Table | DeviceTable, ...]:
        """The Engram tables in one of their places (`engine.tables`)."""

    def verify(self) -> list[str]:
        """Everything that is wrong, a line each, as far as the layout can tell."""

    def held(self) -> tuple[int, int]:
        """(stored arrays, their bytes)."""


def open_checkpoint(path_or_name: str | Path, *, headers_only: bool = False) -> Stored:
    """A directory of either layout, the bundled `tiny`, or `hf://owner/name[@revision]`. With `headers_only`
    safetensors files may end behind their headers, and of the hub's no data are downloaded. Raises CheckpointError,
    ConfigError."""
    if headers_only and is_hub(path_or_name):
        return Checkpoint(path_or_name, headers_only=True)  # what is published is of the released layout
    directory = locate(path_or_name)
    if not is_orbax(directory):
        return Checkpoint(directory, headers_only=headers_only)
    from dsv41_jax.files.orbax import OrbaxCheckpoint  # Orbax takes seconds to import

    return OrbaxCheckpoint(directory)
