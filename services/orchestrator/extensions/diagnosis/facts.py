"""What findings follow from: a run's rows of metrics, some of its stored batches, its syncs, its
record; how these are read from a run folder; and how a finding is made of them, by an entry of
findings.toml."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from services.orchestrator.grpo.advantages import outcomes
from services.orchestrator.grpo.held_out import HIGH, IGNORED, LOW, metric_prefix
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import FoundRun, find_run
from shared.errors import BadRequest, NotFound
from shared.job import Job
from shared.wire import Batch, Evidence, Finding, JobRecord, MetricsRow
from shared.wire.jobs import FindingCode, FindingLevel

WINDOW = 10
"""Steps that a median is over: four odd steps among ten do not move it, and ten come soon."""

FEWEST = 5
"""Fewest steps about which anything is said that a step or two may have by chance."""

NEWEST = 3
"""Steps at the end whose median has to show a finding too: one odd step does not end it."""

STEADY = 0.8
"""Share of the steps since a finding began that have to show it: one good step among five does not
begin it again."""

FIRST_ROWS, MIDDLE_ROWS, LAST_ROWS = 200, 1000, 2000
"""Most rows that are read of a run's beginning, middle and end: a bound of memory and time."""

LEAST_CHANGE = 0.05
"""Share of the full mark by which held-out rewards without a confidence interval have to differ."""


@dataclass(frozen=True)
class Series:
    """A metric's values at the steps that have it, in order."""

    metric: str
    points: tuple[tuple[int, float], ...] = ()

    def __len__(self) -> int:
        return len(self.points)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.points)

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(value for _, value in self.points)

    def where(self, keep: Callable[[int, float], bool]) -> Series:
        """Returns the points for which `keep`, of step and value, holds."""
        return Series(self.metric, tuple(point for point in self.points if keep(*point)))

    def first(self, count: int = WINDOW) -> Series:
        return Series(self.metric, self.points[:count])

    def last(self, count: int = WINDOW) -> Series:
        return Series(self.metric, self.points[-count:])

    @property
    def median(self) -> float:
        """The median; NaN of no values, for which every comparison is false."""
        return statistics.median(self.values) if self.points else math.nan

    @property
    def noise(self) -> float:
        """The median distance from the median; 0 of no values."""
        middle = self.median
        return statistics.median([abs(value - middle) for value in self.values] or [0.0])

    def since(self, is_so: Callable[[float], bool]) -> int | None:
        """Returns the first step from which on `is_so` holds for most values (STEADY); None if it
        does not at the end."""
        found, num_so = None, 0
        for count, (step, value) in enumerate(reversed(self.points), 1):
            num_so += is_so(value)
            if is_so(value) and num_so >= STEADY * count:
                found = step
        return found

    @property
    def span(self) -> str:
        """The steps for people: "steps 31 to 40", "step 3"."""
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def evidence(self) -> Evidence:
        """Returns the last values, rounded."""
        shown = self.last()
        values = tuple(float(f"{value:.6g}") for value in shown.values)
        return Evidence(metric=self.metric, steps=shown.steps, values=values)


@dataclass(frozen=True)
class HeldOut:
    """A held-out set's mean rewards by step, without ignored evaluations. `half_widths` are of
    their 95 % confidence intervals, 0 where there is none."""

    title: str
    rewards: Series
    half_widths: tuple[float, ...]

    def margin(self, one: int, other: int, scale: float) -> float:
        """Returns how far two of the rewards, by position, have to be apart to differ with 95 %
        confidence. The problems are the same, so this is rather too much. Without intervals it is
        a share of `scale`."""
        found = math.hypot(self.half_widths[one], self.half_widths[other])
        return found or LEAST_CHANGE * scale


