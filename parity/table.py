"""What a comparison found, a row an array, and how it is printed."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table

PASS, FAIL, NOT_RUN, NOT_JUDGED = "pass", "FAIL", "not run", "not judged"
_STYLE = {PASS: "green", FAIL: "bold red", NOT_RUN: "yellow", NOT_JUDGED: "dim"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One array of one case: the largest error and where it stands, or why there is none."""

    case: str
    array: str
    error: str
    where: str
    verdict: str
    rule: str


def place(index: tuple[np.intp, ...]) -> str:
    """An index as it is typed."""
    return "[" + ",".join(str(int(i)) for i in index) + "]"


def compare(case: str, array: str, got: ArrayLike, wanted: ArrayLike, bound: float, rule: str = "") -> Row:
    """Largest absolute error against `bound`. inf and nan must stand at the same places."""
    rule = rule or f"<= {bound:g}"
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if got.shape != wanted.shape:
        return Row(
            case=case, array=array, error=f"shape {got.shape}", where=f"golden {wanted.shape}", verdict=FAIL, rule=rule
        )
    special = ~(np.isfinite(got) & np.isfinite(wanted))
    same = np.where(np.isnan(wanted), np.isnan(got), got == wanted)
    with np.errstate(invalid="ignore"):
        error = np.where(special, np.where(same, 0.0, np.inf), np.abs(got - wanted))
    if error.size == 0:
        return Row(case=case, array=array, error="empty", where="", verdict=PASS, rule=rule)
    worst = np.unravel_index(error.argmax(), error.shape)
    return Row(
        case=case,
        array=array,
        error=f"{error.max():.2e}",
        where=place(worst),
        verdict=PASS if error.max() <= bound else FAIL,
        rule=rule,
    )


def compare_equal(case: str, array: str, got: np.ndarray, wanted: np.ndarray, rule: str = "equal") -> Row:
    """Integers, codes, masks: every element equal."""
    if got.shape != wanted.shape:
        return Row(
            case=case, array=array, error=f"shape {got.shape}", where=f"golden {wanted.shape}", verdict=FAIL, rule=rule
        )
    different = np.argwhere(got != wanted)
    where = place(tuple(different[0])) if len(different) else ""
    return Row(
        case=case,
        array=array,
        error=f"{len(different)} of {wanted.size}",
        where=where,
        verdict=FAIL if len(different) else PASS,
        rule=rule,
    )


def compare_sets(case: str, array: str, got: np.ndarray, wanted: np.ndarray) -> Row:
    """Selections: the last axis as a set, in any order."""
    rows = wanted.reshape(-1, wanted.shape[-1])
    return compare_equal(case, array, np.sort(got.reshape(rows.shape)), np.sort(rows), "equal as sets")


def relative_l2(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """|got - wanted| / |wanted| of each batch row."""
    got, wanted = (np.asarray(x, np.float64).reshape(len(wanted), -1) for x in (got, wanted))
    return np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)


def show(title: str, rows: list[Row], console: Console) -> None:
    """Print the table and a line of counts."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("case", "array", "largest error", "where", "verdict", "rule"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.case, row.array, row.error, row.where, f"[{_STYLE[row.verdict]}]{row.verdict}", row.rule)
    console.print(table)
    counts = Counter(row.verdict for row in rows)
    console.print(", ".join(f"{counts[v]} {v}" for v in (PASS, FAIL, NOT_RUN, NOT_JUDGED)) + "\n")
