"""Shapes of the site between two sublayers, and what it must give in float64.

X' and the next input are bfloat16: each row's error against float64 may be 1.5 times that of the same row rounded where
the model rounds. The coefficients follow from the X' that was returned; their float32 error is that of fn kept to 16
bits, at most 2**-17 a term with either sign: six standard deviations of the sum. Sinkhorn passes a change of its logits
on at most fourfold, and its 40 half-steps round 5 times each (1.2e-5 in all).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.mhc import kernel, reference, stream
from pallas_kernels.oracle64 import beyond, bfloat16, norms, sample

SIZES: dict[str, Any] = {"iterations": 20, "eps": 1e-20, "hc_eps": 1e-6}
TINY = (
    kernel.Tile(limit=8, columns=32, finish_columns=64),
    kernel.Tile(limit=50, columns=32, steps=2, lanes=8, finish_tokens=2, finish_columns=64),
    stream.Tile(limit=136, slices=1, teams=1, stages=3, fn_stages=2, lag=1),
    stream.Tile(limit=192, slices=1, teams=2, stages=3, fn_stages=2, lag=2),
)
HALF_STEPS = 40 * 5 * 2.0**-24


def inputs(seed: int, lead: tuple[int, ...], streams: int, width: int) -> tuple[jax.Array, ...]:
    """Streams of unit scale with one stream ten times larger and a row of zeros, a doubly stochastic comb, fn of unit
    gain. The last array is fn as the kernel reads it."""
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    count = streams * (streams + 2)
    x = draw(next(keys), (*lead, streams, width)).at[..., 0, :].multiply(10).at[(0,) * len(lead)].set(0)
    y = draw(next(keys), (*lead, width)).at[(0,) * len(lead)].set(0)
    post = 2 * jax.nn.sigmoid(jax.random.normal(next(keys), (*lead, streams)))
    comb = jax.random.normal(next(keys), (*lead, streams, streams))
    comb = reference.sinkhorn(2 * comb, iterations=20, eps=1e-6)
    mix = jax.nn.sigmoid(jax.random.normal(next(keys), (*lead, streams)))
    norm = 1 + draw(next(keys), (width,)) / 8
    fn = jax.random.normal(next(keys), (count, streams * width)) / (streams * width) ** 0.5
    scale, base = jnp.array([1.0, 0.7, 1.5]), jax.random.normal(next(keys), (count,))
    return x, y, post, comb, mix, norm, fn, scale, base, kernel.split_fn(fn)


def exact_coefficients(z: np.ndarray, fn: np.ndarray, scale: np.ndarray, base: np.ndarray, m: int) -> tuple:
    """(pre, post, comb, error bound of the mixes) of rows of float64 streams [K, M*D]."""
    inverse = 1 / np.sqrt((z * z).mean(1, keepdims=True) + SIZES["eps"])
    mixes = z @ fn.T * inverse
    bound = 6 / np.sqrt(3) * 2.0**-17 * np.sqrt((z * z) @ (fn * fn).T) * inverse + 1e-6
    logits = mixes * np.repeat(scale, [m, m, m * m]) + base
    pre, post = (1 / (1 + np.exp(-part)) for part in (logits[:, :m], logits[:, m : 2 * m]))
    comb = np.exp(logits[:, 2 * m :]).reshape(-1, m, m)
    comb = comb / comb.sum(2, keepdims=True) + SIZES["hc_eps"]
    for half in range(2 * SIZES["iterations"] - 1):
        comb = comb / (comb.sum(1 + half % 2, keepdims=True) + SIZES["hc_eps"])
    return pre + SIZES["hc_eps"], 2 * post, comb, bound.max(1)


def _rows_checked(rows: int) -> np.ndarray:
    """All rows of a small call; of a large one the first, the last, and 30 between."""
    return np.arange(rows) if rows <= 64 else sample(rows, 32)


def problems(given: tuple[Any, ...], output: Any) -> list[str]:
    """What `site` gave that it should not have."""
    m, d = given[0].shape[-2:]
    rows = _rows_checked(given[0].size // (m * d))

    def pick(array: Any, *shape: int) -> np.ndarray:
        return np.asarray(array).reshape(-1, *shape)[rows].astype(np.float64)

    shapes = ((m, d), (d,), (m,), (m, m), (m,))
    x, y, post, comb, mix = (pick(a, *shape) for a, shape in zip(given[:5], shapes, strict=True))
    norm, fn, scale, base = (np.asarray(a, np.float64) for a in given[5:9])
    new, read, *rest = output
    new, read = pick(new, m, d), pick(read, d)
    found = []

    exact = post[..., None] * y[:, None] + np.einsum("kij,kid->kjd", comb, x)
    found += beyond("X'", rows, norms(new - exact), 1.5 * norms(bfloat16(exact) - exact))
    exact = np.einsum("km,kmd->kd", mix, new)

    def normalize(a: np.ndarray) -> np.ndarray:
        return norm * a / np.sqrt((a * a).mean(1, keepdims=True) + SIZES["eps"])

    model = bfloat16(normalize(bfloat16(exact)))
    found += beyond("next input", rows, norms(read - normalize(exact)), 1.5 * norms(model - normalize(exact)))
    return found + coefficient_problems(new, rest, fn, scale, base, rows)


def coefficient_problems(new: np.ndarray, given: Any, fn: Any, scale: Any, base: Any, rows: np.ndarray) -> list[str]:
    """What is wrong with (pre, post, comb) of the streams `new` [K, M, D] in float64."""
    m = new.shape[1]
    *exact, bound = exact_coefficients(new.reshape(len(rows), -1), fn, scale, base, m)
    limits = (bound * scale[0] / 4 + 1e-6, bound * scale[1] / 2 + 1e-6, 4 * bound * scale[2] + HALF_STEPS)
    found = []
    for name, ours, theirs, limit in zip(("pre", "post", "comb"), given, exact, limits, strict=True):
        ours = np.asarray(ours).reshape(-1, *theirs.shape[1:])[rows].astype(np.float64)
        error = np.abs(ours - theirs).reshape(len(rows), -1).max(1)
        found += beyond(name, rows, error, limit)
    return found


def only_coefficients(given: tuple[Any, ...], output: Any) -> list[str]:
    """`problems` of `coefficients` on the streams as they are."""
    x = np.asarray(given[0]).reshape(-1, *given[0].shape[-2:])
    rows = _rows_checked(len(x))
    fn, scale, base = (np.asarray(a, np.float64) for a in given[6:9])
    return coefficient_problems(x[rows].astype(np.float64), output, fn, scale, base, rows)


def _site(*arrays: jax.Array, **how: Any) -> Any:
    *given, _, scale, base, halves = arrays
    return kernel.site(*[*given, halves, scale, base], **SIZES, **how)


def _coefficients(*arrays: jax.Array, **how: Any) -> Any:
    return kernel.coefficients(arrays[0], arrays[9], *arrays[7:9], **SIZES, **how)


def _case(name: str, lead: tuple[int, ...], *, width: int, run: Callable[..., Any] = _site) -> Case:
    tokens, streams = int(np.prod(lead)), 4
    sums = streams * (streams + 2) * streams * width
    alone = run is not _site
    return Case(
        name=name,
        inputs=partial(inputs, lead=lead, streams=streams, width=width),
        kernel=run if width > 1024 else partial(run, tile=TINY),
        reference=(lambda *a: reference.coefficients(a[0], *a[6:9], **SIZES))
        if alone
        else lambda *a: reference.site(*a[:9], **SIZES),
        problems=only_coefficients if alone else problems,
        flops=2.0 * tokens * sums,
        nbytes=2.0 * tokens * width * (streams if alone else 2 * streams + 2) + 4.0 * sums,
    )


SMALL = (
    _case("one-token", (1,), width=64),
    _case("ragged", (2, 9), width=128),  # 18 rows in blocks of 16
    _case("streamed", (2, 68), width=64),  # 136 rows in blocks of 64
    _case("streamed by two", (192,), width=64),  # three blocks for two teams
    _case("coefficients", (5,), width=128, run=_coefficients),
)
MODEL = (
    _case("site-8192", (8192,), width=5120),
    _case("site-512", (512,), width=5120),
    _case("site-64", (64,), width=5120),
    _case("site-1", (1,), width=5120),
    _case("coefficients-8192", (8192,), width=5120, run=_coefficients),
)
