"""Skips problems that teach nothing. A step still takes the same problems whenever it is asked, and
however often the job was interrupted.

A step is sampled once the step `max_staleness` + 1 before it is done. So it uses the verdicts of
groups up to that step, even if more are known by then. The run folder has the verdicts
(`difficulty.jsonl`); from them the walk through the data is repeated from step 1.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.orchestrator.data.choosing import Chosen, Problem
from services.orchestrator.data.order import InTable
from shared.job import DifficultySpec, Job

Verdict = Literal["right", "wrong", "mixed"]
"""Whether a group's rollouts were all right, all wrong, or some better than the rest."""

Verdicts = Mapping[int, Verdict]
"""The verdicts of a step's groups, by the row number of the problem."""


class History:
    """The verdicts on the groups of each step. `revision` grows when a known verdict changes."""

    def __init__(self, verdicts: Mapping[int, Verdicts] | None = None) -> None:
        self._steps = dict(verdicts or {})
        self.revision = 0

    def of(self, step: int) -> Verdicts:
        return self._steps.get(step, {})

    def note(self, step: int, verdicts: Verdicts) -> bool:
        """Returns whether the verdicts are new."""
        if self._steps.get(step) == verdicts:
            return False
        self.revision += step in self._steps
        self._steps[step] = verdicts
        return True


@dataclass(frozen=True)
class _Streak:
    """A problem's latest groups with the same verdict: `count` of them, the last in `step`."""

    verdict: Verdict
    count: int
    step: int


@dataclass(frozen=True)
class _Plan:
    """The places that a step takes, and the places that it skips."""

    places: list[int]
    skipped: frozenset[int]


class Skipping(InTable):
    """Walks through the passes of `InTable`, and leaves out problems that `[difficulty]` skips."""

    def __init__(self, job: Job, problems: Chosen, history: History) -> None:
        super().__init__(job, problems)
        self._places = {problems.number(place): place for place in range(len(problems))}
        self._history = history
        self._lag = job.max_staleness + 1
        self._turn = threading.Lock()
        self._begin()

    def take(self, step: int, round: int) -> list[Problem]:
        with self._turn:
            plan = self._plan(step)
            places = self._in_round(step, round, plan.places, plan.skipped)
        return [self._problems[place] for place in places]

    def num_skipped(self, step: int) -> int | None:
        """Returns how many problems the step skips; None if that is not known any more. Does not
        wait for a concurrent `take`."""
        plan = self._plans.get(step)
        return len(plan.skipped) if plan else None

    def _begin(self) -> None:
        """Goes back to the first step."""
        self._revision = self._history.revision
        self._next_step, self._position = 1, 0
        self._streaks: dict[int, _Streak] = {}  # by place
        self._skipped: set[int] = set()  # places
        self._expiries: list[tuple[int, int]] = []  # a heap: the last step that skips, and a place
        self._plans: OrderedDict[int, _Plan] = OrderedDict()

    def _plan(self, step: int) -> _Plan:
        is_gone = step < self._next_step and step not in self._plans
        if is_gone or self._revision != self._history.revision:
            self._begin()
        num_kept = 2 * self._lag + 2
        while self._next_step <= step:
            self._learn(self._next_step - self._lag)
            self._expire(self._next_step)
            places = self._walk()
            if self._next_step > step - num_kept:
                self._plans[self._next_step] = _Plan(places, frozenset(self._skipped))
            self._next_step += 1
        while len(self._plans) > num_kept:
            self._plans.popitem(last=False)
        return self._plans[step]

    def _learn(self, step: int) -> None:
        for number, verdict in self._history.of(step).items():
            place = self._places.get(number)
            if place is None:  # the row is no problem of this job
                continue
            before = self._streaks.get(place)
            count = before.count if before and before.verdict == verdict else 0
            streak = self._streaks[place] = _Streak(verdict, count + 1, step)
            if not _is_enough(self._job.difficulty, streak):
                self._skipped.discard(place)
                continue
            self._skipped.add(place)
            if skip_steps := self._job.difficulty.skip_steps:
                heapq.heappush(self._expiries, (step + skip_steps, place))

    def _expire(self, step: int) -> None:
        """Stops skipping problems whose time is over in `step`."""
        while self._expiries and self._expiries[0][0] < step:
            last_step, place = heapq.heappop(self._expiries)
            if self._streaks[place].step + self._job.difficulty.skip_steps == last_step:
                self._skipped.discard(place)

    def _walk(self) -> list[int]:
        """Takes the next problems that are not skipped. If a whole pass has too few, takes skipped
        ones."""
        count = self._job.sampling.prompts_per_step
        places: list[int] = []
        while len(places) < count:
            passed_over: list[int] = []
            for _ in range(len(self._problems)):
                place = self._place(self._position)
                self._position += 1
                (passed_over if place in self._skipped else places).append(place)
                if len(places) == count:
                    break
            places += passed_over[: count - len(places)]
        return places


def _is_enough(spec: DifficultySpec, streak: _Streak) -> bool:
    """Returns whether the problem is skipped from now on, for `skip_steps`."""
    enough = {"right": spec.skip_right, "wrong": spec.skip_wrong, "mixed": 0}[streak.verdict]
    return 0 < enough <= streak.count
