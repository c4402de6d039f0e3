"""Ownership of a trainer or sampler: it belongs to the orchestrator whose job it has.

Fences tell the attempts of one Redis apart. Each Redis has a counter of its own, so fences say
nothing between orchestrators of different Redis servers. There the first orchestrator keeps the
service until its jobs have left it, or the service has heard from none of them for SILENT_S; others
are refused (Conflict, code "taken"). Orchestrators that share a Redis are one owner. A header of
each request names the caller and its job, so that polls and health requests of a job count as well.

Holders says which attempts of that orchestrator may use the service: the newest one that came, and
the attempts that it named beside itself. Attempts come from one counter, so an older one that no
one named has been superseded: its lease has expired, or its job has left. A job that shares the
service names the attempts that had leases when it got its own, and so no one needs to tell the
service who has gone.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from shared.errors import Conflict
from shared.host.logs import get_logger
from shared.settings import PREFIX, Settings
from shared.wire import (
    Fence,
    Fenced,
    GenerateRequest,
    ModelRequest,
    Orchestrator,
    SleepRequest,
    TrainerJob,
)

HEADER = "x-hone-orchestrator"

SILENT_S = 60.0
"""Seconds without a request of the job after which another orchestrator may take the service. A job
asks idle services every 2 s, and polls long calls."""

_ASKING = re.compile(r"([A-Za-z0-9]{1,64}) ([!-~]{1,300})(?: ([!-~]{1,200}))?")

Asker = Fenced | GenerateRequest | ModelRequest | SleepRequest


@dataclass(frozen=True)
class Requester:
    """Who makes a request, and for which job; None: for no job, to see the service's state."""

    orchestrator: Orchestrator
    job_id: str | None


asking: ContextVar[Requester | None] = ContextVar("asking", default=None)
"""Who makes the current request; None: it does not say, as for a request by hand."""


def headers(identity: str | None, settings: Settings, job_id: str | None = None) -> dict[str, str]:
    """Returns the headers of an orchestrator whose Redis has this identity; {} without identity."""
    if identity is None:
        return {}
    place = f"{socket.gethostname()}:{settings.orchestrator_port}"
    return {HEADER: " ".join(filter(None, (identity, place, job_id)))}


def requester_of(header: str) -> Requester | None:
    """Returns the caller that the header's text names; None if it names none."""
    found = _ASKING.fullmatch(header)
    return Requester(Orchestrator(identity=found[1], place=found[2]), found[3]) if found else None


@dataclass(frozen=True)
class _Owner:
    """An orchestrator with the jobs that it has here, and the attempts that are still to come."""

    orchestrator: Orchestrator
    jobs: dict[str, Fence]
    beside: frozenset[int] = field(default_factory=frozenset[int])

    @property
    def newest(self) -> str:
        return max(self.jobs, key=lambda job_id: self.jobs[job_id])

    def with_job(self, asker: Asker, beside: tuple[int, ...] | None) -> _Owner:
        """Returns the owner once the asker's job has come: a new one takes the place of all others
        but those beside it (None: it does not say, and takes no one's)."""
        assert asker.job_id is not None
        own = {asker.job_id: asker.fence}
        if beside is None:
            return _Owner(self.orchestrator, self.jobs | own, self.beside)
        if asker.fence >= self.jobs[self.newest]:
            kept = {job_id: fence for job_id, fence in self.jobs.items() if fence[0] in beside}
            return _Owner(self.orchestrator, kept | own, frozenset(beside))
        if asker.job_id in self.jobs or asker.attempt in self.beside:
            return _Owner(self.orchestrator, self.jobs | own, self.beside)
        return self


