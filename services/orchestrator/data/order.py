"""Which problems a step takes: a pure function of (seed, step, round), so resuming needs no saved
position.

A pass over the data takes every row once; the next one has another order. Round 0 of a step are its
prompts; rounds from 1 may replace groups without signal.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set

from services.orchestrator.data.choosing import Problem
from shared.errors import BadRequest
from shared.job import Job


class InTable:
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
        found, rows = first, range(len(self._problems))
        taken = {*first, *skipped}
        for earlier in range(1, round + 1):
            drawn = random.Random(f"{self._seed}:{step}:{earlier}").sample(
                rows, min(len(first) + len(taken), len(rows))
            )
            found = [place for place in drawn if place not in taken][: len(first)]
            taken.update(found)
        return found

    def _place(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._problems))
        if not self._job.data.shuffle:
            return offset
        return _shuffled(len(self._problems), self._seed, epoch)[offset]


class InStream:
    """A stream is read from its beginning on. Its rows are shuffled within a buffer. Replacement
    problems come from another shuffle of the stream, in which each step has a part of its own.

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
        """As `InTable.take`."""
        count = self._count
        with self._turn:
            found = self._main.read((step - 1) * count, count)
            taken = {problem.index for problem in found}
            for earlier in range(1, round + 1):
                part = (step - 1) * self._num_rounds + earlier - 1
                drawn = {one.index: one for one in self._spare.read(part * count, count)}
                found = [one for index, one in drawn.items() if index not in taken]
                taken.update(drawn)
            return found


Order = InTable | InStream


class Tape:
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
        self._pass_number = number
        self._end = number * (self._pass_length or 0)
        self._began_at = self._end
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


def _tape(job: Job, begin: Callable[[], Iterator[Problem]], kind: str, keep: int) -> Tape:
    spec, seed = job.data, _seed(job)

    def begin_pass(number: int) -> Iterator[Problem]:
        problems = itertools.islice(begin(), spec.max_samples)
        if not spec.shuffle and not kind:
            return problems
        rng = random.Random(f"{kind}{seed}:{number}")
        return shuffled_within(problems, spec.shuffle_buffer, rng)

    return Tape(begin_pass, keep)


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
