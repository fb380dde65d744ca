"""Arrays for NumPy's files."""

from pathlib import Path

import jax
import numpy as np

from dsv41_jax import atomic


def to_host(value: jax.Array) -> np.ndarray:
    """As NumPy's own dtypes can hold it: bfloat16 becomes float32."""
    return np.asarray(value, np.float32 if value.dtype.name == "bfloat16" else value.dtype)


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Whole or not at all: a reader never sees half a file, and a failure leaves the old one."""
    with atomic.file(path) as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
