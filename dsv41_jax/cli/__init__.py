"""`dsv41`: look at a checkpoint, generate from it, write its logits. Results on stdout, progress on stderr."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from dsv41_jax.model import Model
from dsv41_jax.numerics import NUMERICS

STDERR = Console(stderr=True, markup=False)  # names of files may hold brackets
COMMANDS = {  # the module of each: imported when the command is asked for, or listed
    "info": "show", "verify": "show", "convert": "show", "generate": "run", "chat": "run", "logits": "run",
    "demo": "run", "profile": "measure", "context": "measure",
}  # fmt: skip

prefill_option = click.option(
    "--prefill",
    default="full",
    show_default=True,
    type=click.Choice(["full", "replay"]),
    help="replay: an approximation that runs the upper layers on the end of the prompt alone",
)
numerics_option = click.option(
    "--numerics", default="reference", show_default=True, type=click.Choice(list(NUMERICS)), help="arithmetic by name"
)
backend_option = click.option(
    "--backend", default="xla", show_default=True, type=click.Choice(["xla", "pallas"]), help="pallas: the GPU kernels"
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `load_model` takes."""
    return numerics_option(backend_option(command))


@contextmanager
def progress(what: str, counter: ProgressColumn) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, advanced by what it is given: done, total, the name of the newest."""
    columns = (
        TextColumn(what),
        BarColumn(),
        counter,
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    with Progress(*columns, console=STDERR, transient=True) as bar:
        task = bar.add_task("", total=None, name="")

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, name=name)

        yield advance


def load_model(path: str, numerics: str, backend: str = "xla") -> Model:
    """`Model.from_pretrained` behind a progress bar."""
    with progress("loading", MofNCompleteColumn()) as advance:
        return Model.from_pretrained(path, numerics=numerics, backend=backend, on_progress=advance)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """A spinner on stderr until the body ends or calls what it is given."""
    with STDERR.status(f"{what} (the first time compiles)") as status:
        yield status.stop


def lengths_of(text: str) -> list[int]:
    """Comma-separated numbers of tokens. Raises ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"tokens: {text!r} is not a comma-separated list of numbers of at least 1")
    return [int(part) for part in parts]


class Commands(click.Group):
    """The commands by name, without those that nobody asks for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command from its module."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"{__name__}.{COMMANDS[cmd_name]}"), cmd_name)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsv41-jax")
def app() -> None:
    """DeepSeek-V4.1-Flash in JAX. CKPT is a checkpoint directory, in the released layout or as `dsv41 convert` wrote it
    with Orbax, the name of one on the Hugging Face hub (hf://owner/name@revision), or `tiny`, the bundled one."""


def main(arguments: list[str] | None = None) -> None:
    """The entry point: whatever the input, an error is one line on stderr and exit status 2."""
    try:
        app.main(arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        fail(error.format_message())
    except (ValueError, OSError, NotImplementedError) as error:
        fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", 130)


def fail(message: str, status: int = 2) -> None:
    """One line on stderr, then exit."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
