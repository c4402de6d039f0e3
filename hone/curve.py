"""A learning curve in characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.wire import MetricsRow

HEIGHT, WIDTH = 12, 72
REWARD, HELD_OUT = "·", "●"


def text_curve(rows: Sequence[MetricsRow], title: str) -> str:
    """Returns the mean reward and the held-out reward over the steps. If there are more steps than
    columns, a column is the mean of several. Without rewards, returns a sentence."""
    rewards = {row.step: row.metrics["reward"] for row in rows if "reward" in row.metrics}
    held_out = {
        row.step: row.metrics["eval/reward"] for row in rows if "eval/reward" in row.metrics
    }
    every = [*rewards.values(), *held_out.values()]
    if not every:
        return f"{title}: no step has a reward yet"
    low, high = min(0.0, *every), max(1.0, *every)
    last = max([*rewards, *held_out])
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for marks, values in ((REWARD, rewards), (HELD_OUT, held_out)):
        for column, value in _by_column(values, last).items():
            line = round((high - value) / (high - low) * (HEIGHT - 1))
            grid[line][column] = marks
    shown = [f"{_at(line, low, high)} {''.join(cells).rstrip()}" for line, cells in enumerate(grid)]
    axis = f"{'':>6} 0{f'step {last}':>{WIDTH - 1}}"
    key = f"{REWARD} reward of the steps   {HELD_OUT} held-out reward"
    return "\n".join([title, *shown, axis, key if held_out else key.partition("   ")[0]])


def _by_column(values: Mapping[int, float], last: int) -> dict[int, float]:
    columns: dict[int, list[float]] = {}
    for step, value in values.items():
        columns.setdefault(round(step / max(last, 1) * (WIDTH - 1)), []).append(value)
    return {column: sum(several) / len(several) for column, several in columns.items()}


def _at(line: int, low: float, high: float) -> str:
    """Returns the reward at a line, for the first, the middle and the last line."""
    if line not in (0, HEIGHT // 2, HEIGHT - 1):
        return " " * 6
    return f"{high - line / (HEIGHT - 1) * (high - low):6.2f}"
