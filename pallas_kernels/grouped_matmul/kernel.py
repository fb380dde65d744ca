"""The routed experts in two launches: w1 and w3 with SwiGLU, then w2.

**Why.** A decode step reads the weights of the experts that its tokens chose, up to 7.2 GB a layer, and little else.
Plain XLA dequantizes them to memory and multiplies bfloat16: 1.94 ms for 64 experts on an H200, where all 243 experts
of 64 tokens are 0.73 ms of bytes. `stream` reads each byte once, in the checkpoint's layout.

**Numerics.** As the reference: both products of the first launch are rounded to bfloat16, SwiGLU with its clamps and
the routing weight are float32, the hidden row is rounded to bfloat16 and then by `round_input`, which runs between
the launches as one XLA fusion, since it may be any function. The products of w2 are rounded to bfloat16. The sum over a
token's experts is float32 in ascending position, not an atomic sum: it depends on no other token, bit for bit. XLA
does it with the gather that brings each token's rows back together; so it sorts rows by expert, with a gather.

**Tiling.** See `stream`. The tile follows from the average rows of an expert, or from all rows where they are few, the
width of each tile of tokens from its own rows, at run time.

Limits: bfloat16 x, D a multiple of 512 and F of 256, E8M0 scales from 2**-90 to 2**33 (further ones saturate). No
gradient: the reference has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, lcm

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import BackendError
from pallas_kernels.grouped_matmul.groups import group
from pallas_kernels.hopper.fragments import FP4
from pallas_kernels.hopper.stream import Plan, Tile, stream
from pallas_kernels.target import choose_tile, multiprocessors

FEW = 8  # rows of all experts


@dataclass(frozen=True)
class Tiles:
    """`few` serves up to FEW rows in all: smaller items, so that each multiprocessor has one. Of the others, (rows an
    expert, on average, up to which it serves; tile)."""

    few: Tile
    others: tuple[tuple[float, Tile], ...]


H200 = Tiles(
    few=Tile(widths=(16,), chunks=2, stages=4),
    others=(
        (12.0, Tile(widths=(16,), warpgroups=4, chunks=2, stages=3, ahead=0)),
        (48.0, Tile(widths=(16, 32, 64), chunks=2, stages=3)),
        (inf, Tile(widths=(96, 128), chunks=2, stages=2)),
    ),
)
_B300 = partial(Tile, wgmma=False, blocks=multiprocessors("sm_103"))
B300 = Tiles(
    few=_B300(widths=(16,), chunks=2, stages=4),
    others=(
        (12.0, _B300(widths=(16,), warpgroups=4, chunks=2, stages=3)),
        (inf, _B300(widths=(16, 32, 64), chunks=1, stages=4)),
    ),
)


def tile_for(rows: int, experts: int) -> Tile:
    """The tile for so many rows in all."""
    tiles = choose_tile({"sm_90": H200, "sm_103": B300})
    return tiles.few if rows <= FEW else next(tile for limit, tile in tiles.others if rows <= limit * experts)


def _bytes(scale: Array) -> Array:
    return scale if scale.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(scale, jnp.uint8)


def check(x: Array, w1: Array, tile: Tile) -> None:
    """Raise where the kernel does not fit: its rules, and the value received."""
    span, columns = 64 * tile.warpgroups, 128 * tile.chunks
    if x.dtype != jnp.bfloat16:
        raise BackendError(f"backend 'pallas': grouped_matmul takes bfloat16 x, not {x.dtype}")
    for name, size, rows in (("width D", 2 * w1.shape[2], 2 * span), ("expert width F", w1.shape[1], span)):
        if size % lcm(rows, columns):
            rule = f"is not a multiple of {lcm(rows, columns)}"
            raise BackendError(f"backend 'pallas': grouped_matmul: {name} {size} {rule}")


def gate_up(
    rows: Float[Array, "M D"],
    weights: Float32[Array, " M"],
    plan: Plan,
    w1: tuple[Array, Array],
    w3: tuple[Array, Array],
    *,
    limit: float,
    tile: Tile,
    interpret: bool = False,
) -> Float[jax.Array, "M F"]:
    """weights * swiglu(w1 x, w3 x) of rows sorted by expert, their columns in the order of `FP4.permute`."""

    def combine(gate: Array, up: Array, weight: Array) -> Array:
        gate, up = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in (gate, up))
        return _swiglu(gate, up, limit) * weight

    first, second = ((w[0], _bytes(w[1])) for w in (w1, w3))
    return stream(rows, first, second, plan, weights, form=FP4, tile=tile, combine=combine, interpret=interpret)


def down(
    rows: Float[Array, "M F"], plan: Plan, w2: tuple[Array, Array], *, tile: Tile, interpret: bool = False
) -> Float[jax.Array, "M D"]:
    """w2 x of rows sorted by expert, their columns in the order of `FP4.permute`."""
    return stream(rows, (w2[0], _bytes(w2[1])), None, plan, form=FP4, tile=tile, interpret=interpret)


def _swiglu(gate: Array, up: Array, limit: float) -> Array:
    """`reference.swiglu` of operations that a kernel has."""
    gate = jnp.minimum(gate, limit)
    return gate / (1 + jnp.exp(-gate)) * jnp.minimum(jnp.maximum(up, -limit), limit)


@partial(jax.jit, static_argnames=("limit", "round_input", "tile", "interpret"))  # a model traces it once a shape
def experts(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T A"],
    weights: Float32[Array, "T A"],
    w1: tuple[Array, Array],
    w2: tuple[Array, Array],
    w3: tuple[Array, Array],
    *,
    limit: float,
    round_input: Callable[[Array], Array],
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float32[Array, "T D"]:
    """See `pallas_kernels.grouped_matmul.experts`."""
    count = w1[0].shape[0]
    tile = tile or tile_for(ids.size, count)
    check(x, w1[0], tile)
    if ids.size == 0:
        return jnp.zeros(x.shape, jnp.float32)
    groups = group(ids, count, tile.widths[-1])
    rows = FP4.permute(round_input(x))[groups.slot // ids.shape[1]]
    run = partial(gate_up, limit=limit, tile=tile, interpret=interpret)
    hidden = run(rows, weights.reshape(-1)[groups.slot], groups.plan, w1, w3)
    out = down(FP4.permute(round_input(hidden)), groups.plan, w2, tile=tile, interpret=interpret)
    total = jnp.zeros(x.shape, jnp.float32)
    for a in range(ids.shape[1]):
        total += out[groups.place[:, a]].astype(jnp.float32)
    return total
