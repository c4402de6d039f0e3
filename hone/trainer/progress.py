"""What a person sees while a job runs: in a notebook a table of steps with the curve above it, kept
up to date in place; elsewhere the lines of `hone logs -f`."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hone.view import COLUMNS, Follower

if TYPE_CHECKING:
    from shared.wire import Event, JobProgress

ROWS = 12
"""Steps in the notebook's table: the newest."""

WIDTH, HEIGHT = 640, 120
MIN_UPDATE_S = 0.3
REWARD_COLOUR, HELD_OUT_COLOUR = "#1f5fa8", "#c2410c"


def view_here() -> Notebook | Follower:
    """Returns the view that fits where the code runs."""
    return Notebook() if in_notebook() else Follower(Console())


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code."""
    try:
        from IPython.core.getipython import get_ipython  # pyright: ignore
    except ImportError:
        return False
    return type(get_ipython()).__name__ == "ZMQInteractiveShell"  # pyright: ignore


class Notebook:
    """A table in a cell's output, with the curve of the rewards."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, dict[str, float]]] = []
        self._held_out: list[tuple[int, float]] = []
        self._said: list[str] = []
        self._doing = "submitted"
        self._of = 0
        self._handle: Any = None
        self._shown_at = 0.0

    def __enter__(self) -> Notebook:
        from IPython.display import HTML, display  # pyright: ignore

        self._handle = display(HTML(self.html()), display_id=True)  # pyright: ignore
        return self

    def __exit__(self, *_: object) -> None:
        self._update(now=True)

    def show(self, event: Event) -> None:
        if event.type == "step":
            self._of = event.data["steps"]
            self._steps.append((event.data["step"], event.data["metrics"]))
        elif event.type == "eval" and "eval/reward" in event.data.get("metrics", {}):
            self._held_out.append((event.data["step"], event.data["metrics"]["eval/reward"]))
        elif event.level in ("warning", "error"):
            self._said = [*self._said, event.message][-5:]
        self._doing = event.message
        self._update(now=event.type != "step")

    def progress(self, told: JobProgress) -> None:
        self._doing = told.message
        self._update(now=False)

    def _update(self, *, now: bool) -> None:
        if self._handle is None or not (now or time.monotonic() - self._shown_at > MIN_UPDATE_S):
            return
        from IPython.display import HTML  # pyright: ignore

        self._handle.update(HTML(self.html()))
        self._shown_at = time.monotonic()

    def html(self) -> str:
        """Returns what the cell shows."""
        step = self._steps[-1][0] if self._steps else 0
        bar = f'<progress value="{step}" max="{self._of or 1}" style="width: {WIDTH}px"></progress>'
        said = "".join(f"<div>{html.escape(line)}</div>" for line in self._said)
        is_said = not self._of or self._doing.startswith("step ")
        steps = "" if is_said else f"step {step} of {self._of}: "
        return (
            f"<div>{bar}<div>{steps}{html.escape(self._doing)}</div>{said}"
            f"{self._curve()}{self._table()}</div>"
        )

    def _curve(self) -> str:
        rewards = [(step, row["reward"]) for step, row in self._steps if "reward" in row]
        lines = [(REWARD_COLOUR, "reward", rewards), (HELD_OUT_COLOUR, "held out", self._held_out)]
        lines = [line for line in lines if line[2]]
        if not lines:
            return ""
        values = [value for _, _, points in lines for _, value in points]
        low, high = min(0.0, *values), max(1.0, *values)
        last = max(self._of, *(step for _, _, points in lines for step, _ in points), 1)
        drawn = "".join(_polyline(colour, points, last, low, high) for colour, _, points in lines)
        names = " ".join(
            f'<span style="color: {colour}">{name} {points[-1][1]:.3f}</span>'
            for colour, name, points in lines
        )
        return (
            f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="rewards by step">'
            f"{drawn}</svg><div>{names}</div>"
        )

    def _table(self) -> str:
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", *COLUMNS))
        rows = "".join(_row(step, metrics) for step, metrics in self._steps[-ROWS:])
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row(step: int, metrics: dict[str, float]) -> str:
    cells = (f"{metrics[name]:.4g}" if name in metrics else "" for name in COLUMNS.values())
    return f"<tr><td>{step}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _polyline(
    colour: str, points: Sequence[tuple[int, float]], last: int, low: float, high: float
) -> str:
    at = " ".join(
        f"{step / last * (WIDTH - 4) + 2:.1f},"
        f"{(high - value) / ((high - low) or 1) * (HEIGHT - 8) + 4:.1f}"
        for step, value in points
    )
    return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"/>'
