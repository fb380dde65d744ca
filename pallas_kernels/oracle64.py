"""What the cases compare with: the number formats in float64 NumPy, from bits and tables, and rows that are off.

    E8M0   2**(b - 127)
    E4M3   ml_dtypes' table of 256 values
    E2M1   the sixteen values of the format; two codes a byte, low nibble first

None of it is code that a kernel or its reference runs.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import GROUP, NVFP4_GROUP

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """x at the nearest bfloat16, in float64."""
    return x.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)


def e8m0(scale: Any) -> np.ndarray:
    """2**(b - 127)."""
    return 2.0 ** (np.asarray(scale).astype(np.float64) - 127)


def e2m1(packed: Any) -> np.ndarray:
    """Values of packed pairs of codes."""
    packed = np.asarray(packed)
    return E2M1[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def mxfp4(packed: Any, scale: Any) -> np.ndarray:
    """E2M1 pairs with one E8M0 scale per 32 columns."""
    return e2m1(packed) * np.repeat(e8m0(scale), GROUP, axis=-1)


def fp8_blocks(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """E4M3 [N, K] with one E8M0 scale per block of 32 x 32."""
    rows, columns = weight.shape
    return weight.astype(np.float64) * np.repeat(np.repeat(e8m0(scale), GROUP, 0)[:rows], GROUP, 1)[:, :columns]


def cached_rows(row: np.ndarray, channels: int) -> np.ndarray:
    """Values of rows of a cache, whose width tells how `channels` values are kept: `quantize` has the formats."""
    if row.shape[-1] == 2 * channels:
        row = row.view(jnp.bfloat16)
    if row.dtype != np.uint8:
        return row.astype(np.float64)
    if row.shape[-1] == channels + channels // GROUP:
        return E4M3[row[..., :channels]] * np.repeat(e8m0(row[..., channels:]), GROUP, axis=-1)
    pairs, scale = row[..., : channels // 2], row[..., channels // 2 :]
    if scale.shape[-1] == channels // GROUP:
        return mxfp4(pairs, scale)
    return e2m1(pairs) * np.repeat(E4M3[scale], NVFP4_GROUP, axis=-1)


def sample(count: int, size: int) -> np.ndarray:
    """`size` of `count` numbers, evenly spaced with the first and the last; all, if there are no more."""
    return np.unique(np.linspace(0, count - 1, size).astype(int))


def beyond(name: str, rows: Sequence[Any] | np.ndarray, error: np.ndarray, bound: np.ndarray | float) -> list[str]:
    """One line about the worst of `rows`, if the error of any exceeds its bound; NaN does."""
    bound = np.broadcast_to(bound, error.shape)
    wrong = ~(error <= bound)
    if not wrong.any():
        return []
    worst = int(np.argmax(np.where(wrong, np.nan_to_num(error / np.maximum(bound, 1e-30), nan=np.inf), -1)))
    size = f"{error[worst]:.3g} > {bound[worst]:.3g}" if np.isfinite(error[worst]) else "not finite"
    return [f"{name} is off in {wrong.sum()} of {len(rows)} rows, worst {rows[worst]}: {size}"]


def norms(x: np.ndarray) -> np.ndarray:
    """The Euclidean norm of each row."""
    return np.linalg.norm(x.reshape(len(x), -1), axis=1)


def rows_off(
    name: str, rows: Sequence[Any] | np.ndarray, value: Any, expected: np.ndarray, tolerance: float
) -> list[str]:
    """`beyond` of rows whose error may be `tolerance` of their norm; what is not finite is wrong."""
    value = np.asarray(value).astype(np.float64).reshape(expected.shape)
    return beyond(name, rows, norms(value - expected), tolerance * norms(expected))
