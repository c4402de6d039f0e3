"""Scores of models on held-out problems, as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shared.wire import Estimate, EvaluationReport, ModelScores, SetReport

SHOWN = {
    "reward": "reward",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "truncated",
}
"""Metrics and their headings; pass@k comes after the reward."""

NOTE = (
    "± is the 95 % confidence interval over problems; * marks a difference that is outside it, and "
    "where 16 problems or fewer differ is so by an exact test as well (p < 0.05). "
    "Differences are over the same problems, which is why they can be surer than the two rows look."
)


def report(found: EvaluationReport) -> Group:
    """Returns a table for each held-out set, and below it how the models differ."""
    parts: list[RenderableType] = []
    for held_out in found.sets:
        parts += [_title(held_out, found), _table(held_out, held_out.models)]
        if others := held_out.models[1:]:
            first = held_out.models[0].name
            parts.append(Text(f"\nabove {first}, on the same problems"))
            parts.append(_table(held_out, others, less=True))
        parts += [Text(line) for line in _warnings(held_out)]
    return Group(*parts, Text(f"\n{NOTE}"))


def _title(held_out: SetReport, found: EvaluationReport) -> Text:
    name = f"{held_out.name}: " if held_out.name else ""
    how = f"temperature {found.temperature:g}, seed {found.seed}"
    return Text(
        f"{name}{held_out.num_problems} problems of {held_out.source}, {held_out.num_samples} "
        f"completion(s) each, {how}\n"
    )


def _table(held_out: SetReport, models: Sequence[ModelScores], *, less: bool = False) -> Table:
    """Returns a row for each of the models; `less`: of its differences from the first model."""
    names = _metrics(held_out)
    headings = (SHOWN.get(name, name) for name in names)
    table = Table("model", "n", *headings, box=None, pad_edge=False)
    for model in models:
        found = model.differences if less else model.metrics
        cells = (shown(name, found.get(name), signed=less) for name in names)
        num_problems = found["reward"].num_problems if "reward" in found else 0
        table.add_row(escape(model.name), str(num_problems), *cells)
    return table


def _metrics(held_out: SetReport) -> list[str]:
    """Returns the metrics that any of the models has, in the order of the columns."""
    found = dict.fromkeys(name for model in held_out.models for name in model.metrics)
    passes = [name for name in found if name.startswith("pass@")]
    return [name for name in dict.fromkeys(("reward", *passes, *SHOWN)) if name in found]


def shown(metric: str, estimate: Estimate | None, *, signed: bool = False) -> str:
    """Returns for example `0.512 ± 0.041`, or `0.000 [0.000, 0.278]`."""
    if estimate is None:
        return "none"
    digits = 1 if metric == "completions/mean_length" else 3
    sign = "+" if signed else ""
    text = f"{estimate.mean:{sign}.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return text
    star = "*" if signed and is_clear(estimate) else ""
    below, above = estimate.mean - estimate.low, estimate.high - estimate.mean
    if not math.isclose(below, above, rel_tol=1e-6):
        return f"{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]{star}"
    return f"{text} ± {above:.{digits}f}{star}"


def is_clear(difference: Estimate) -> bool:
    """Returns whether a difference is significant at 5 %: its interval does not contain 0, and the
    exact test, where there is one, agrees."""
    low, high, p_value = difference.low, difference.high, difference.p_value
    apart = low is not None and high is not None and (low > 0 or high < 0)
    return apart and (p_value is None or p_value < 0.05)


def _warnings(held_out: SetReport) -> list[str]:
    """Returns sentences about completions that count nowhere."""
    return [
        f"{model.name}: {share:.1%} of the completions {what}"
        for model in held_out.models
        for share, what in (
            (model.errored_rollouts, "could not be sampled"),
            (model.missing_rewards, "got no reward"),
        )
        if share
    ]
