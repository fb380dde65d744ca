"""How parameters and batches lie on a mesh: by the names of their axes, whatever the mesh's sizes.

    parameters                                    by the names of their axes (`PARAMETER_AXES`)
    rows of a batch: tokens, caches               over mesh axis `data` where they divide, else on every device
    rows of an Engram table placed "sharded"      over all devices of the mesh

Parameters carry those names as Flax's sharding metadata. A router's axis has a name of its own and stays whole: a
token's choice needs the scores of all experts. Programs run under automatic partitioning, so a mesh of explicit axes is
taken as the same devices with automatic ones.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH_AXES = ("data", "expert")
Path = tuple[Any, ...]  # of a parameter: ("layers", 3, "ffn", "experts", "w1", "weight")


def dotted(path: Path) -> str:
    """A parameter's name."""
    return ".".join(map(str, path))


def automatic(mesh: Mesh | AbstractMesh) -> Any:
    """The mesh with automatic axes. Raises ValueError for an axis that has no meaning here."""
    for name in mesh.axis_names:
        if name not in MESH_AXES:
            raise ValueError(f"mesh: axis {name!r} is not one of {', '.join(map(repr, MESH_AXES))}")
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=kinds)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def parse_mesh(text: str) -> AbstractMesh:
    """The mesh that `data=1,expert=8` describes; it needs no devices. Raises ValueError with one line."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not size.isdecimal() or int(size) < 1 or not name:
            raise ValueError(f"mesh: {part.strip()!r} is not NAME=SIZE with a size of at least 1")
        if name in sizes:
            raise ValueError(f"mesh: axis {name!r} stands twice in {text!r}")
        sizes[name] = int(size)
    return automatic(AbstractMesh(tuple(sizes.values()), tuple(sizes)))


# Where the axes of parameters lie, by their names (`config`): an axis that is not here is whole on every device.
PARAMETER_AXES = (("experts", "expert"),)


def placements(params: nnx.Module, mesh: Mesh | AbstractMesh) -> dict[Path, NamedSharding]:
    """Where each parameter of a tree (abstract or not) lies. Allocates nothing.

    Raises ValueError with one line when an axis does not divide over its mesh axis, or for an unknown mesh axis.
    """
    mesh = automatic(mesh)
    on = {axis: over for axis, over in PARAMETER_AXES if over in mesh.axis_names}
    found, uneven = {}, []
    for path, leaf in nnx.to_flat_state(nnx.state(params)):
        spec = [on.get(axis) for axis in leaf.get_metadata("out_sharding")]
        for axis, size, over in zip(leaf.get_metadata("out_sharding"), leaf.shape, spec, strict=True):
            if over is not None and size % mesh.shape[over]:
                width, name = mesh.shape[over], dotted(path)
                uneven.append(f"{name}: axis {axis!r} of {size} does not divide over mesh axis {over!r} of {width}")
        found[path] = NamedSharding(mesh, P(*spec) if any(spec) else P())
    if uneven:
        more = f" (and {len(uneven) - 1} more parameters)" if len(uneven) > 1 else ""
        raise ValueError(uneven[0] + more)
    return found


def sharded_rows(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Axis 0 over all devices of the mesh."""
    return NamedSharding(automatic(mesh), P(mesh.axis_names))


def mesh_of(leaves: Iterable[Any]) -> Mesh | None:
    """The mesh on which parameters lie, if they lie on one."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def shard_batch[Batch](
    batch: Batch, mesh: Mesh, put: Callable[[list[Any], list[Any]], list[Any]] = jax.device_put
) -> Batch:
    """A pytree of arrays that lead with the rows of a batch, on the mesh; `put(arrays, shardings)` moves them, or
    inside a program constrains them."""
    over = mesh.shape.get("data", 1)
    leaves, structure = jax.tree.flatten(batch)
    divide = [over > 1 and jax.numpy.ndim(leaf) > 0 and leaf.shape[0] % over == 0 for leaf in leaves]
    places = [NamedSharding(mesh, P("data") if d else P()) for d in divide]
    return jax.tree.unflatten(structure, put(leaves, places))
