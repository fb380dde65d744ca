"""Shapes of sparse attention, and what it must give in float64.

Inputs are as in the model: neighbouring queries share most of their selected rows, the last rows are the window, some
lists end in -1. Products take bfloat16: q, rows and the rounded exp(s - maximum).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import oracle64
from pallas_kernels.case import Case
from pallas_kernels.formats import GROUP, NVFP4_GROUP, cast
from pallas_kernels.quantize import unpack_fp8, unpack_nvfp4
from pallas_kernels.sparse_attention import kernel, reference

TOLERANCE = 2.0**-8  # of a query's norm: three times what the roundings above leave on random inputs
LSE_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 2.0**-7  # q, rows, p and ds are rounded to bfloat16 before their products


def attend64(q: Any, rows: np.ndarray, sink: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of one query [N, H] over its valid rows [K, H]."""
    q, sink = np.asarray(q).astype(np.float64), sink.astype(np.float64)
    scores = np.concatenate([scale * q @ rows.T, sink[:, None]], axis=1)
    top = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=1, keepdims=True)
    return (p[:, :-1] / total) @ rows, (top + np.log(total))[:, 0]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes in the letters of `dsv41_jax.config`; X rows of window, S of main, a batch entry."""

    B: int
    T: int
    X: int
    S: int
    W: int
    C: int
    packed: bool
    N: int = 64
    H: int = 512

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Of the window and of main."""
        if self.packed:
            return self.H + self.H // GROUP, self.H // 2 + self.H // NVFP4_GROUP
        return 2 * self.H, 2 * self.H

    @property
    def unpack(self) -> dict[str, Callable[..., Any]]:
        """Arguments that say how rows are read."""
        return {"unpack_window": unpack_fp8, "unpack_main": unpack_nvfp4} if self.packed else {}


def _rows(key: jax.Array, shape: Shape, count: int, format_: str) -> jax.Array:
    """Random rows; packed ones are random codes with scales between 1/4 and 2."""
    if not shape.packed:
        return jax.random.normal(key, (shape.B, count, shape.H), jnp.bfloat16)
    codes, scales = jax.random.split(key)
    fp8 = shape.H, shape.H // GROUP, 120, 122
    nvfp4 = shape.H // 2, shape.H // NVFP4_GROUP, 0x28, 0x40
    size, groups, low, high = fp8 if format_ == "fp8" else nvfp4
    code = jax.random.bits(codes, (shape.B, count, size), jnp.uint8)
    if format_ == "fp8":  # no code may be NaN
        code = jnp.where(code & 0x7F == 0x7F, code ^ 1, code)
    scale = jax.random.randint(scales, (shape.B, count, groups), low, high).astype(jnp.uint8)
    return jnp.concatenate([code, scale], axis=-1)


def _selected(key: jax.Array, shape: Shape) -> jax.Array:
    """Ids that change for one in five from query to query."""
    change, start = jax.random.split(key)
    steps = jnp.cumsum(jax.random.bernoulli(change, 0.2, (shape.B, shape.T, shape.C)), axis=1, dtype=jnp.int32)
    first = jax.random.randint(start, (shape.B, 1, shape.C), 0, shape.S)
    return (first + steps * 7919) % shape.S


