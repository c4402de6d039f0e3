"""What an attempt at a job does and why it waits, in one place (`AttemptStatus`): its stage, the
unanswered calls of its services, which of them are unreachable, and what the job needs and lacks.
The heartbeat brings the line and what is missing into the job's record; the finding `waits`, `hone
ls` and the page read them there. And who calls a job's services (`Caller`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from shared.errors import Failed
from shared.host import tracing
from shared.http import ownership
from shared.http.connecting import Absence, Presence, Tell, no_notify, since
from shared.job import Job
from shared.settings import Settings

LOOKS = 10
"""How often the watch checks within `stall_s`."""

MAX_LOOK_S = 5.0

SERVICES = ("rollout", "trainer", "reward")

SAMPLERS = "the rollout service"
"""What clients of samplers call their service while it is unreachable."""

T = TypeVar("T")
P = ParamSpec("P")


class AttemptStatus:
    """The status of an attempt: its present `stage`, and the `next` one ("" if obvious). `sampler`
    is what a sampler says of itself while a stage `loads` the job. `missing` says, as a sentence,
    what the job needs and lacks. `unreachable` has an entry of each client whose service is
    unreachable. The rollout service counts as unreachable once all samplers of `serving()`, which
    serve the job, are unreachable. `progress_at` is the time of the last answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[object, tuple[str, str, float]] = {}
        self._last: dict[str, tuple[str, float]] = {}
        self._calls: Counter[str] = Counter()
        self._busy_since: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        self._num_steps, self._measured_since = 0, (0, 0.0)
        self._missing_since: float | None = None
        self.unreachable = dict[Presence, Absence]()
        self.serving: Callable[[], set[Presence]] = set
        self.progress_at = clock()
        self.begin("beginning")

    def begin(
        self, stage: str, next: str = "", missing: str | None = None, *, loads: bool = False
    ) -> None:
        self.stage, self.next = stage, next
        self.sampler: str | None = None
        self.missing, self.loads = missing, loads
        self._missing_since = (self._missing_since or time.time()) if missing else None

    def line(self) -> str:
        """Returns the line for the job's followers."""
        parts = [
            *self._unanswered(),
            *([f"the sampler is {self.sampler}"] if self.sampler else []),
            *self._away(),
        ]
        told = f": {'; '.join(parts)}" if parts else ""
        waiting = f" {since(self._missing_since)}" if self._missing_since else ""
        return f"{self.stage}{waiting}{told}{f'; then {self.next}' if self.next else ''}"

    def waits(self) -> str | None:
        """Returns what the job needs and lacks; None if it lacks nothing."""
        return self.missing or "; ".join(self._away()) or None

    def unreachable_since(self, who: str) -> float | None:
        """Returns since when (Unix time) a service, as "the trainer service", is unreachable; None
        if it is not."""
        times = {one: away.at for one, away in self.unreachable.items() if away.who == who}
        if who == SAMPLERS:
            return max(times.values()) if times and times.keys() >= self.serving() else None
        return min(times.values(), default=None)

    def _away(self) -> list[str]:
        names = sorted({absence.who for absence in self.unreachable.values()})
        times = {who: self.unreachable_since(who) for who in names}
        return [f"{who} is unreachable {since(at)}" for who, at in times.items() if at is not None]

    def _unanswered(self) -> list[str]:
        """Returns the unanswered calls by service, as in "trainer: training a step, 3 s"."""
        now = self._clock()
        found: dict[tuple[str, str], list[float]] = {}
        for service, what, at in self._under_way.values():
            found.setdefault((service, what), []).append(at)
        return [
            f"{service}: {f'{len(calls)} x ' if len(calls) > 1 else ''}{what}, "
            f"{now - min(calls):.0f} s"
            for (service, what), calls in sorted(found.items())
        ]

    # --- the time that is left -------------------------------------------------------------------

    def begin_steps(self, last_step: int, num_steps: int) -> None:
        self._num_steps, self._measured_since = num_steps, (last_step, self._clock())

    def eta_s(self, step: int, *, replayed: bool) -> float | None:
        """Returns the seconds left once `step` is done; None while nothing was measured. The steps
        since the last replayed one are measured: a replay samples nothing, so its time says
        little."""
        now = self._clock()
        if replayed:
            self._measured_since = step, now
            return None
        first, began = self._measured_since
        return (now - began) / (step - first) * (self._num_steps - step)

    # --- calls -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self, service: str, what: str) -> Generator[Callable[[str], None]]:
        """Notes that the job waits for the service in this block, and that the service answered if
        the block raises nothing. `what` is as in "sampling a group". Yields a function that says it
        in other words while it waits."""
        call, began = object(), self._clock()

        def say(what: str) -> None:
            self._under_way[call] = service, what, began

        say(what)
        self._count(service, 1)
        try:
            yield say
            self.progress_at = self._clock()
            self._last[service] = what, self.progress_at
        finally:
            del self._under_way[call]
            self._count(service, -1)

    def _count(self, service: str, change: int) -> None:
        before = self._calls[service]
        self._calls[service] = before + change
        if not before:
            self._busy_since[service] = self._clock()
        elif before + change == 0:
            began = self._busy_since.pop(service)
            self._busy_s[service] = self._busy_s.get(service, 0.0) + self._clock() - began

    def busy_s(self) -> dict[str, float]:
        """Returns the seconds so far in which each service had at least one call."""
        now = self._clock()
        return {
            service: self._busy_s.get(service, 0.0) + now - self._busy_since.get(service, now)
            for service in SERVICES
        }

    @property
    def services(self) -> set[str]:
        """The services that the job waits for."""
        return {service for service, _, _ in self._under_way.values()}

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    # --- a stall ---------------------------------------------------------------------------------

    def stalled_s(self) -> float:
        """Returns the seconds since the last answer."""
        return self._clock() - self.progress_at

    def sentence(self, at: Mapping[str, int]) -> str:
        """Returns which services are waited for, and each one's last answer, as a sentence. `at`
        are the completions under way by sampler."""
        now = self._clock()
        waits = "; ".join(self._waiting(service, at, now) for service in sorted(self.services))
        last = ", ".join(
            f"{service} {what} {now - done_at:.0f} s ago"
            for service, (what, done_at) in self._last.items()
        )
        return (
            f"no progress for {self.stalled_s():.0f} s: "
            f"{waits or 'nothing is under way'}; last answered: {last or 'nothing'}"
        )

    def _waiting(self, service: str, at: Mapping[str, int], now: float) -> str:
        calls = [call for call in self._under_way.values() if call[0] == service]
        counts = Counter(what for _, what, _ in calls)
        what = ", ".join(f"{count} x {what}" for what, count in counts.items())
        oldest_s = now - min(began for _, _, began in calls)
        where = [f"{url} has {count} completions" for url, count in at.items() if count]
        places = f" ({', '.join(where)})" if service == "rollout" and where else ""
        return f"it waits for {service}{places}: {what}, the oldest for {oldest_s:.0f} s"


