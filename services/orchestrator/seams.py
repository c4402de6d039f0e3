"""The seams at which extensions plug into a run. The core imports no extension: `app.py` composes
them, and a run receives them as one `Extensions`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from shared.errors import BadRequest, Conflict
from shared.http.client import Client
from shared.http.connecting import Tell
from shared.job import Job, TeacherSpec
from shared.settings import Settings
from shared.wire import (
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    Finding,
    Prompt,
    RolloutGroup,
    Sampling,
    Score,
    ScoredGroup,
    ToolCall,
)

if TYPE_CHECKING:
    from services.orchestrator.samplers.services import Services
    from services.orchestrator.samplers.status import AttemptStatus
    from services.orchestrator.store.folder import RunFolder
    from services.orchestrator.store.leases import Journal

LOST = "episode_lost"
"""The error's code of an episode that cannot continue."""


class EpisodeLost(Conflict):
    """The episode cannot continue."""

    default_code = LOST


class Environment(Protocol):
    """The episodes of a job. `service` is the name of the service that calls wait for. Each call
    raises EpisodeLost for an episode that cannot continue; the conversation is then played again. A
    failing tool is a result for the model."""

    service: str

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        """Begins an episode with a row, under a new id."""
        ...

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        """Makes the calls of turn number `turn`, from 0 on."""
        ...

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        """Ends the episode. `rewarded`: the caller needs its reward."""
        ...

    def drop(self, id: str) -> None:
        """Drops an episode, if it is open, without waiting."""
        ...

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        """Opens an episode of a row and ends it. Raises BadRequest where it cannot be opened, and
        Unavailable if no server of the environment can be reached."""
        ...

    async def shut(self) -> None:
        """Ends all episodes."""
        ...


@dataclass(frozen=True)
class Round:
    """A round of a step that takes `count` groups, sampled by versions `oldest` to `newest` or by
    unknown ones."""

    step: int
    round: int
    count: int
    oldest: int
    newest: int


class GroupSource(Protocol):
    """Groups that were sampled and scored elsewhere. A step holds `turn` until it has its groups,
    so that steps get them in their order."""

    turn: asyncio.Lock

    async def take(self, asked: Round) -> list[ScoredGroup]:
        """Returns the groups of a round. Waits for them without a limit."""
        ...


class Teacher(Protocol):
    """A larger model that gives log-probs of the sampled tokens."""

    async def check(self, job: Job) -> None:
        """Raises BadRequest where the teacher has another vocabulary than the job's model."""
        ...

    async def score(
        self, group: RolloutGroup, scores: Sequence[Score], *, alone: bool
    ) -> tuple[Score, ...]:
        """Returns the scores with the teacher's log-probs. `alone`: the job has no other reward."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class TrackerReport:
    """A sentence on which rows of a run the tracker has; `complete`: it has all rows."""

    message: str
    complete: bool


class Tracker(Protocol):
    """Sends a job's rows of metrics to an external tracker, and neither delays nor stops the job.
    `trouble` is a sentence on the rows that the tracker lacks, and why; None: it has all."""

    @property
    def trouble(self) -> str | None: ...

    def start(self) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    async def finish(self, succeeded: bool) -> TrackerReport | None:
        """Returns a report on the rows that the tracker has; None if there was no row."""
        ...


@dataclass(frozen=True)
class Program:
    """A job whose operations a program requests, one by one, in place of a recipe. `tell` is
    called with the number of each finished operation; `num_queued` returns how many jobs wait;
    `last` is the number of the trainer's last operation."""

    job: Job
    services: Services
    folder: RunFolder
    journal: Journal
    tell: Callable[[int], None]
    num_queued: Callable[[], int]
    last: int


Player = Callable[["Services", Job, Prompt, int, str, Sampling], Coroutine[Any, Any, RolloutGroup]]
"""Plays rollouts of a prompt in an environment, by weights of at least a version; the key names
their requests."""


def _missing(*_: Any, **__: Any) -> NoReturn:
    raise BadRequest("this orchestrator was started without the extension that the job needs")


@dataclass(frozen=True)
class Extensions:
    """The functions that extensions add to the runs of a process. A job that needs a missing
    extension is refused."""

    play_group: Player = _missing
    """Samples a prompt's group in an environment."""

    environment_of: Callable[[Job, str, Client, float | None, Settings], Environment | None] = (
        _missing
    )
    """Returns the environment of a job; None if its agents run elsewhere and have their own.
    Arguments: the job, its id, the client of the reward service, how long calls wait for that
    service (s), and the settings."""

    teacher_of: Callable[[TeacherSpec, Settings, Tell, float | None], Teacher] = _missing
    """Returns the teacher. The last argument is how long calls wait for its endpoint (s)."""

    tracker_of: Callable[[Job, str, Path], Tracker] | None = None
    """Returns the trackers of a job, from the job, its id and its run folder."""

    source_of: Callable[[Path, AttemptStatus], GroupSource] = _missing
    """Returns the source of groups of a job whose groups are pushed, from its run folder."""

    drive: Callable[[Program], Awaitable[int]] = _missing
    """Carries out a program's operations, and returns the number of the last one."""

    diagnose: Callable[[RunFolder, Job], Sequence[Finding]] = lambda _folder, _job: ()

    warn_of: Callable[[Job], str | None] = lambda _job: None
    """Returns a warning about a probable mistake in a submitted job. It may take seconds."""

    attending: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _job_id: (
        contextlib.nullcontext()
    )
    """Entered while an attempt at a job runs."""

    forget: Callable[[str], None] = lambda _job_id: None
    """Called when an attempt at a job has been closed."""


NO_EXTENSIONS = Extensions()
