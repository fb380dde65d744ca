"""What reaches the user: results on stdout, progress and remarks on stderr, and bars only where it is a terminal.

Texts of models and names in files are not ours: an escape sequence in one could retitle a terminal or move its cursor.
All that is printed goes through `visible`.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

STDERR = Console(stderr=True, markup=False)  # names of files may hold brackets
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with its control characters (all but newline and tab) as `\xNN`, half characters as `\udNNN`.

    >>> print(visible("a\x1b]0;b\x07\tc"))
    a\x1b]0;b\x07	c
    """
    return _UNSEEN.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def say(text: str, end: str = "\n") -> None:
    """To stdout, at once."""
    sys.stdout.write(visible(text) + end)
    sys.stdout.flush()


def note(text: str, end: str = "\n") -> None:
    """To stderr, at once."""
    sys.stderr.write(visible(text) + end)
    sys.stderr.flush()


@contextmanager
def progress(what: str, counter: ProgressColumn) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, advanced by what it is given: done, total, the name of the newest."""
    columns = (
        TextColumn(what),
        BarColumn(),
        counter,
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    if not STDERR.is_terminal:  # where a bar that is off would leave an empty line
        yield lambda done, total, name: None
        return
    with Progress(*columns, console=STDERR, transient=True) as bar:
        task = bar.add_task("", total=None, name="")

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, name=visible(name))

        yield advance


class Spinner:
    """What `waiting` shows."""

    def __init__(self, what: str):
        self._status = STDERR.status(what) if STDERR.is_terminal else None

    def start(self) -> None:
        """Show it."""
        if self._status is not None:
            self._status.start()

    def stop(self) -> None:
        """Take it away."""
        if self._status is not None:
            self._status.stop()

    def now(self, what: str) -> None:
        """Another text."""
        if self._status is not None:
            self._status.update(visible(what))


@contextmanager
def waiting(what: str) -> Iterator[Spinner]:
    """A spinner on a terminal until the body ends or stops it."""
    spinner = Spinner(f"{what} (the first time compiles)")
    spinner.start()
    try:
        yield spinner
    finally:
        spinner.stop()


def show(table: Table) -> None:
    """A table on stdout. A terminal that is narrower wraps its lines; no cell is cut."""
    console = Console(markup=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1 << 10)).maximum)
    console.print(table)


def row(cells: Sequence[str], headings: Sequence[str]) -> None:
    """A line of a table on stdout that grows as its rows are known."""
    say("  ".join(cell.rjust(max(len(heading), 9)) for cell, heading in zip(cells, headings, strict=True)))
