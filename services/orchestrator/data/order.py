"""Decides which problems a step takes: a pure function of (seed, step, round), so resuming needs no
saved position.

A pass over the data takes every row once; the next one has another order. Round 0 of a step are its
prompts; rounds from 1 may replace groups without signal.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from services.orchestrator.data.choosing import Problem, SelectedProblems
from shared.errors import BadRequest
from shared.job import DifficultySpec, Job


class TableOrder:
    """The order of a table, whose rows can be read in any order: a pass is a shuffle of all
    rows."""

    def __init__(self, job: Job, problems: Sequence[Problem]) -> None:
        self._job = job
        self._seed = _seed(job)
        self._problems = problems

    def take(self, step: int, round: int) -> list[Problem]:
        """Returns the problems of a step, from 1. Rounds from 1 take other problems than the step's
        earlier rounds, and so fewer once a small data set has no more."""
        count = self._job.sampling.prompts_per_step
        first = [self._place(position) for position in range((step - 1) * count, step * count)]
        return [self._problems[place] for place in self._in_round(step, round, first)]

    def _in_round(
        self, step: int, round: int, first: list[int], skipped: Set[int] = frozenset()
    ) -> list[int]:
        """Returns the places of a round of the step. `first` are the places of round 0. Rounds from
        1 take no `skipped` place."""
        places, rows = first, range(len(self._problems))
        taken = {*first, *skipped}
        for earlier in range(1, round + 1):
            drawn = random.Random(f"{self._seed}:{step}:{earlier}").sample(
                rows, min(len(first) + len(taken), len(rows))
            )
            places = [place for place in drawn if place not in taken][: len(first)]
            taken.update(places)
        return places

    def _place(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._problems))
        if not self._job.data.shuffle:
            return offset
        return _shuffled(len(self._problems), self._seed, epoch)[offset]


class StreamOrder:
    """The order of a stream, which is read from its beginning. Its rows are shuffled within a
    buffer. Replacement problems come from another shuffle of the stream, in which each step has a
    part of its own.

    `begin` starts reading. `num_rounds` is how many rounds from 1 a step may have.
    """

    def __init__(self, job: Job, begin: Callable[[], Iterator[Problem]], num_rounds: int) -> None:
        self._count = job.sampling.prompts_per_step
        self._num_rounds = num_rounds
        self._turn = threading.Lock()
        steps = job.max_staleness + 2
        self._main = _tape(job, begin, "", steps * self._count)
        self._spare = _tape(job, begin, "spare:", steps * self._count * num_rounds)

    def take(self, step: int, round: int) -> list[Problem]:
        """Returns as `TableOrder.take`."""
        count = self._count
        with self._turn:
            problems = self._main.read((step - 1) * count, count)
            taken = {problem.index for problem in problems}
            for earlier in range(1, round + 1):
                part = (step - 1) * self._num_rounds + earlier - 1
                drawn = {one.index: one for one in self._spare.read(part * count, count)}
                problems = [one for index, one in drawn.items() if index not in taken]
                taken.update(drawn)
            return problems


Order = TableOrder | StreamOrder


class ProblemStream:
    """An endless sequence of passes, read by position. The newest `keep` problems are held. To go
    back further, the stream is read again from the beginning of a pass."""

    def __init__(self, begin: Callable[[int], Iterator[Problem]], keep: int) -> None:
        self._begin = begin
        self._keep = keep
        self._pass_length: int | None = None
        self._held = deque[Problem]()
        self._open(0)

    def read(self, first: int, count: int) -> list[Problem]:
        """Returns `count` problems from position `first` on."""
        while self._end < first + count:
            self._read_one(first)
        start = first - (self._end - len(self._held))
        if start < 0:
            self._open(self._pass_of(first))
            return self.read(first, count)
        return list(itertools.islice(self._held, start, start + count))

    def _open(self, number: int) -> None:
        self._end = number * (self._pass_length or 0)
        self._held.clear()
        self._problems = self._begin(number)

    def _pass_of(self, position: int) -> int:
        """Returns the pass of a position; 0 while the length of a pass is not known."""
        return position // self._pass_length if self._pass_length else 0

    def _read_one(self, wanted: int) -> None:
        problem = next(self._problems, None)
        if problem is not None:
            self._held.append(problem)
            self._end += 1
            if len(self._held) > self._keep:
                self._held.popleft()
            return
        if self._pass_length is None:
            self._pass_length = self._end
        if not self._pass_length:
            raise BadRequest("the stream of data.train has no rows that pass data.filter")
        number = self._pass_of(self._end)
        if self._pass_of(wanted) > number:
            self._open(self._pass_of(wanted))
        else:
            self._problems = self._begin(number)


def _tape(job: Job, begin: Callable[[], Iterator[Problem]], kind: str, keep: int) -> ProblemStream:
    spec, seed = job.data, _seed(job)

    def begin_pass(number: int) -> Iterator[Problem]:
        problems = itertools.islice(begin(), spec.max_samples)
        if not spec.shuffle and not kind:
            return problems
        rng = random.Random(f"{kind}{seed}:{number}")
        return shuffled_within(problems, spec.shuffle_buffer, rng)

    return ProblemStream(begin_pass, keep)


def shuffled_within(
    problems: Iterator[Problem], size: int, rng: random.Random
) -> Iterator[Problem]:
    """Yields all of `problems` shuffled: each is drawn from a buffer of `size`."""
    held = list(itertools.islice(problems, size))
    for problem in problems:
        place = rng.randrange(len(held))
        yield held[place]
        held[place] = problem
    rng.shuffle(held)
    yield from held


def _seed(job: Job) -> int:
    return job.seed if job.data.shuffle_seed is None else job.data.shuffle_seed


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


# --- difficulty: skipped problems -----------------------------------------------------------------

# A step takes the same problems at every call, however often the job was interrupted. It is sampled
# once the step `max_staleness` + 1 before it is done, so it uses only the verdicts of groups up to
# that step, even if more are known by then. The run folder has the verdicts (`difficulty.jsonl`),
# from which the walk through the data is repeated from step 1.

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


class SkippingOrder(TableOrder):
    """Walks through the passes of `TableOrder`, and leaves out problems that `[difficulty]`
    skips."""

    def __init__(self, job: Job, problems: SelectedProblems, history: History) -> None:
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
