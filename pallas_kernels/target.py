"""Which GPU the kernels are compiled for, the tile that fits it, and the one place that refuses a backend.

The target is the device of the abstract mesh in force (`jax.sharding.use_abstract_mesh`, which is how a machine without
a GPU compiles for one), else JAX's default device.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import jax

from pallas_kernels import BackendError

# The GPUs that have tiles. Abstract devices are known by name only: a concrete one also tells its capability.
TARGETS = {"H100": "sm_90", "H200": "sm_90", "GH200": "sm_90", "B300": "sm_103", "GB300": "sm_103"}
MULTIPROCESSORS = {"sm_90": 132, "sm_103": 148}
LOWERINGS = {"triton": "jax.experimental.pallas.triton", "mosaic": "jax.experimental.pallas.mosaic_gpu"}


def _device() -> tuple[str, str, str | None]:
    """(platform, kind, compute capability where known) of the device that a program would be compiled for."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform in ("gpu", "cuda"):
        return "gpu", abstract.device_kind, None
    default = jax.config.jax_default_device
    device = jax.devices(default)[0] if isinstance(default, str) else default or jax.devices()[0]
    return device.platform, device.device_kind, getattr(device, "compute_capability", None)


def target() -> str | None:
    """The target in force, `sm_90` or `sm_103`, or None: no GPU, or one without tiles."""
    platform, kind, capability = _device()
    if platform != "gpu":
        return None
    name = next((TARGETS[word] for word in kind.split() if word in TARGETS), None)
    if name is None and capability is not None:
        name = "sm_" + capability.replace(".", "")
    return name if name in TARGETS.values() else None


def multiprocessors(name: str) -> int:
    """How many a target has: the programs of a kernel whose programs stay resident."""
    return MULTIPROCESSORS[name]


def choose_tile[T](tiles: Mapping[str, T]) -> T:
    """The entry for the target in force; the first one without a GPU, where kernels run in interpret mode only."""
    platform, kind, _ = _device()
    if platform != "gpu":
        return next(iter(tiles.values()))
    name = target()
    if name not in tiles:
        raise BackendError(f"backend 'pallas': no tile for {kind}; there are {', '.join(tiles)}")
    return tiles[name]


def use_kernel(op: str, backend: str, lowering: str = "triton") -> bool:
    """False for backend "xla", True for "pallas" where the kernel of `op` can be compiled; raises where it cannot."""
    if backend == "xla":
        return False
    if backend != "pallas":
        raise ValueError(f"backend: {backend!r} is not one of 'xla', 'pallas'")
    platform, kind, _ = _device()
    if platform != "gpu":
        raise BackendError(f"backend 'pallas': {op} needs a GPU, the default device is {kind}; use backend='xla'")
    if target() is None:
        known = ", ".join(sorted(set(TARGETS.values())))
        raise BackendError(f"backend 'pallas': {op} has tiles for {known}, not for {kind}; use backend='xla'")
    if not _installed(LOWERINGS[lowering]):
        raise BackendError(f"backend 'pallas': {op} needs {LOWERINGS[lowering]}, which JAX {jax.__version__} has not")
    return True


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
