"""What somebody else wrote: read no further than is sane, and repeated in an error no longer than is readable."""

from __future__ import annotations

import errno
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JSON_BYTES = 100_000_000  # of an index, a manifest, a header; the safetensors package stops there too
MOST_PROBLEMS, MOST_CHARACTERS = 8, 500


def regular_size(file: Path) -> int:
    """The bytes of a regular file. Raises OSError for what is none without opening it: a FIFO would wait for a writer,
    and a device never ends."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return found.st_size


def read(file: Path, most: int = JSON_BYTES) -> bytes:
    """A whole file. Raises OSError for more than `most` bytes and for what is no regular file."""
    if (size := regular_size(file)) > most:
        raise OSError(errno.EFBIG, f"{size} bytes, more than {most}", str(file))
    with file.open("rb") as stream:
        return stream.read(most)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice (`object_pairs_hook`). Raises ValueError."""
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(f"names {few(repeated, ', ')} more than once")
    return dict(pairs)


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text, or the start of a long one."""
    return text if len(text) <= most else f"{text[:most]}..."


def shown(value: object) -> str:
    """A value as an error repeats it."""
    try:
        return cut(repr(value))
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a {type(value).__name__} too long to show"


def few(problems: Sequence[str], separator: str = "; ") -> str:
    """The first of many, and how many there are besides."""
    more = len(problems) - MOST_PROBLEMS
    first = [cut(problem, 2 * MOST_CHARACTERS) for problem in problems[:MOST_PROBLEMS]]
    return separator.join([*first, *([f"and {more:,} more"] if more > 0 else [])])
