"""How a check makes a finding: the sentences of findings.toml, filled in; and checks that are rows
of data, a metric and the condition that its last steps meet."""

from __future__ import annotations

import functools
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from services.orchestrator.extensions.diagnosis.facts import WINDOW, RunSnapshot, Series, percent
from shared.job import Job
from shared.wire import Evidence, Finding
from shared.wire.jobs import FindingCode, FindingLevel

NEWEST = 3
"""Steps at the end whose median has to show a finding too: one odd step does not end it."""

OneLine = Annotated[str, BeforeValidator(lambda text: " ".join(text.split()))]


class Sentences(BaseModel):
    """An entry of findings.toml. `title`, `cause` and `remedy` are format strings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: FindingCode
    level: FindingLevel
    title: OneLine
    cause: OneLine
    remedy: OneLine
    keys: OneLine = ""


@functools.cache
def sentences() -> dict[str, Sentences]:
    """Returns the sentences by name: a code, or `code/case`, which has what it does not say itself
    from its code's entry."""
    entries = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
    found: dict[str, Sentences] = {}
    for name, entry in entries.items():
        code = name.partition("/")[0]
        found[name] = Sentences.model_validate({"code": code, **entries.get(code, {}), **entry})
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
    values of each series that has any. `level`: another one than the sentences have."""
    said = sentences()[name]
    shown = [each.evidence() if isinstance(each, Series) else each for each in evidence]
    return Finding(
        code=said.code,
        level=level or said.level,
        title=said.title.format(**values),
        since_step=since_step,
        evidence=tuple(each for each in shown if each.values or each.text),
        cause=said.cause.format(**values),
        remedy=said.remedy.format(**values),
        keys=tuple(said.keys.split()),
    )


@dataclass(frozen=True)
class Reading:
    """A rule's metric in a run: the whole series, and its `last` steps, which the rule is about."""

    run: RunSnapshot
    series: Series
    last: Series

    @property
    def job(self) -> Job:
        return self.run.job

    @property
    def value(self) -> float:
        """The median of the last steps; NaN of none."""
        return self.last.median

    @property
    def began(self) -> float:
        """The median of the first steps; NaN of none."""
        return self.series.first().median

    @property
    def share(self) -> str:
        """The share in all of the last steps together: their median may be 1 where it is less."""
        return percent(statistics.fmean(self.last.values))

    def now(self, metric: str) -> float:
        """Returns the median of another metric's last steps; NaN of none."""
        return self.run.of(metric).last().median


Condition = Callable[[Reading], bool]
Holds = Callable[[Reading, float], bool]


def at_least(threshold: float) -> Holds:
    return lambda _, value: value >= threshold


def below(threshold: float) -> Holds:
    return lambda _, value: value < threshold


@dataclass(frozen=True)
class Rule:
    """Finds that `holds` is true of the median of a metric's last `window` steps, and of its last
    NEWEST ones, so that what is over is not reported, in a run with at least `min_steps` of them
    and for which `when` is true. `metric` may be a function that makes the series. It is a problem
    if the median is `problem_from` or more. The sentences come from the first of `cases` that is
    true, else `name`; their values are the reading `m`, its `job`,
    and `values`. `also` is further evidence: metrics, or what a function returns."""

    name: str
    metric: str | Callable[[RunSnapshot], Series]
    holds: Holds
    window: int = WINDOW
    min_steps: int = 1
    problem_from: float | None = None
    when: Condition = lambda _: True
    cases: Mapping[str, Condition] = field(default_factory=dict[str, Condition])
    also: Sequence[str | Callable[[Reading], Sequence[Evidence]]] = ()
    values: Callable[[Reading], Mapping[str, object]] = lambda _: {}

    def __call__(self, run: RunSnapshot) -> Iterator[Finding]:
        series = run.of(self.metric) if isinstance(self.metric, str) else self.metric(run)
        m = Reading(run, series, series.last(self.window))
        newest = series.last(min(self.window, NEWEST))
        if len(series) < self.min_steps or not self.holds(m, m.value):
            return
        if not self.holds(m, newest.median) or not self.when(m):
            return
        evidence: list[Series | Evidence] = [series]
        for each in self.also:
            evidence += [run.of(each)] if isinstance(each, str) else each(m)
        is_problem = self.problem_from is not None and m.value >= self.problem_from
        yield finding(
            next((name for name, is_so in self.cases.items() if is_so(m)), self.name),
            series.since(lambda value: self.holds(m, value)),
            evidence,
            level="problem" if is_problem else None,
            m=m,
            job=run.job,
            **self.values(m),
        )
