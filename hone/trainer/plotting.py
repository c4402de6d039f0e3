"""Curves of a job's metrics over its steps, as a figure that a notebook shows automatically."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure  # pyright: ignore

from shared.errors import BadRequest

if TYPE_CHECKING:
    from shared.wire import MetricsRow

CURVES = {"reward": "reward of the steps", "eval/reward": "held out"}


class Curves(Figure):  # pyright: ignore
    """A figure that a notebook shows; it shows a plain Figure only after an import of pyplot."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")  # pyright: ignore
        return image.getvalue()


def curves(rows: Sequence[MetricsRow], names: Sequence[str], job: str) -> Curves:
    """Returns the curves of these metrics; by default the reward of the steps and of held-out
    problems. Raises BadRequest for a metric that no step has."""
    figure = Curves(figsize=(8, 4.5))
    axes: Any = figure.subplots()  # pyright: ignore
    for name in names or CURVES:
        points = [(row.step, row.metrics[name]) for row in rows if name in row.metrics]
        if points:
            axes.plot(*zip(*points, strict=True), label=CURVES.get(name, name))
        elif names:
            raise BadRequest(
                f"no step of job {job} has the metric {name!r}; metrics().columns lists them"
            )
    axes.set(xlabel="step", title=job)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    return figure
