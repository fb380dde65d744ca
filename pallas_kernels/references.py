"""Names for the references of a kernel's body, which arrive as a flat list: inputs, outputs, scratch."""

from collections.abc import Collection, Iterator
from typing import Any

Ref = Any  # a reference to an array in device or shared memory, or to a barrier: JAX has no public type for it


def named[T](kind: type[T], refs: Iterator[Ref], absent: Collection[str] = ()) -> T:
    """A `kind` (a NamedTuple) of the next references, in the order of its fields; None for those `absent`."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return kind(*(None if name in absent else next(refs) for name in fields))
