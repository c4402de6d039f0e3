"""Leases episodes to workers (`hone work`), which play them by agents on other machines, for
`[environment] kind = "worker"`.

    offered    until a worker takes it; no deadline, since a worker may start later
    leased     the worker has the key of a new session, and renews the lease
    ended      by the worker's result, by `episode_s`, or with the lease: then it is offered again,
               and the session's conversations are dropped. A worker that stops gives the lease
               back; a worker that died does not renew it

An episode that took `MAX_DIED` workers with it has failed. From `NUM_SUSPECT` on it is offered to a
worker that has no other such episode, so that the episode that kills workers is found without
failing others.

The tokens come from the session's record. The worker reports only the reward. The offers are in the
memory of the orchestrator that runs the job; when it dies, their groups are sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Path, Request

from services.orchestrator.extensions.agents.sessions import Session, Sessions
from services.orchestrator.extensions.environments.conversation import (
    MAX_PLAYED,
    EnvironmentFailed,
    failed_group,
    with_info,
)
from services.orchestrator.grpo.groups import ENVIRONMENT_FAILED
from services.orchestrator.samplers.services import Services
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Forbidden, HoneError, NotFound, Unavailable
from shared.host.logs import get_logger
from shared.http import rendering
from shared.http.gate import own_jobs_of
from shared.http.service import Service
from shared.job import Job
from shared.wire import (
    EpisodeResult,
    JobRecord,
    LeasedEpisode,
    LeasedEpisodes,
    LeaseEpisodes,
    LeaseId,
    LeasesRenewed,
    Prompt,
    RenewLeases,
    ResultTaken,
    RolloutGroup,
    Sampling,
)

LEASE_S = 15.0
"""Seconds until a lease ends unless renewed. Workers renew it three times in that time."""

NOBODY_S = 30.0
"""Seconds without a request of any worker after which an event of the job warns of it."""

LOOK_S = 2.0
"""Seconds between two checks whether a worker has asked."""

MAX_DIED = 5
"""Workers that may die while they play an episode: more than an agent may fail, because workers
also die of other causes."""

NUM_SUSPECT = 2
"""Number of dead workers from which the episode is suspected to be the cause."""

MAX_ANSWERED = 16_384
"""How many results are remembered with their answers, for workers that repeat the request."""


class LeaseReturned(Exception):
    """The worker gave the lease back."""


class WorkerDied(Exception):
    """The worker did not renew the lease."""


@dataclass
class EpisodeLease:
    """An episode leased to a worker. `session` records its calls, and `ended` is resolved with its
    rollout. `is_suspect` is as in its offer."""

    worker: str
    session: Session
    renewed_at: float
    is_suspect: bool
    ended: asyncio.Future[RolloutGroup]

    async def result(self) -> RolloutGroup:
        """Returns the rollout with its reward. Raises LeaseReturned, WorkerDied, and
        EnvironmentFailed if the agent failed."""
        while (left_s := self.renewed_at + LEASE_S - time.monotonic()) > 0:
            await asyncio.wait({self.ended}, timeout=left_s)
            if self.ended.done():
                return self.ended.result()
        raise WorkerDied(f"worker {self.worker!r} sent nothing for {LEASE_S:g} s")


@dataclass
class Offer:
    """An episode that is not leased. `open` makes the session of a lease. `is_suspect`: workers
    died while they played it."""

    job_id: str
    prompt: Prompt
    deadline_s: float
    is_suspect: bool
    open: Callable[[str], Session]
    taken: asyncio.Future[EpisodeLease]


@dataclass
class LastPoll:
    """When a worker last asked for a job's episodes, and whether its events say that none asks."""

    at: float = field(default_factory=time.monotonic)
    told: bool = False