class Ownership:
    """Who owns the `service`, "trainer" or "rollout". A caller without the header owns nothing, and
    is refused while the service has an owner."""

    def __init__(self, service: str, now: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._now = now
        self._owner: _Owner | None = None
        self._last: str | None = None
        self._heard_at = 0.0

    def hear(self) -> None:
        """Notes that the owner is alive, if the current request is for its job. A service that has
        just started belongs to the first job that it hears of. That is its previous owner's: the
        previous owner asks again at once, and other orchestrators name no job while they look for a
        free service."""
        who, owner = asking.get(), self._owner
        if who is None or who.job_id is None:
            return
        if self._last is None:
            self._give(_Owner(who.orchestrator, {who.job_id: (0, 0)}))
        elif owner and who.job_id in owner.jobs and not self._is_anothers(owner):
            self._heard_at = self._now()

    def taken(self) -> str | None:
        """Returns why the caller is refused; None if it is not."""
        owner = self._owner
        is_silent = self._now() - self._heard_at > SILENT_S
        if owner is None or is_silent or not self._is_anothers(owner):
            return None
        name = "sampler" if self._service == "rollout" else self._service
        return (
            f"the {name} has job {owner.newest!r} of the orchestrator at "
            f"{owner.orchestrator.place}; it serves another one once that job has ended or is "
            f"paused: wait for it, or name another in {PREFIX}{self._service.upper()}_URL"
        )

    def check(self) -> None:
        """Raises Conflict, code "taken", if the service is another orchestrator's."""
        if why := self.taken():
            raise Conflict(why, code="taken")

    def take(self, asker: Asker) -> bool:
        """Gives the service to the caller, for its job and those beside it. Returns whether the
        last owner was another orchestrator: fences of the two cannot be compared. Raises Conflict,
        code "taken"."""
        self.check()
        who, owner = asking.get(), self._owner
        if who is None or asker.job_id is None:
            return False
        identity = who.orchestrator.identity
        passes = self._last not in (None, identity)
        beside = asker.beside if isinstance(asker, TrainerJob | ModelRequest) else None
        if passes or owner is None:
            new = _Owner(who.orchestrator, {asker.job_id: asker.fence}, frozenset(beside or ()))
            self._give(new)
        else:
            self._give(owner.with_job(asker, beside))
        if passes:
            get_logger().info(
                "another orchestrator's now", job=asker.job_id, at=who.orchestrator.place
            )
        return passes

    def go_on(self, job: TrainerJob) -> None:
        """Gives the service back to the orchestrator whose job the previous process had loaded."""
        if job.orchestrator is not None:
            beside = frozenset(job.beside)
            self._give(_Owner(job.orchestrator, {job.job_id: job.fence}, beside))

    def leave(self, asker: Fenced) -> None:
        """Frees the service from the caller's job, unless a newer attempt has it by now."""
        self.check()
        owner = self._owner
        if owner and owner.jobs.get(asker.job_id, asker.fence) <= asker.fence:
            left = {id: fence for id, fence in owner.jobs.items() if id != asker.job_id}
            self._owner = _Owner(owner.orchestrator, left, owner.beside) if left else None

    def _give(self, owner: _Owner) -> None:
        self._owner = owner
        self._last, self._heard_at = owner.orchestrator.identity, self._now()

    def _is_anothers(self, owner: _Owner) -> bool:
        who = asking.get()
        return who is None or who.orchestrator.identity != owner.orchestrator.identity


class Holders:
    """The attempts that may use one service, each with its newest epoch."""

    def __init__(self) -> None:
        self._newest = 0
        self._epochs: dict[int, int] = {}

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._epochs

    @property
    def newest(self) -> Fence:
        return self._newest, self._epochs.get(self._newest, 0)

    def is_stale(self, fence: Fence) -> bool:
        """Returns whether a newer attempt, or a newer epoch of this one, has superseded the
        caller."""
        attempt, epoch = fence
        if attempt in self._epochs:
            return epoch < self._epochs[attempt]
        return attempt < self._newest

    def take(self, fence: Fence, beside: Iterable[int] = ()) -> None:
        """Lets a caller in that is not stale, and the attempts that it names `beside` itself. A new
        attempt supersedes all others."""
        attempt, epoch = fence
        if attempt not in self._epochs:
            self._newest, known = attempt, self._epochs
            self._epochs = {other: known.get(other, 0) for other in beside}
        elif attempt == self._newest:  # it may have come before without a word of the others
            self._epochs |= {other: 0 for other in beside if other not in self._epochs}
        self._epochs[attempt] = epoch
