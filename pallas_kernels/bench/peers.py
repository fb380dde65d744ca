"""Other implementations, from files that the command line names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.bench.clock import Clock, Run
from pallas_kernels.case import Case


def load_peers(folders: Sequence[Path], op: str) -> list[Callable[[Case, tuple[Any, ...]], dict[str, Run]]]:
    """The `peers` functions of DIR/<op>.py."""
    found: list[Callable[..., dict[str, Run]]] = []
    for path in (folder / f"{op}.py" for folder in folders):
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"peers_{op}_{len(found)}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append(module.peers)
    return found


def time_peers(folders: Sequence[Path], op: str, case: Case, inputs: tuple[Any, ...], clock: Clock, n: int) -> dict:
    """{name: timing} of every peer of this case; one that fails says why and stops nothing."""
    timed: dict[str, Any] = {}
    for peers in load_peers(folders, op):
        try:
            timed |= {name: clock.peer(run, n) for name, run in peers(case, inputs).items()}
        except Exception as error:
            timed[peers.__module__] = {"error": str(error).splitlines()[0][:200]}
    return timed
