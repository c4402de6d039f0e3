"""The options and the output of every benchmark: the order of its sides, a table for people, and as
its last line one JSON object for programs.

A `Figure` with a goal decides `ok`; one without is only shown. All figures are measured before any
is compared, so a run prints all of them; the exit status says whether every goal was met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Figure:
    """One measured number. `goal` is its least ("min") or greatest ("max") wanted value. `spread`:
    the lowest and the highest of the repeats that `value` is the median of."""

    name: str
    value: float
    unit: str = ""
    goal: float | None = None
    bound: Literal["min", "max"] = "min"
    spread: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        if self.goal is None:
            return True
        return self.value >= self.goal if self.bound == "min" else self.value <= self.goal

    @property
    def verdict(self) -> str:
        """The table's last column: the goal, and whether it was met."""
        if self.goal is None:
            return ""
        bound = "at least" if self.bound == "min" else "at most"
        return f"{bound} {self.goal:g}: {'met' if self.ok else 'MISSED'}"

    @property
    def range(self) -> str:
        """The table's column for the repeats: the lowest and the highest value."""
        return "" if self.spread is None else f"{self.spread[0]:.4g} to {self.spread[1]:.4g}"


def repeated(
    name: str,
    values: Sequence[float],
    unit: str = "",
    goal: float | None = None,
    bound: Literal["min", "max"] = "min",
) -> Figure:
    """Returns the figure whose value is the median of the repeats."""
    return Figure(name, median(values), unit, goal, bound, (min(values), max(values)))


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Returns the ratios of one side to the other, repeat by repeat."""
    return [one / other for one, other in zip(above, below, strict=True)]


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Returns the rows as text, the first column to the left and the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(
        [
            lines[0].rstrip(),
            "  ".join("-" * width for width in widths),
            *(line.rstrip() for line in lines[1:]),
        ]
    )


def options(
    description: str | None, *, repeats: int | None = None, quick: str | None = None
) -> argparse.ArgumentParser:
    """Returns the parser of a bench. It has `--repeats` if there is a default, and `--quick` if
    there is a help text for it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if repeats:
        help_text = f"measurements of each side (default: {repeats})"
        parser.add_argument("--repeats", type=count, default=repeats, help=help_text)
    return parser


def count(text: str) -> int:
    """Returns an option's value that is a count. Raises ArgumentTypeError below 1: no repeats have
    no median."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return number


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns the type of an option whose value is a comma-separated list of some of the names."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, expected some of {[*known]}")
        return found

    return parse


def in_turns(sides: Iterable[str], repeats: int) -> Iterator[str]:
    """Yields every side once per repeat; each repeat begins with another one, so that other work on
    the machine affects all sides alike."""
    order = [*sides]
    for _ in range(repeats):
        yield from order
        order = [*order[1:], order[0]]


def finish(bench: str, figures: Sequence[Figure], **facts: Any) -> int:
    """Prints the figures as a table and then, as the last line, one JSON object; returns the exit
    status, 0 if all goals are met.

    `facts` (settings of the sides, repeats, sizes) go into the object beside the figures and the
    machine.
    """
    print(
        table(
            [(f.name, f"{f.value:.4g}", f.unit, f.range, f.verdict) for f in figures],
            ("figure", "value", "unit", "min to max", "goal"),
        )
    )
    ok = all(figure.ok for figure in figures)
    summary = {
        "bench": bench,
        "ok": ok,
        "figures": {f.name: _entry(f) for f in figures},
        "machine": {
            "cpu_cores": os.cpu_count(),
            "arch": platform.machine(),
            "load": round(os.getloadavg()[0], 2),
        },
        **facts,
    }
    print(json.dumps(summary), flush=True)
    return 0 if ok else 1


def _entry(figure: Figure) -> dict[str, Any]:
    entry: dict[str, Any] = {"value": float(f"{figure.value:.6g}"), "unit": figure.unit}
    if figure.spread is not None:
        entry["spread"] = [float(f"{value:.6g}") for value in figure.spread]
    if figure.goal is not None:
        entry |= {"goal": figure.goal, "bound": figure.bound, "ok": figure.ok}
    return entry
