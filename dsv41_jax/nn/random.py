"""Random parameters of a config, for tests and benchmarks."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from dsv41_jax.config import Config
from dsv41_jax.nn.linear import map_parameters
from dsv41_jax.nn.transformer import Transformer, abstract_parameters


def initial_scale(path: tuple[Any, ...], leaf: nnx.Param) -> tuple[float, float]:
    """(centre, deviation) of a random parameter that keeps activations of unit scale, and every bias and gate in use.
    Of E8M0 scales: one code. Packed weights (uint8) are any bytes."""
    name, shape = str(path[-1]), leaf.shape
    if name == "scale":
        codes = 3.0 if len(shape) == 3 else 1.0  # random E2M1 codes against unit normal E4M3 values
        return 127.0 - round(math.log2(codes * (32 * shape[-1]) ** 0.5)), 0.0
    if len(shape) > 1 and name not in ("q_weight", "k_weight"):
        unit = leaf.dtype == jnp.float8_e4m3fn or path[0] == "embed"
        return 0.0, 1.0 if unit else shape[-1] ** -0.5
    return float(name.endswith(("weight", "_scale"))), 0.1


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike, centre: float | Array, deviation: float | Array
) -> Float[Array, "*shape"]:
    return (centre + deviation * jax.random.normal(key, shape)).astype(dtype)


def random_parameters(cfg: Config, seed: int = 0, *, on_device: bool = False) -> Transformer:
    """Parameters in their stored dtypes: drawn by NumPy, or with `on_device` by the default device, which draws others
    and takes seconds for widths that take a host minutes."""
    rng, numbers = np.random.default_rng(seed), itertools.count()

    def host(leaf: nnx.Param, centre: float, deviation: float) -> Array:
        if leaf.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        return jnp.asarray((centre + deviation * rng.standard_normal(leaf.shape)).astype(leaf.dtype))

    def device(leaf: nnx.Param, centre: float, deviation: float) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), next(numbers))
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        return _normal(key, leaf.shape, leaf.dtype, centre, deviation)

    draw: Callable[[nnx.Param, float, float], Array] = device if on_device else host

    def value(path: tuple[Any, ...], leaf: nnx.Param) -> Array:
        centre, deviation = initial_scale(path, leaf)
        if leaf.dtype == jnp.float8_e8m0fnu:
            return jax.lax.bitcast_convert_type(jnp.full(leaf.shape, centre, jnp.uint8), leaf.dtype)
        return draw(leaf, centre, deviation)

    return map_parameters(value, abstract_parameters(cfg))