class Episodes:
    """The offers and leases of one orchestrator process. `runs` counts the runs of each job here: a
    job that moves to another trainer may have two for a moment."""

    def __init__(self) -> None:
        self.runs = Counter[str]()
        self._offers: dict[str, Offer] = {}
        self._leases: dict[str, EpisodeLease] = {}
        self._answered: OrderedDict[str, ResultTaken] = OrderedDict()
        self._asked: dict[str, LastPoll] = {}
        self._offered = asyncio.Event()

    # --- for the job -----------------------------------------------------------------------------

    async def play(self, services: Services, offer: Offer) -> RolloutGroup:
        """Returns the rollout of the worker that takes the episode. Raises LeaseReturned,
        WorkerDied, and EnvironmentFailed if the agent failed."""
        with self._offering(offer):
            with services.status.on("worker", "waiting for a worker to take an episode"):
                await self._until_taken(services, offer)
            with services.status.on("worker", "an agent's episode"):
                return await self._ended(offer.taken.result(), offer.deadline_s)

    @contextlib.contextmanager
    def _offering(self, offer: Offer) -> Generator[None]:
        id = secrets.token_urlsafe(16)
        self._offers[id] = offer
        self._offered.set()
        try:
            yield
        finally:
            self._offers.pop(id, None)
            if lease := self._leases.pop(id, None):
                lease.session.close()
                self._offered.set()  # its worker may take another suspect episode

    async def _until_taken(self, services: Services, offer: Offer) -> None:
        asked = self._asked.setdefault(offer.job_id, LastPoll())
        while not offer.taken.done():
            await asyncio.wait({offer.taken}, timeout=LOOK_S)
            asks = time.monotonic() - asked.at < NOBODY_S
            if asks == asked.told:
                asked.told = not asks
                message = (
                    "a worker asks for episodes again"
                    if asks
                    else f"no worker asked for an episode for {NOBODY_S:g} s; `hone work agent.py "
                    f"--job {offer.job_id}` starts one, on any machine that reaches this "
                    "orchestrator"
                )
                await services.caller.tell(message, not asks)

    async def _ended(self, lease: EpisodeLease, deadline_s: float) -> RolloutGroup:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await lease.result()
        except TimeoutError:
            if not limit.expired():
                raise
            return failed_group(f"the agent did not finish within {deadline_s:g} s", "timeout")

    @contextlib.contextmanager
    def run_of(self, job_id: str) -> Generator[None]:
        """Counts a run of the job while it lasts."""
        self.runs[job_id] += 1
        try:
            yield
        finally:
            self.runs[job_id] -= 1

    def forget(self, job_id: str) -> None:
        """Forgets when workers asked for the job's episodes, at the end of its run."""
        self._asked.pop(job_id, None)

    # --- for workers -----------------------------------------------------------------------------

    async def lease(self, ask: LeaseEpisodes) -> tuple[LeasedEpisode, ...]:
        """Returns up to `ask.num` episodes, oldest offer first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ask.wait_s):
                while not self._wanted(ask):
                    self._offered.clear()
                    await self._offered.wait()
        return tuple(self._take(id, ask.worker) for id in self._wanted(ask))

    def _wanted(self, ask: LeaseEpisodes) -> list[str]:
        self._heard(ask.job_id)
        has_suspect = any(
            each.is_suspect and each.worker == ask.worker for each in self._leases.values()
        )
        found: list[str] = []
        for id, offer in self._offers.items():
            if offer.taken.done() or ask.job_id not in (None, offer.job_id):
                continue
            if offer.is_suspect and has_suspect:
                continue
            has_suspect |= offer.is_suspect
            found.append(id)
            if len(found) == ask.num:
                break
        return found

    def _take(self, id: str, worker: str) -> LeasedEpisode:
        offer, now = self._offers[id], time.monotonic()
        session = offer.open(id)
        ended: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        lease = EpisodeLease(worker, session, now, offer.is_suspect, ended)
        self._leases[id] = lease
        offer.taken.set_result(lease)
        return LeasedEpisode(
            id=id,
            job_id=offer.job_id,
            row=offer.prompt.row,
            prompt=offer.prompt.content,
            api_key=session.api_key,
            deadline_s=offer.deadline_s,
            lease_s=LEASE_S,
        )

    def _heard(self, job_id: str | None) -> None:
        for id, asked in self._asked.items():
            if job_id in (None, id):
                asked.at = time.monotonic()

    def job_of(self, id: str) -> str | None:
        """Returns the job of a lease; None if the lease does not exist or has ended."""
        lease = self._leases.get(id)
        return lease.session.job_id if lease else None

    def renew(self, body: RenewLeases) -> LeasesRenewed:
        """Returns which leases have ended."""
        for id in body.returned:
            if (lease := self._leases.get(id)) and not lease.ended.done():
                lease.ended.set_exception(LeaseReturned(f"worker {body.worker!r} gave it back"))
        held = {id: lease for id in body.ids if (lease := self._under_way(id))}
        for lease in held.values():
            lease.renewed_at = time.monotonic()
        return LeasesRenewed(unwanted=tuple(id for id in body.ids if id not in held))

    def _under_way(self, id: str) -> EpisodeLease | None:
        lease = self._leases.get(id)
        return lease if lease and not lease.ended.done() else None

    def end(self, id: str, result: EpisodeResult) -> ResultTaken:
        """Ends a lease with its result, if it has not ended. Raises BadRequest for rewards that do
        not fit the answers."""
        if found := self._answered.get(id):
            return found
        lease = self._under_way(id)
        if lease:
            self._rewarded(lease, result)
        answer = self._answered[id] = ResultTaken(id=id, taken=lease is not None)
        if len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
        return answer

    def _rewarded(self, lease: EpisodeLease, result: EpisodeResult) -> None:
        """Ends the lease with the rollout, or with the error of the services with which a turn
        ended. If the agent failed because its conversation did not fit the context, the rollout
        counts as cut off, not as failed. Raises BadRequest for rewards that do not fit the
        answers."""
        try:
            group = lease.session.rollout()
        except HoneError as error:
            lease.ended.set_exception(error)
            return
        rollout = group.rollouts[0]
        cut_off = lease.session.is_full and not rollout.went_wrong
        if result.error is not None and not cut_off:
            lease.ended.set_exception(EnvironmentFailed(result.error))
        elif rollout.went_wrong:
            lease.ended.set_exception(EnvironmentFailed(rollout.error or "it has no answer"))
        else:
            lease.ended.set_result(rewarded(group, lease.session.answers(), result))


def rewarded(
    group: RolloutGroup, answers: Mapping[str, int], result: EpisodeResult
) -> RolloutGroup:
    """Returns the rollout with the rewards and metrics that its worker reported. `answers` are the
    times of its answers by id, row by row. Raises BadRequest for rewards that do not fit them."""
    info: dict[str, Any] = {"reward": result.reward, "agent": dict(result.metrics)}
    if result.error is not None:
        why = f"the agent failed after its conversation had used up the context: {result.error}"
        return with_info(group, info | {"reward": None, "reward_error": why})
    if isinstance(result.reward, tuple | Mapping):
        by_id = _by_id(result.reward, sorted(answers, key=answers.__getitem__))
        given = [reward for reward in by_id.values() if reward is not None]
        turns = [by_id.get(id) for id in answers]
        info |= {"turn_rewards": turns, "reward": sum(given) if given else None}
    return with_info(group, info)


def _by_id(
    rewards: tuple[float | None, ...] | Mapping[str, float | None], ids: list[str]
) -> Mapping[str, float | None]:
    """Returns the rewards by the ids of answers; `ids` are in the order of time."""
    if isinstance(rewards, tuple):
        if len(rewards) != len(ids):
            raise BadRequest(
                f"'reward' has {len(rewards)} entries; expected {len(ids)}, one for each recorded "
                "answer of the model"
            )
        return dict(zip(ids, rewards, strict=True))
    if unknown := sorted(rewards.keys() - set(ids)):
        raise BadRequest(
            f"'reward' names the answer {unknown[0]!r:.80}; expected ids of the {len(ids)} "
            "recorded answers of the model"
        )
    return rewards


async def play(
    episodes: Episodes,
    sessions: Sessions,
    services: Services,
    job: Job,
    prompt: Prompt,
    min_version: int,
    key: str,
    sampling: Sampling,
) -> RolloutGroup:
    """Returns the rollout of an agent as a group of one. An agent that failed is started again, as
    is one whose worker died; after too many of either the rollout has no reward."""
    assert job.environment is not None
    deadline_s = job.environment.episode_s

    def open(id: str) -> Session:
        return sessions.open(services, job, id=id, min_version=min_version, sampling=sampling)

    def offer(num_died: int) -> Offer:
        taken: asyncio.Future[EpisodeLease] = asyncio.get_running_loop().create_future()
        is_suspect = num_died >= NUM_SUSPECT
        return Offer(services.caller.job_id, prompt, deadline_s, is_suspect, open, taken)

    failures, deaths = list[str](), list[str]()
    async with services.samplers.conversations:
        while len(failures) < MAX_PLAYED and len(deaths) < MAX_DIED:
            try:
                return await episodes.play(services, offer(len(deaths)))
            except EnvironmentFailed as error:
                failures.append(str(error))
                get_logger().warning("agent failed", episode=key, reason=str(error))
            except WorkerDied as error:
                deaths.append(str(error))
                get_logger().warning("episode lost", episode=key, reason=str(error))
            except LeaseReturned as error:
                get_logger().info("episode given back", episode=key, reason=str(error))
    return with_info(failed_group(_why(failures, deaths)), {ENVIRONMENT_FAILED: True})


def _why(failures: list[str], deaths: list[str]) -> str:
    if len(failures) == MAX_PLAYED:
        return f"the agent failed {MAX_PLAYED} times: {failures[-1]}"
    return f"{MAX_DIED} workers died while they played it: {deaths[-1]}"


Id = Annotated[LeaseId, Path()]


def check_here(record: JobRecord) -> None:
    """Raises Unavailable for a job that another orchestrator runs: it may move here later."""
    if record.status == "running" and record.place is None:
        raise Unavailable(
            f"job {record.id!r} is run by another orchestrator, which has the trainer at "
            f"{record.trainer}, and episodes are leased by that one alone; expected its URL in "
            "HONE_ORCHESTRATOR_URL of the worker"
        )


async def _check_own_job(store: Store, job_id: str | None) -> None:
    """Raises NotFound for a job that the caller's key may not see, and Forbidden if a key of access
    "own" names no job."""
    if (name := own_jobs_of()) is None:
        return
    if job_id is None:
        raise Forbidden(
            f"key {name!r} has access 'own', and 'job_id' is missing; expected the id of one of "
            "its jobs"
        )
    await store.get(job_id)


async def _check_own_leases(store: Store, episodes: Episodes, ids: Iterable[str]) -> None:
    """Raises NotFound for a lease of a job that the caller's key may not see."""
    if own_jobs_of() is None:
        return
    for job_id in {found for id in ids if (found := episodes.job_of(id))}:
        await store.get(job_id)