def inputs(seed: int, shape: Shape) -> tuple[jax.Array, ...]:
    """(q, window, window_ids, main, main_ids, sink). The first query of an entry misses part of its main rows, the
    second has no main rows, the third no rows at all."""
    keys = jax.random.split(jax.random.key(seed), 6)
    q = jax.random.normal(keys[0], (shape.B, shape.T, shape.N, shape.H), jnp.bfloat16)
    window_ids = (jnp.arange(shape.T)[:, None] + jnp.arange(shape.W)) % max(shape.X, 1)
    window_ids = jnp.broadcast_to(window_ids, (shape.B, shape.T, shape.W)).astype(jnp.int32)
    main_ids = _selected(keys[1], shape)
    if shape.T > 2:
        main_ids = main_ids.at[:, 0, shape.C // 3 :].set(-1).at[:, 1:3].set(-1)
        window_ids = window_ids.at[:, 2].set(-1).at[:, 3:, : shape.W // 2].set(-1)
    window, main = _rows(keys[2], shape, shape.X, "fp8"), _rows(keys[3], shape, shape.S, "nvfp4")
    return q, window, window_ids, main, main_ids, jax.random.normal(keys[4], (shape.N,))


def sample(shape: Shape) -> list[tuple[int, int]]:
    """All queries of a small call; of a large one the first four, the last, and some between."""
    every = [(b, t) for b in range(shape.B) for t in range(shape.T)]
    return every if len(every) <= 16 else [*every[:4], *every[4 :: len(every) // 8], every[-1]]


def expected(given: tuple[Any, ...], b: int, t: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) of query t of entry b in float64."""
    q, window, window_ids, main, main_ids, sink = given
    parts = []
    for rows, ids in ((window, window_ids), (main, main_ids)):
        taken = np.asarray(ids[b, t])
        parts.append(oracle64.cached_rows(np.asarray(rows[b][taken[taken >= 0]]), q.shape[-1]))
    return attend64(q[b, t], np.concatenate(parts), np.asarray(sink), scale)


def _problems(shape: Shape, given: tuple[Any, ...], output: Any) -> list[str]:
    some = sample(shape)
    o, lse = (np.stack([np.asarray(x[at]).astype(np.float64) for at in some]) for x in output)
    o64, lse64 = (np.stack(part) for part in zip(*(expected(given, *at, shape.H**-0.5) for at in some), strict=True))
    return [
        *oracle64.rows_off("o", some, o, o64, TOLERANCE),
        *oracle64.beyond("lse", some, np.abs(lse - lse64).max(axis=1), LSE_TOLERANCE),
    ]


def case(name: str, shape: Shape, out_dtype: DTypeLike = jnp.bfloat16) -> Case:
    """The forward pass; the model reads o in bfloat16."""
    options = {"scale": shape.H**-0.5, **shape.unpack}

    def plain(*args: Any) -> Any:
        o, lse = reference.sparse_attention(*args, **options)
        return cast(o, out_dtype), lse

    queries = shape.B * shape.T
    taken = tuple(
        min(count * shape.B, ids * queries) for count, ids in ((shape.X, shape.W), (shape.S, shape.C))
    )  # distinct rows at most
    ids = 4.0 * queries * (shape.W + shape.C)
    nbytes = 4.0 * queries * shape.N * shape.H + ids + sum(n * b for n, b in zip(taken, shape.row_bytes, strict=True))
    return Case(
        name=name,
        inputs=lambda seed: inputs(seed, shape),
        kernel=partial(kernel.sparse_attention, out_dtype=out_dtype, **options),
        reference=plain,
        problems=partial(_problems, shape),
        flops=4.0 * queries * shape.N * shape.H * (shape.W + shape.C),
        nbytes=nbytes,
    )


def gradient64(given: tuple[Any, ...], do: np.ndarray, dlse: np.ndarray, scale: float) -> list[np.ndarray]:
    """Gradients of q, window, main and sink of rows of values, in float64."""
    q, window, window_ids, main, main_ids, sink = (np.asarray(x) for x in given)
    dq = np.zeros(q.shape)
    rows64 = [rows.astype(np.float64) for rows in (window, main)]
    drows, dsink = [np.zeros(rows.shape) for rows in rows64], np.zeros(len(sink))
    for b, t in np.ndindex(q.shape[:2]):
        taken = [ids[b, t][ids[b, t] >= 0] for ids in (window_ids, main_ids)]
        rows = np.concatenate([values[b][ids] for values, ids in zip(rows64, taken, strict=True)])
        query, up = q[b, t].astype(np.float64), do[b, t].astype(np.float64)
        o, lse = attend64(query, rows, sink, scale)
        p = np.exp(scale * query @ rows.T - lse[:, None])
        delta = (up * o).sum(axis=1) - dlse[b, t]
        ds = scale * p * (up @ rows.T - delta[:, None])
        dq[b, t] = ds @ rows
        each = np.split(ds.T @ query + p.T @ up, [len(taken[0])])
        for drow, ids, value in zip(drows, taken, each, strict=True):
            np.add.at(drow[b], ids, value)
        dsink -= np.exp(sink.astype(np.float64) - lse) * delta
    return [dq, *drows, dsink]


def gradient(name: str, shape: Shape) -> Case:
    """The backward pass. Its sums over queries are atomic, in an order of their own."""
    options = {"scale": shape.H**-0.5}

    def draw(seed: int) -> tuple[jax.Array, ...]:
        given, keys = inputs(seed, shape), jax.random.split(jax.random.key(seed + 1))
        return *given, jax.random.normal(keys[0], given[0].shape), jax.random.normal(keys[1], given[0].shape[:3])

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: Any, window: Any, wids: Any, main: Any, mids: Any, sink: Any, *cotangents: Any, **how: Any) -> Any:
            attend = partial(function, **options, **how)
            back = jax.vjp(lambda q, w, m, sink: attend(q, w, wids, m, mids, sink), q, window, main, sink)[1]
            return back(cotangents)

        return run

    def problems(given: tuple[Any, ...], output: Any) -> list[str]:
        *arrays, do, dlse = given
        expected = gradient64(tuple(arrays), np.asarray(do), np.asarray(dlse), shape.H**-0.5)
        found = []
        for of_, ours, exact in zip(("q", "window", "main", "sink"), output, expected, strict=True):
            error = np.linalg.norm(np.asarray(ours).astype(np.float64) - exact) / np.linalg.norm(exact)
            if not error <= GRADIENT_TOLERANCE:
                found.append(f"gradient of {of_} is off by {error:.2e} of its norm")
        return found

    return Case(
        name=name,
        inputs=draw,
        kernel=of(kernel.sparse_attention),
        reference=of(reference.sparse_attention),
        problems=problems,
        flops=10.0 * shape.B * shape.T * shape.N * shape.H * (shape.W + shape.C),
        repeatable=False,
    )


SMALL_SHAPES = {
    "values": Shape(B=2, T=2, X=9, S=40, W=64, C=64, packed=False),
    "packed, uneven lists": Shape(B=1, T=3, X=20, S=50, W=40, C=70, packed=True),
    "no main rows": Shape(B=1, T=1, X=9, S=0, W=16, C=0, packed=False),
    "odd number of blocks": Shape(B=1, T=4, X=20, S=50, W=64, C=128, packed=True),
}
SMALL = tuple(case(name, shape, jnp.float32) for name, shape in SMALL_SHAPES.items())
MODEL = (
    gradient("gradient of 64, bf16 rows", Shape(B=1, T=64, X=192, S=2048, W=128, C=512, packed=False)),
    case("prefill 4096, bf16 rows", Shape(B=1, T=4096, X=4224, S=131072, W=128, C=512, packed=False)),
    case("prefill 4096, packed rows", Shape(B=1, T=4096, X=4224, S=131072, W=128, C=512, packed=True)),
    case("decode 1, packed rows", Shape(B=1, T=1, X=129, S=65536, W=128, C=512, packed=True)),
    case("decode 16, packed rows", Shape(B=16, T=1, X=129, S=8192, W=128, C=512, packed=True)),
    case("decode 128, packed rows", Shape(B=128, T=1, X=129, S=4096, W=128, C=512, packed=True)),
)
