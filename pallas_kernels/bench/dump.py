"""XLA's own text of a compiled program, and where its launches sit."""

from pathlib import Path
from typing import Any


def dump(folder: Path | str) -> dict[str, Any]:
    """Compiler options: XLA's text of the program goes to `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def command_buffers(folder: Path) -> dict[str, int]:
    """Kernel launches inside and outside command buffers, from XLA's dump of one program in `folder`."""
    texts = [path.read_text() for path in folder.glob("*thunk_sequence_after_thunk_passes.txt")]
    texts = texts or [path.read_text() for path in folder.glob("*thunk_sequence.txt")]
    lines = [line for text in texts for line in text.splitlines() if "kCustom" in line]
    inside = sum(line.startswith(" ") for line in lines)
    return {"inside": inside, "outside": len(lines) - inside}
