"""What a checkpoint of a config must hold.

It follows from the parameter tree of `nn.transformer.Transformer`: a parameter's path is its name and its tensor's,
but for a stack of experts, whose E matrices are stored one by one. Engram tables are no parameters (`engine.tables`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np
from flax import nnx

from dsv41_jax.config import Config
from dsv41_jax.nn.transformer import Transformer, abstract_parameters
from dsv41_jax.sharding import dotted

DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
STORED_AS = {DTYPES[name]: name for name in ("F8_E4M3", "F8_E8M0", "BF16", "F32")}
STORED_AS[np.dtype(np.uint8)] = "I8"  # packed FP4 travels as I8
ParameterPath = tuple[str | int, ...]
Kind = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Expected:
    """A tensor that a config asks for: stored `dtype` and `shape`, the parameter it fills, which expert of it."""

    dtype: str
    shape: tuple[int, ...]
    path: ParameterPath | None = None
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def flat_parameters(params: Transformer) -> dict[ParameterPath, nnx.Variable]:
    """The variables of a tree by path."""
    return dict(nnx.to_flat_state(nnx.state(params)))  # type: ignore[arg-type]


def table_names(layer: int) -> tuple[str, str]:
    """The two tensors of a layer's Engram table."""
    return f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"


def expected_tables(cfg: Config) -> dict[str, Expected]:
    """The tensors of the Engram tables by name, a weight before its scale."""
    width, found = cfg.engram_head_dim, dict[str, Expected]()
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        weight, scale = table_names(layer)
        found |= {weight: Expected("F8_E4M3", (rows, width)), scale: Expected("F8_E8M0", (rows, width // 32))}
    return found


def expected_tensors(cfg: Config, params: Transformer | None = None) -> dict[str, Expected]:
    """Name, dtype and shape of every tensor of a checkpoint with this config, by its parameter tree."""
    expected = {}
    for path, leaf in flat_parameters(abstract_parameters(cfg) if params is None else params).items():
        dtype, shape = STORED_AS[leaf.dtype], leaf.shape
        if "experts" not in path:
            expected[dotted(path)] = Expected(dtype, shape, path)
            continue
        at = path.index("experts") + 1
        stack, matrix = dotted(path[:at]), dotted(path[at:])
        for expert in range(shape[0]):
            expected[f"{stack}.{expert}.{matrix}"] = Expected(dtype, shape[1:], path, expert)
    return expected | expected_tables(cfg)


def by_parameter(expected: Mapping[str, Expected]) -> dict[ParameterPath, list[str]]:
    """The stored tensors of each parameter; those of a stacked one by expert."""
    names: dict[ParameterPath, list[str]] = {}
    for name, wanted in expected.items():
        if wanted.path is not None:
            names.setdefault(wanted.path, []).append(name)
    return names


def kinds(leaves: Mapping[ParameterPath, nnx.Variable]) -> dict[str, Kind]:
    """Dtype and shape of parameters by name."""
    return {dotted(path): (leaf.dtype.name, tuple(leaf.shape)) for path, leaf in leaves.items()}


def differences(found: Mapping[str, Kind], wanted: Mapping[str, Kind], verbs: tuple[str, str]) -> list[str]:
    """A line for each name that is unexpected, missing or of another kind: `norm.weight: is float32 [96], expected
    bfloat16 [96]` with the verbs "is" and "expected"."""
    problems = [f"{name}: unexpected" for name in found if name not in wanted]
    for name, kind in wanted.items():
        if name not in found:
            problems.append(f"{name}: missing")
        elif found[name] != kind:
            now, then = (f"{dtype} {list(shape)}" for dtype, shape in (found[name], kind))
            problems.append(f"{name}: {verbs[0]} {now}, {verbs[1]} {then}")
    return problems
