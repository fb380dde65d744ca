"""Weight matrices as the checkpoint holds them, and the products with them.

    y = x W^T    accumulated in float32, rounded once to the activation dtype

A quantized weight stays quantized until the product (`pallas_kernels.block_linear`): E4M3 with one E8M0 scale per 32x32
block.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from dsv41_jax.numerics import Numerics
from pallas_kernels.block_linear import block_linear
from pallas_kernels.formats import GROUP, cast


def parameter(shape: tuple[int, ...], dtype: DTypeLike, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter of zeros that carries the names of its axes as sharding metadata; checkpoints and initializers fill
    it, and `sharding` says where each axis lies."""
    if len(shape) != len(axes):
        raise ValueError(f"axes: {axes} do not name the dimensions of shape {shape}")
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False)


def map_parameters[Module: nnx.Module](value: Callable[[tuple[Any, ...], Any], Any], tree: Module) -> Module:
    """The tree with `value(path, parameter)` in the place of each parameter's array."""
    graph, state = nnx.split(tree)
    flat = [(path, leaf.replace(value(path, leaf))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def product(x: Float[Array, "*lead K"], weight: Float[Array, "N K"]) -> Float32[Array, "*lead N"]:
    """x W^T with float32 sums. float32 operands never run in TF32, whatever the global precision flag says."""
    return jnp.einsum("...k,nk->...n", x, weight, precision="highest", preferred_element_type=jnp.float32)


def product_f32(x: Float[Array, "*lead K"], weight: Float[Array, "N K"]) -> Float32[Array, "*lead N"]:
    """x W^T with both operands raised to float32: router, head, gated compressor."""
    return product(x.astype(jnp.float32), weight.astype(jnp.float32))


class Linear(nnx.Module):
    """`weight` [out, in] in bfloat16 and an optional `bias`."""

    def __init__(self, out: int, inner: int, axes: tuple[str, str], *, bias: bool = False):
        self.weight = parameter((out, inner), jnp.bfloat16, axes)
        self.bias = parameter((out,), jnp.bfloat16, axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "*lead K"], numerics: Numerics) -> Float[Array, "*lead N"]:
        y = product(x, self.weight[...].astype(numerics.dtype))
        return cast(y if self.bias is None else y + self.bias[...].astype(jnp.float32), numerics.dtype)


class QuantizedLinear(nnx.Module):
    """`weight` [out, in] in E4M3 and `scale` [ceil(out / 32), ceil(in / 32)] in E8M0."""

    def __init__(self, out: int, inner: int, axes: tuple[str, str]):
        self.weight = parameter((out, inner), jnp.float8_e4m3fn, axes)
        self.scale = parameter((-(-out // GROUP), -(-inner // GROUP)), jnp.float8_e8m0fnu, axes)

    def __call__(self, x: Float[Array, "*lead K"], numerics: Numerics) -> Float[Array, "*lead N"]:
        return block_linear(numerics.activation(x), self.weight[...], self.scale[...], backend=numerics.backend)