@dataclass(frozen=True)
class RunSnapshot:
    """A run. `rows` are of its steps, in order, the evaluation before training as step 0; `newest`
    is its newest stored batch that is scored; `syncs` are rows of weights.jsonl, in order. `record`
    is None while its own worker asks: then nothing is said about its state. `last_event_at` and
    `now` are Unix times."""

    job: Job
    rows: Sequence[MetricsRow] = ()
    newest: Batch | None = None
    syncs: Sequence[Mapping[str, Any]] = ()
    record: JobRecord | None = None
    last_event_at: float | None = None
    now: float = 0.0

    def of(self, metric: str, first_step: int = 1) -> Series:
        """Returns the metric over the steps of training; with the evaluation before it from step
        0 on."""
        rows = (row for row in self.rows if row.step >= first_step and metric in row.metrics)
        return Series(metric, tuple((row.step, row.metrics[metric]) for row in rows))

    @property
    def full_mark(self) -> float:
        """The reward of a completion that is all right; 1 if no reward has a weight above 0."""
        return sum(max(reward.weight, 0.0) for reward in outcomes(self.job)) or 1.0

    @functools.cached_property
    def held_out(self) -> list[HeldOut]:
        """The held-out sets with a reward."""
        found: list[HeldOut] = []
        for name in ("", *self.job.evaluation.sets):
            of = {each: self.of(metric_prefix(name) + each, 0) for each in (IGNORED, LOW, HIGH)}
            low, high = dict(of[LOW].points), dict(of[HIGH].points)
            rewards = self.of(f"{metric_prefix(name)}reward", 0)
            rewards = rewards.where(lambda step, _, of=of: step not in of[IGNORED].steps)
            widths = [(high[at] - low[at]) / 2 if at in low else 0.0 for at in rewards.steps]
            title = f"held-out set {name!r}" if name else "held-out problems"
            found += [HeldOut(title, rewards, tuple(widths))] if rewards else []
        return found

    @property
    def learned(self) -> bool:
        """Whether the last evaluation of some held-out set is better than its first, beyond
        chance: what changed then may well be what was to be learned."""
        return any(
            each.rewards.values[-1] - each.rewards.values[0] > each.margin(0, -1, self.full_mark)
            for each in self.held_out
            if len(each.rewards) > 1
        )


# --- how a run folder is read --------------------------------------------------------------------


def of_folder(folder: RunFolder, job: Job) -> RunSnapshot:
    """Returns the facts that the run folder has: its rows and its newest batch."""
    return RunSnapshot(job, _bounded(folder.metrics()), _newest_graded(folder), folder.syncs())