def add_routes(service: Service, store: Store, episodes: Episodes) -> None:
    async def lease_episodes(body: LeaseEpisodes) -> LeasedEpisodes:
        """Takes episodes for a worker. Repeated with the same Idempotency-Key, it has the same
        answer. 503: another orchestrator runs the job."""
        await _check_own_job(store, body.job_id)
        taken = await episodes.lease(body)
        if body.job_id and not taken and not episodes.runs[body.job_id]:
            with contextlib.suppress(NotFound):  # the job was deleted, and offers no episodes
                check_here(await store.get(body.job_id))
        return LeasedEpisodes(episodes=taken)

    async def renew_leases(body: RenewLeases) -> LeasesRenewed:
        """Renews a worker's leases, and gives some back."""
        await _check_own_leases(store, episodes, (*body.ids, *body.returned))
        return episodes.renew(body)

    service.operation("POST", "/v1/episodes/lease", lease_episodes, cancellable=True)
    service.operation("POST", "/v1/episodes/renew", renew_leases)

    @service.app.post("/v1/episodes/{id}/result")
    async def end_episode(id: Id, request: Request) -> ResultTaken:
        """Ends an episode with what it earned, or with why its agent failed."""
        result = await rendering.read_body(request, EpisodeResult)
        await _check_own_leases(store, episodes, (id,))
        return episodes.end(id, result)

    service.body(EpisodeResult, "POST", "/v1/episodes/{id}/result")