@dataclass
class Caller:
    """An attempt at a job, as it calls its services. Requests name job, attempt and epoch; requests
    of an older epoch are refused or never joined. `tell` reports to the job's events. `identity`
    names the orchestrator's Redis, by which trainer and samplers know whose job it is. `beside` are
    the attempts with which trainer and samplers are shared, and `weight` is the share of the
    trainer that the job has, with the other jobs of its API `key`. Clients note in `status` what
    they wait for."""

    job: Job
    settings: Settings
    job_id: str = "unnamed"
    attempt: int = 0
    tell: Tell = no_notify
    identity: str | None = None
    beside: tuple[int, ...] = ()
    weight: float = 1.0
    key: str | None = None
    epoch: int = field(default=0, init=False)
    status: AttemptStatus = field(default_factory=AttemptStatus, init=False)

    @property
    def fence(self) -> dict[str, Any]:
        """The fields by which a request says who it is of."""
        return {"job_id": self.job_id, "attempt": self.attempt, "epoch": self.epoch}

    @property
    def owner(self) -> str:
        """Whose weights requests ask for: job, attempt and epoch, with colons between them."""
        return f"{self.job_id}:{self.attempt}:{self.epoch}"

    @property
    def headers(self) -> Mapping[str, str] | None:
        return ownership.headers(self.identity, self.settings, self.job_id)


class ServiceClient(Protocol):
    caller: Caller


C = TypeVar("C", bound=ServiceClient)


def tracks_call(
    service: str, what: str, span: str | None = None
) -> Callable[
    [Callable[Concatenate[C, P], Coroutine[Any, Any, T]]],
    Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
]:
    """Decorates a method of a client: each call is noted as a wait, and as a span of the current
    trace, called `span` or `what`."""

    def decorate(
        method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
        @functools.wraps(method)
        async def call(self: C, *args: P.args, **kwargs: P.kwargs) -> T:
            with self.caller.status.on(service, what), tracing.span(span or what):
                return await method(self, *args, **kwargs)

        return call

    return decorate


async def watch(
    status: AttemptStatus,
    stall_s: float,
    samplers: Callable[[], Mapping[str, int]],
    tell: Callable[[str, bool], Awaitable[None]],
) -> None:
    """Whenever nothing was answered for `stall_s` seconds, tells once which services are waited
    for, and later that the job continues. Raises Failed if no call is under way, because then no
    answer can come."""
    told_at: float | None = None
    while True:
        await asyncio.sleep(min(stall_s / LOOKS, MAX_LOOK_S))
        if told_at not in (None, status.progress_at):
            await tell("the job continues: there was an answer again", False)
            told_at = None
        stalls = status.stalled_s() >= stall_s
        if stalls and status.is_idle:
            raise Failed(status.sentence({}))
        if stalls and told_at is None:
            told_at = status.progress_at
            await tell(status.sentence(samplers()), True)
