"""What findings follow from: a run's rows of metrics, some of its stored batches, its syncs, its
record; and how these are read from a run folder."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.orchestrator.grpo.advantages import outcomes
from services.orchestrator.grpo.held_out import HIGH, LOW, metric_prefix
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import FoundRun, find_run
from shared.errors import BadRequest, NotFound
from shared.job import Job
from shared.wire import Batch, Evidence, JobRecord, MetricsRow

FIRST_ROWS, LAST_ROWS = 200, 2000
"""Rows of a very long run that are looked at, from its beginning and its end: enough for all
windows, and a bound for the time that it takes."""

TRIES = 8
"""Most stored batches that are tried for one that is graded."""

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

    def _part(self, which: slice) -> Series:
        return Series(self.metric, self.steps[which], self.values[which])

    def kept(self, keep: Callable[[int, float], bool]) -> Series:
        """Returns the values for which `keep`, of step and value, holds."""
        pairs = [pair for pair in self if keep(*pair)]
        return Series(self.metric, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    def first(self, count: int = WINDOW) -> Series:
        return self._part(slice(count))

    def last(self, count: int = WINDOW) -> Series:
        return self._part(slice(-count, None))

    def up_to(self, step: int) -> Series:
        """Returns the values of steps up to `step`, included."""
        return self.kept(lambda each, _: each <= step)

    @property
    def median(self) -> float:
        """The median; NaN of no values, for which every comparison is false."""
        return statistics.median(self.values) if self.values else math.nan

    @property
    def noise(self) -> float:
        """The median distance from the median; 0 of no values."""
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
        """Yields every `size` values in a row, the first ones first."""
        return (self._part(slice(at, at + size)) for at in range(len(self) - size + 1))

    @property
    def span(self) -> str:
        """The steps for people: "steps 31 to 40", "step 3"."""
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def evidence(self) -> Evidence:
        """Returns the last values, rounded."""
        shown = self.last()
        values = tuple(float(f"{value:.{SHOWN_DIGITS}g}") for value in shown.values)
        return Evidence(metric=self.metric, steps=shown.steps, values=values)


@dataclass(frozen=True)
class HeldOut:
    """A held-out set's mean rewards by step; `name` is "" for `data.eval`. `half_widths` are of
    their 95 % confidence intervals, 0 where there is none."""

    name: str
    rewards: Series
    half_widths: tuple[float, ...]

    @property
    def title(self) -> str:
        return f"held-out set {self.name!r}" if self.name else "held-out problems"

    def margin(self, one: int, other: int, scale: float) -> float:
        """Returns how far two of the rewards, by position, have to be apart to differ with 95 %
        confidence. The problems are the same, so this is rather too much. Without intervals it is
        a share of `scale`."""
        found = math.hypot(self.half_widths[one], self.half_widths[other])
        return found or LEAST_CHANGE * scale


@dataclass(frozen=True)
class RunSnapshot:
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

    def about(self, record: JobRecord, last_event_at: float | None, now: float) -> RunSnapshot:
        """Returns the facts with the job's state."""
        return replace(self, record=record, last_event_at=last_event_at, now=now)

    def of(self, metric: str) -> Series:
        """Returns the metric over the steps of training."""
        return self._series(metric, 1)

    def _series(self, metric: str, first_step: int) -> Series:
        rows = [row for row in self.rows if row.step >= first_step and metric in row.metrics]
        steps, values = (row.step for row in rows), (row.metrics[metric] for row in rows)
        return Series(metric, tuple(steps), tuple(values))

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
        kept = rewards.kept(lambda step, _: step not in ignored)
        widths = [(high[step] - low[step]) / 2 if step in low else 0.0 for step in kept.steps]
        return HeldOut(name, kept, tuple(widths)) if kept else None

    @property
    def learned(self) -> bool:
        """Whether the last evaluation of some held-out set is better than its first, beyond
        chance: what changed then may well be what was to be learned."""
        return any(
            found.rewards.values[-1] - found.rewards.values[0] > found.margin(0, -1, self.full_mark)
            for found in self.held_out()
            if len(found.rewards) > 1
        )


def of_batch(batch: Batch, text: str, *values: float) -> Evidence:
    """Returns evidence in the rollouts of a batch; values are rounded."""
    rounded = tuple(round(value, 4) for value in values)
    return Evidence(metric="rollouts", steps=(batch.step,), values=rounded, text=text)


def percent(share: float) -> str:
    """Returns a share for people: "31%"; below 1 % with one digit more. Only all are "100%"."""
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.1%}"


def of_folder(folder: RunFolder, job: Job, rows: Sequence[MetricsRow] | None = None) -> RunSnapshot:
    """Returns the facts that the run folder has; `rows` if they are known already."""
    rows = folder.metrics() if rows is None else rows
    if len(rows) > FIRST_ROWS + LAST_ROWS:
        rows = [*rows[:FIRST_ROWS], *rows[-LAST_ROWS:]]
    return RunSnapshot(job=job, rows=rows, batches=_batches(folder), syncs=folder.syncs())


def alone(path: Path) -> tuple[RunSnapshot, JobRecord]:
    """Returns the facts of a run folder without a stack, and the record as far as it tells. A job
    that has not ended counts as paused on request. Raises BadRequest for a folder of no job."""
    found = find_run(path.resolve())
    if found is None or found.job is None:
        raise BadRequest(
            found.problem
            if found and found.problem
            else f"{str(path)!r} is no run folder: expected one with job.json"
        )
    record = record_of(found, found.job)
    return of_folder(RunFolder(found.path), found.job).about(record, None, time.time()), record


def record_of(found: FoundRun, job: Job) -> JobRecord:
    """Returns the record as far as the folder tells."""
    known: dict[str, Any] = {
        "status": found.end or "paused",
        "error": found.error if found.end else "paused on request",
        "pause_reason": None if found.end else "requested",
    }
    return JobRecord(
        id=found.id,
        name=job.name,
        model=job.model,
        learning_rate=job.learning_rate if job.trains else None,
        created_at=found.created_at,
        finished_at=found.finished_at,
        step=found.step,
        steps=job.steps,
        run_dir=str(found.path),
        summary=found.summary,
        data=found.data,
        job=job,
        **known,
    )


def _batches(folder: RunFolder) -> list[Batch]:
    """Returns the oldest and the newest graded batch; fewer if there are not two."""
    steps = folder.batch_steps()
    oldest = _first_graded(folder, steps[:TRIES])
    newest = _first_graded(folder, steps[: -TRIES - 1 : -1])
    found = {batch.step: batch for batch in (oldest, newest) if batch}
    return list(found.values())


def _first_graded(folder: RunFolder, steps: Sequence[int]) -> Batch | None:
    for step in steps:
        try:
            batch = folder.batch(step)
        except NotFound:  # removed just now
            continue
        if batch.graded:
            return batch
    return None
