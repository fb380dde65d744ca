"""`dsv41`: look at a checkpoint, generate from it, write its logits. Results on stdout, progress on stderr."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from dsv41_jax.cli.terminal import STDERR, note

__all__ = ["STDERR", "app", "fail", "lengths_of", "main", "number_of", "prompt_of", "text_of"]
COMMANDS = {  # the module of each: imported when the command is asked for, or listed
    "info": "show", "verify": "show", "convert": "show", "generate": "run", "chat": "chat", "logits": "run",
    "demo": "run", "profile": "measure", "context": "measure",
}  # fmt: skip
UNITS = {"k": 1 << 10, "m": 1 << 20}
LARGEST_NUMBER = (1 << 31) - 1  # positions are 32-bit integers


def number_of(text: str, minimum: int = 0) -> int:
    """A number of tokens: `4096`, `64k` (65,536), `1M` (1,048,576). Raises ValueError for anything else."""
    given = text.strip()
    unit = UNITS.get(given[-1:].lower(), 1)
    digits = given if unit == 1 else given[:-1]
    if not digits.isdecimal() or int(digits) < minimum:
        raise ValueError(f"{text!r} is not a number of at least {minimum}, as 4096, 64k or 1M")
    if int(digits) * unit > LARGEST_NUMBER:
        raise ValueError(f"{given} is more than {LARGEST_NUMBER}")
    return int(digits) * unit


def lengths_of(text: str) -> list[int]:
    """Comma-separated numbers of tokens. Raises ValueError for anything else."""
    try:
        return [number_of(part, 1) for part in text.split(",")]
    except ValueError as error:
        if "more than" in str(error):
            raise ValueError(f"tokens: {error}") from None
        raise ValueError(f"tokens: {text!r} is not a comma-separated list of numbers of at least 1") from None


def text_of(name: str, given: str) -> str:
    """A text of the command line, in UTF-8 whatever the locale. Raises ValueError for other bytes."""
    if not any("\ud800" <= one <= "\udfff" for one in given):
        return given
    try:  # bytes that the locale does not know are kept as half characters
        return os.fsencode(given).decode()
    except UnicodeError:
        raise ValueError(f"{name}: {given!r} is not UTF-8") from None


def prompt_of(given: str) -> str:
    """The text of `--prompt`: itself, of standard input (`-`) or of a file (`@FILE`) without its last newline; `@@text`
    is `@text`. Raises ValueError, OSError."""
    if given.startswith("@@"):
        return text_of("prompt", given[1:])
    if given != "-" and not given.startswith("@"):
        return text_of("prompt", given)
    raw = sys.stdin.buffer.read() if given == "-" else Path(given[1:]).read_bytes()
    try:
        return raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        where = "standard input" if given == "-" else given[1:]
        raise ValueError(f"prompt: {where} is not UTF-8 (byte {raw[error.start]:#x} at {error.start})") from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C as click's Abort, before click answers it with an empty line."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort from None


class Commands(click.Group):
    """The commands by name, without those that nobody asks for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command from its module."""
        if cmd_name not in COMMANDS:
            return None
        with interruptible():
            return getattr(importlib.import_module(f"{__name__}.{COMMANDS[cmd_name]}"), cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with interruptible():
            return super().invoke(ctx)


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
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except (ValueError, OSError, NotImplementedError) as error:
        fail(str(error))
    except Exception as error:  # what no check foresaw: no memory, no such number, a library's own
        fail(f"{type(error).__name__}: {error}")


def fail(message: str, status: int = 2) -> None:
    """One line on stderr, then exit."""
    note(f"error: {' '.join(message.split())}")
    sys.exit(status)