def _bounded(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Returns the rows, of each part of the middle the one with the most metrics: evaluations."""
    middle = rows[FIRST_ROWS:-LAST_ROWS]
    size = math.ceil(len(middle) / MIDDLE_ROWS) or 1
    parts = (middle[at : at + size] for at in range(0, len(middle), size))
    chosen = (max(part, key=lambda row: len(row.metrics)) for part in parts)
    return [*rows[:FIRST_ROWS], *chosen, *rows[FIRST_ROWS:][-LAST_ROWS:]]


def _newest_graded(folder: RunFolder) -> Batch | None:
    for step in folder.batch_steps()[:-9:-1]:  # of the newest eight
        with contextlib.suppress(NotFound):  # removed just now
            batch = folder.batch(step)
            if batch.graded:
                return batch
    return None


def alone(path: Path) -> tuple[RunSnapshot, JobRecord]:
    """Returns the facts of a run folder without a stack, and the record as far as it tells. A job
    that has not ended counts as paused on request. Raises BadRequest for a folder of no job."""
    found = find_run(path.resolve())
    if found is None or found.job is None:
        why = f"{str(path)!r} is no run folder: expected one with job.json"
        raise BadRequest((found and found.problem) or why)
    record = record_of(found, found.job)
    facts = of_folder(RunFolder(found.path), found.job)
    return replace(facts, record=record, now=time.time()), record


def record_of(found: FoundRun, job: Job) -> JobRecord:
    """Returns the record as far as the folder tells."""
    return JobRecord(
        id=found.id,
        name=job.name,
        model=job.model,
        learning_rate=job.learning_rate if job.trains else None,
        created_at=found.note.created_at,
        finished_at=found.note.finished_at,
        step=found.step,
        steps=job.steps,
        run_dir=str(found.path),
        summary=found.summary,
        data=found.data,
        job=job,
        status=found.end or "paused",
        error=found.error if found.end else "paused on request",
        pause_reason=None if found.end else "requested",
    )


# --- how a finding is made -----------------------------------------------------------------------

COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

OneLine = Annotated[str, BeforeValidator(lambda text: " ".join(text.split()))]


class Entry(BaseModel):
    """An entry of findings.toml. `title`, `cause` and `remedy` are format strings.

    With `median`, (comparison, threshold), the entry is a rule. A run of at least `min_steps` steps
    meets it if the medians of the last `window` and of the last NEWEST values of `metric` both
    compare so with the threshold; the second keeps a past fault from being reported. If `of_first`,
    the threshold is a share of the median of the first steps. From a median of `problem_from` on
    the level is "problem". `also` names further metrics to show as evidence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: FindingCode
    level: FindingLevel
    title: OneLine
    cause: OneLine
    remedy: OneLine
    metric: str = ""
    median: tuple[Literal[">=", "<=", ">", "<"], float] | None = None
    of_first: bool = False
    window: int = WINDOW
    min_steps: int = 1
    problem_from: float = math.inf
    also: tuple[str, ...] = ()


@functools.cache
def entries() -> dict[str, Entry]:
    """Returns the entries by name: a code, or `code/case`, which has what it does not say itself
    from its code's entry. Findings of equal level are shown in this order."""
    stored = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
    found: dict[str, Entry] = {}
    for name, entry in stored.items():
        code = name.partition("/")[0]
        found[name] = Entry.model_validate({"code": code, **stored.get(code, {}), **entry})
    return found


def finding(
    name: str,
    since_step: int | None,
    evidence: Sequence[Series | Evidence],
    /,
    level: FindingLevel | None = None,
    **values: object,
) -> Finding:
    """Returns the finding with the sentences called `name`, filled in with `values`, and the newest
    values of each series that has any. `level`: another one than the entry has."""
    entry = entries()[name]
    shown = [each.evidence() if isinstance(each, Series) else each for each in evidence]
    return Finding(
        code=entry.code,
        level=level or entry.level,
        title=entry.title.format(**values),
        since_step=since_step,
        evidence=tuple(each for each in shown if each.values or each.text),
        cause=entry.cause.format(**values),
        remedy=entry.remedy.format(**values),
    )


@dataclass(frozen=True)
class Reading:
    """A rule's series in a run. In the rule's sentences it is `m`: `{m[reward]:.3g}` is the median
    of the last values of another metric."""

    name: str
    run: RunSnapshot
    series: Series

    @property
    def entry(self) -> Entry:
        return entries()[self.name]

    @property
    def last(self) -> Series:
        """The steps that the rule is about."""
        return self.series.last(self.entry.window)

    @property
    def value(self) -> float:
        return self.last.median

    @property
    def began(self) -> float:
        """The median of the first steps; NaN of none."""
        return self.series.first().median

    @property
    def share(self) -> str:
        """The share in all of the last steps together: their median may be 1 where it is less."""
        return percent(statistics.fmean(self.last.values))

    def __getitem__(self, metric: str) -> float:
        return self.run.of(metric).last().median

    def holds(self, value: float) -> bool:
        if self.entry.median is None:
            raise ValueError(f"entry {self.name!r} of findings.toml has no `median`")
        sign, threshold = self.entry.median
        scale = self.began if self.entry.of_first else 1.0
        return COMPARE[sign](value, threshold * scale)

    @property
    def is_met(self) -> bool:
        newest = self.last.last(NEWEST)
        is_long = len(self.series) >= self.entry.min_steps
        return is_long and self.holds(self.value) and self.holds(newest.median)

    def finding(
        self, name: str | None = None, evidence: Sequence[Evidence] = (), **values: object
    ) -> Finding:
        """Returns the finding, with the sentences called `name`, by default the rule's own."""
        return finding(
            name or self.name,
            self.series.since(self.holds),
            [self.series, *map(self.run.of, self.entry.also), *evidence],
            level="problem" if self.value >= self.entry.problem_from else None,
            m=self,
            job=self.run.job,
            **values,
        )


def rule(run: RunSnapshot, name: str, series: Series | None = None) -> Reading | None:
    """Returns the rule's reading of the run; None if it is not met. `series` is another one than
    of the rule's metric."""
    reading = Reading(name, run, run.of(entries()[name].metric) if series is None else series)
    return reading if reading.is_met else None


def of_batch(batch: Batch, text: str, *values: float) -> Evidence:
    """Returns evidence in the rollouts of a batch; values are rounded."""
    rounded = tuple(round(value, 4) for value in values)
    return Evidence(metric="rollouts", steps=(batch.step,), values=rounded, text=text)


def percent(share: float) -> str:
    """Returns a share for people: "31%"; below 1 % with one digit more. Only all are "100%"."""
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.1%}"
