"""What findings follow from: a run's rows of metrics, some of its stored batches, its syncs, its
record. Pure; gathering.py reads it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.orchestrator.grpo.advantages import outcomes
from services.orchestrator.grpo.held_out import HIGH, LOW, metric_prefix
from shared.job import Job
from shared.wire import Batch, Evidence, JobRecord, MetricsRow

WINDOW = 10
"""Steps that a median is over: four odd steps among ten do not move it, and ten come soon."""

FEWEST = 5
"""Fewest steps about which anything is said that a step or two may have by chance."""

STEADY = 0.8
"""Share of the steps since a finding began that have to show it: one good step among five does not
begin it anew."""

LEAST_CHANGE = 0.05
"""Share of the full mark by which held-out rewards without a confidence interval have to differ."""

SHOWN_DIGITS = 6


@dataclass(frozen=True)
class Series:
    """A metric's values at the steps that have it, in order."""

    metric: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def first(self, count: int = WINDOW) -> Series:
        return Series(self.metric, self.steps[:count], self.values[:count])

    def last(self, count: int = WINDOW) -> Series:
        return Series(self.metric, self.steps[-count:], self.values[-count:])

    def up_to(self, step: int) -> Series:
        """Returns the values of steps up to `step`, included."""
        count = sum(each <= step for each in self.steps)
        return self.first(count)

    @property
    def median(self) -> float:
        """The median; NaN of nothing, which no comparison holds for."""
        return statistics.median(self.values) if self.values else math.nan

    @property
    def noise(self) -> float:
        """How far a value is from the median, as the median has it; 0 of nothing."""
        middle = self.median
        return statistics.median(abs(value - middle) for value in self.values) if self else 0.0

    def since(self, is_so: Callable[[float], bool]) -> int | None:
        """Returns the first step from which on `is_so` holds for most values (STEADY); None if it
        does not at the end."""
        found, num_so = None, 0
        for count, (step, value) in enumerate(reversed(list(self)), 1):
            num_so += is_so(value)
            if is_so(value) and num_so >= STEADY * count:
                found = step
        return found

    def windows(self, size: int = WINDOW) -> Iterator[Series]:
        """Yields every stretch of `size` values, the first one first."""
        for start in range(len(self) - size + 1):
            end = start + size
            yield Series(self.metric, self.steps[start:end], self.values[start:end])

    def evidence(self, count: int = WINDOW) -> Evidence:
        """Returns the last `count` values, rounded."""
        shown = self.last(count)
        values = tuple(float(f"{value:.{SHOWN_DIGITS}g}") for value in shown.values)
        return Evidence(metric=self.metric, steps=shown.steps, values=values)


@dataclass(frozen=True)
class HeldOut:
    """A held-out set's mean rewards by step; `name` is "" for `data.eval`. `half_widths` are of
    their 95 % confidence intervals, 0 where there is none."""

    name: str
    rewards: Series
    half_widths: tuple[float, ...]

    def margin(self, one: int, other: int, scale: float) -> float:
        """Returns how far two of the rewards, by position, have to be apart to differ with 95 %
        confidence. The problems are the same, so this is rather too much. Without intervals it is
        a share of `scale`."""
        found = math.hypot(self.half_widths[one], self.half_widths[other])
        return found or LEAST_CHANGE * scale


@dataclass(frozen=True)
class Facts:
    """A run. `rows` are of its steps, in order, the evaluation before training as step 0;
    `batches` are scored ones, the oldest and the newest that are stored; `syncs` are rows of
    weights.jsonl, in order. `record` is None while its own worker asks: then nothing is said about
    its state. `last_event_at` and `now` are Unix times."""

    job: Job
    rows: Sequence[MetricsRow] = ()
    batches: Sequence[Batch] = ()
    syncs: Sequence[Mapping[str, Any]] = ()
    record: JobRecord | None = None
    last_event_at: float | None = None
    now: float = 0.0

    def about(self, record: JobRecord, last_event_at: float | None, now: float) -> Facts:
        """Returns the facts with the job's state."""
        return replace(self, record=record, last_event_at=last_event_at, now=now)

    def of(self, metric: str) -> Series:
        """Returns the metric over the steps of training."""
        return self._series(metric, 1)

    def _series(self, metric: str, first_step: int) -> Series:
        found = [
            (row.step, row.metrics[metric])
            for row in self.rows
            if row.step >= first_step and metric in row.metrics
        ]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return Series(metric, steps, values)

    @property
    def newest(self) -> Batch | None:
        return self.batches[-1] if self.batches else None

    @property
    def full_mark(self) -> float:
        """The reward of a completion that is all right; 1 if no reward has a weight above 0."""
        return sum(max(reward.weight, 0.0) for reward in outcomes(self.job)) or 1.0

    def held_out(self) -> list[HeldOut]:
        """Returns the held-out sets with a reward; an ignored evaluation does not count."""
        return [found for name in ("", *self.job.evaluation.sets) if (found := self._of_set(name))]

    def _of_set(self, name: str) -> HeldOut | None:
        prefix = metric_prefix(name)
        rewards = self._series(f"{prefix}reward", 0)
        ignored = set(self._series(f"{prefix}ignored", 0).steps)
        low, high = (dict(self._series(prefix + each, 0)) for each in (LOW, HIGH))
        kept = [(step, value) for step, value in rewards if step not in ignored]
        if not kept:
            return None
        steps, values = zip(*kept, strict=True)
        widths = [(high[step] - low[step]) / 2 if step in low else 0.0 for step in steps]
        return HeldOut(name, Series(rewards.metric, steps, values), tuple(widths))

    @property
    def learned(self) -> bool:
        """Whether the last evaluation of some held-out set is better than its first, beyond
        chance: what changed then may well be what was to be learned."""
        return any(
            found.rewards.values[-1] - found.rewards.values[0] > found.margin(0, -1, self.full_mark)
            for found in self.held_out()
            if len(found.rewards) > 1
        )


def percent(share: float) -> str:
    """Returns a share for people: "31 %"; below 1 % with one digit more."""
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.1%}"


def steps_of(series: Series) -> str:
    """Returns the steps for people: "steps 31 to 40", "step 3"."""
    first, last = series.steps[0], series.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"
