"""The numerics: which of the released program's quantizers are on, and how caches are kept (`pallas_kernels.quantize`).

    activation   FP8                     into every FP8 and FP4 linear
    window KV    FP8, all H channels     after rope
    main KV      NVFP4                   after rope
    index key,   MXFP4                   after rope
      index query

A fake quantizer gives back the values that the codes stand for. Caches keep either those values or, packed, their
codes and scales as bytes; unpacking a packed row gives the fake quantizer's values bit for bit.
Source: `act_quant` and `fp4_act_quant` of the released `inference/kernel.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import BackendError
from pallas_kernels.pack import width
from pallas_kernels.quantize import (
    pack_bf16,
    pack_fp8,
    pack_mxfp4,
    pack_nvfp4,
    round_fp8,
    round_mxfp4,
    round_nvfp4,
    unpack_bf16,
    unpack_fp8,
    unpack_mxfp4,
    unpack_nvfp4,
)
from pallas_kernels.target import use_kernel


def keep(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The quantizer that is off."""
    return x


Quantizer = Callable[[Array], Array]


@dataclass(frozen=True)
class Storage:
    """How cached rows are kept: `pack` writes, `unpack(rows, dtype)` reads; calling it rounds as writing and reading
    would. `bytes_of` gives the bytes of a packed row of so many channels; without it rows are values. `layout` is what
    the operation `pallas_kernels.pack` calls it, if it knows it."""

    pack: Quantizer
    unpack: Callable[[Array, DTypeLike], Array]
    bytes_of: Callable[[int], int] | None = None
    layout: str | None = None

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return self.unpack(self.pack(x), x.dtype)

    def row(self, channels: int, dtype: DTypeLike) -> tuple[int, jnp.dtype]:
        """(elements, dtype) of a stored row of so many channels."""
        return (
            (channels, jnp.dtype(dtype)) if self.bytes_of is None else (self.bytes_of(channels), jnp.dtype(jnp.uint8))
        )


def values(quantizer: Quantizer = keep) -> Storage:
    """Rows kept as values that were rounded when they were written."""
    return Storage(quantizer, lambda rows, dtype: rows.astype(dtype))


FP8 = Storage(pack_fp8, unpack_fp8, partial(width, layout="fp8"), "fp8")
NVFP4 = Storage(pack_nvfp4, unpack_nvfp4, partial(width, layout="nvfp4"), "nvfp4")
MXFP4 = Storage(pack_mxfp4, unpack_mxfp4, partial(width, layout="mxfp4"), "mxfp4")
BF16 = Storage(pack_bf16, unpack_bf16, lambda k: 2 * k)
_KEPT = values()


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How the arithmetic is carried out: the activations' dtype, the quantizer of activations, how caches are kept,
    and the backend of the operations in `pallas_kernels`. One code path serves them all."""

    name: str
    dtype: jnp.dtype
    activation: Quantizer = keep
    window: Storage = _KEPT
    main: Storage = _KEPT
    index: Storage = _KEPT
    backend: str = "xla"

    def with_cache(self, cache: str) -> "Numerics":
        """The same arithmetic over caches of another format, by its name in CACHES."""
        if cache not in CACHES:
            raise ValueError(f"cache: {cache!r} is not one of {', '.join(map(repr, CACHES))}")
        return self._over(f"{self.name} with cache {cache}", CACHES[cache])

    def _over(self, name: str, cache: tuple[Storage, Storage, Storage]) -> "Numerics":
        window, main, index = cache
        return replace(self, name=name, window=window, main=main, index=index)


# Caches by name (window, main, index keys): unquantized values, or bytes of these formats; "fp4" is the released one.
CACHES = {
    "exact": (_KEPT, _KEPT, _KEPT),
    "fp4": (FP8, NVFP4, MXFP4),
    "fp8": (FP8, FP8, FP8),
    "bf16": (BF16, BF16, BF16),
}
_QUANTIZED = (values(round_fp8), values(round_nvfp4), values(round_mxfp4))
_BFLOAT16, _FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_EXACT = Numerics(name="float32", dtype=_FLOAT32)
_RELEASED = Numerics(name="reference", dtype=_BFLOAT16, activation=round_fp8)
NUMERICS = {
    numerics.name: numerics
    for numerics in (
        _EXACT,
        _EXACT._over("cachequant", _QUANTIZED),
        _RELEASED._over("reference", _QUANTIZED),
        _RELEASED._over("fast", CACHES["fp4"]),
        _RELEASED._over("fast-fp8", CACHES["fp8"]),
        _RELEASED._over("fast-bf16", CACHES["bf16"]),
    )
}


def numerics_by_name(name: str, backend: str = "xla") -> Numerics:
    """By name: `float32` (no quantizer), `cachequant` (float32 with quantized caches), `reference` (as released),
    `fast` (the same with caches packed to bytes), `fast-fp8` and `fast-bf16` (with caches of those formats).

    Raises BackendError for backend "pallas" where its kernels cannot run: without a GPU that has tiles, or in float32.
    """
    if name not in NUMERICS:
        raise ValueError(f"numerics: {name!r} is not one of {', '.join(map(repr, NUMERICS))}")
    numerics = replace(NUMERICS[name], backend=backend)
    if use_kernel("the model", backend, "mosaic") and numerics.dtype != _BFLOAT16:
        raise BackendError(
            f"backend 'pallas': kernels take bfloat16 activations, numerics {name!r} has {numerics.dtype}"
        )
    return numerics


def check_backend(backend: str, devices: int) -> None:
    """Raise BackendError for kernels on several devices: automatic partitioning cannot split them."""
    if backend == "pallas" and devices > 1:
        raise BackendError(f"backend 'pallas': kernels run on one device, the mesh has {devices}; use backend='xla'")
