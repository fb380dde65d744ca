"""What was measured, as a line of the console and as the README's table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

REPEATS = {True: "ok", None: "ok, runs may differ", False: "runs differ"}


def line(result: dict[str, Any]) -> str:
    """One case on one line."""
    verdict = "; ".join(result["problems"]) or "ok"
    verdict += ", repeated runs differ" if result.get("repeats_identical") is False else ""
    kernel = result.get("kernel", {})
    time_ = f"{kernel['us']:9.1f} us +-{kernel['spread']:4.0%}" if "us" in kernel else kernel.get("error", "")
    return f"{result['op']}/{result['case']:28} {time_} {verdict}"


def table(report: dict[str, Any]) -> str:
    """The README's table, in Markdown."""
    rows = []
    for result in report["results"]:
        us = result.get("kernel", {}).get("us")
        if us is None:
            rows.append((result["op"], result["case"], *"-----", "; ".join(result["problems"]) or "-"))
            continue
        work = f"{result['flops'] / us / 1e6:.0f} TFLOP/s" if compute_bound(result) else _bandwidth(result, us)
        others = {"reference": result.get("reference", {})} | result.get("peers", {})
        against = ", ".join(f"{name} {o['us'] / us:.2f} x" for name, o in others.items() if "us" in o)
        graphs = result["command_buffers"]
        state = "; ".join(result["problems"]) or REPEATS[result["repeats_identical"]]
        floor = f"{us / result['floor_us']:.2f} x" if result["floor_us"] else "-"
        place = "yes" if graphs["inside"] and not graphs["outside"] else f"{graphs['outside']} outside"
        if "us" in result["no_graphs"]:
            place += f"; {_time(result['no_graphs']['us'])} without"
        rows.append((result["op"], result["case"], _time(us), work, floor, against or "-", place, state))
    head = ("op", "case", "time", "rate", "of its floor", "others' time over ours", "in CUDA graphs", "check")
    body = "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))
    measured = [result["ceilings"] for result in report["results"] if "ceilings" in result]
    copy, product = ([rates[name] for rates in measured] for name in ("copy_tb_s", "matmul_tflop_s"))
    ceiling = f"copy {_range(copy, '.2f')} TB/s, bf16 matmul {_range(product, '.0f')} TFLOP/s"
    return f"{report['device']}, JAX {report['jax']}, {report['date']}; {ceiling}.\n\n{body}"


def _range(values: Sequence[float], style: str) -> str:
    low, high = (format(bound(values, default=math.nan), style) for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def compute_bound(result: dict[str, Any]) -> bool:
    """Whether arithmetic, not bytes, sets the floor."""
    rates = result["ceilings"]
    return result["flops"] / rates["matmul_tflop_s"] > result["nbytes"] / rates["copy_tb_s"]


def _bandwidth(result: dict[str, Any], us: float) -> str:
    return f"{result['nbytes'] / us / 1e6:.2f} TB/s"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} us"
