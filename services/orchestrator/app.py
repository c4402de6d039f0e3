"""The orchestrator: the jobs API, and the workers that run jobs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import sys
from collections.abc import AsyncGenerator, Sequence

from services.orchestrator.api import (
    access,
    files,
    history,
    jobs,
    rollouts,
    stack,
)
from services.orchestrator.extensions import trackers
from services.orchestrator.extensions.agents import routes as dialects
from services.orchestrator.extensions.agents import worker_episodes
from services.orchestrator.extensions.agents.routes import SessionKeys
from services.orchestrator.extensions.agents.sessions import Sessions
from services.orchestrator.extensions.agents.worker_episodes import Episodes
from services.orchestrator.extensions.diagnosis import diagnosing
from services.orchestrator.extensions.environments.conversation import PLAYERS, play_group
from services.orchestrator.extensions.environments.kinds import environment_of
from services.orchestrator.extensions.openai import calling, fine_tuning
from services.orchestrator.extensions.page import routes as page
from services.orchestrator.extensions.pushed import atropos, groups
from services.orchestrator.extensions.pushed.groups import GroupIntake
from services.orchestrator.extensions.pushed.queue import PushedGroups
from services.orchestrator.extensions.teacher import Teacher
from services.orchestrator.extensions.tinker import routes as tinker
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.preflight import Submissions
from services.orchestrator.jobs.worker import SharedTrainer, Worker
from services.orchestrator.seams import Extensions
from services.orchestrator.store.run_folders import keep_unsubmitted_removed, note_ends
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import stop
from services.orchestrator.writable import RunsDirCheck
from shared.errors import HoneError
from shared.http import codec
from shared.http.operations import DrainState
from shared.http.service import Service
from shared.settings import Settings


def create_service(
    settings: Settings,
    store: Store,
    *,
    works: bool = True,
    sessions: Sessions | None = None,
) -> Service:
    """Returns the orchestrator, with a worker inside for each place on each trainer. If not
    `works`, it has no worker: it only accepts jobs, and another orchestrator with this Redis runs
    them."""
    per_trainer = settings.per_trainer if works else ()
    offered, sessions = Episodes(), Sessions() if sessions is None else sessions
    orders, closing = SampleOrders(), set[str]()
    extensions = run_extensions(offered, sessions, orders)
    workers = [
        Worker(store, each, extensions, trainer)
        for each in per_trainer
        for trainer in [SharedTrainer(each, store, closing)]
        for _ in range(each.places)
    ]

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        with contextlib.suppress(HoneError):
            # on failure the worker waits until it can check, and reports why
            await store.check(settings.runs_dir)
        noting = asyncio.create_task(note_ends(store))
        removing = asyncio.create_task(files.finish_removals(settings, store))
        clearing = asyncio.create_task(keep_unsubmitted_removed(store, settings.runs_dir))
        expiring = asyncio.create_task(tinker.remove_expired_forever(store))
        leaving = [asyncio.create_task(_work(worker, service.draining)) for worker in workers]
        try:
            yield
        finally:
            service.draining.begin()
            left = await asyncio.gather(*leaving, return_exceptions=True)
            await stop(noting, removing, clearing, expiring)
            await store.close()
            for error in filter(None, left):
                raise error

    named, writable = (
        access.Keys(settings.runs_dir, store.submitted_by),
        RunsDirCheck(settings.runs_dir),
    )
    readiness = {"redis": store.why_unusable, "runs": writable.why_not}
    service = Service(
        "orchestrator",
        settings,
        readiness=readiness,
        lifespan=lifespan,
        keys=SessionKeys(sessions, named),
        public=lambda path: page.is_public(path) or tinker.is_public(path),
        most_bytes=most_bytes,
        most_weight=most_weight,
    )
    if workers:
        _add_gauges(service, workers)
    submissions = Submissions(store, CheckExecutor(settings, extensions), writable)
    _add_routes(service, settings, store, named, submissions, orders)
    _add_agents_routes(service, settings, store, sessions, offered)
    return service


BODY_BYTES = 1 << 20
"""Most bytes of a body, a job's included, but for `LARGER`."""

LARGER = (
    (re.compile(r"/v1/files"), sys.maxsize),
    (re.compile(r"/v1/jobs/[^/]+/(groups|atropos/.*)"), groups.MAX_BODY_BYTES),
    (
        re.compile(  # paths of sessions, whose routes have their own limit
            r"(/sessions/[^/]+)?/(v1/(chat/completions|completions|messages|responses)"
            r"|inference/v1/generate)"
        ),
        sys.maxsize,
    ),
    (re.compile(r"/api/v1/(forward|forward_backward)"), tinker.MAX_CALL_BYTES),
    (re.compile(r"/api/v1/asample"), tinker.MAX_SAMPLE_BYTES),
)
"""Paths with larger bodies, and their most bytes. HONE_MAX_BODY_MIB bounds all."""


def most_bytes(path: str) -> int:
    return next((most for larger, most in LARGER if larger.fullmatch(path)), BODY_BYTES)


WEIGHT, LARGER_WEIGHT = 1 << 18, 1 << 21
"""Greatest weight of a body (`codec.json_weight`), and of a body in `LARGER`: parsing it blocks the
event loop for a third of a second."""

NO_JSON = re.compile(r"/v1/files|/api/v1/(forward|forward_backward)")
ONLY_JSON = re.compile(
    r"/api/v1/.*|/v1/jobs/[^/]+/atropos/.*|/sessions/.*|/inference/.*"
    r"|/v1/(chat/completions|completions|messages|responses)"
)
"""Paths whose body is read as JSON whatever its Content-Type is."""


def most_weight(path: str, kind: str = codec.JSON) -> int | None:
    """Returns the greatest weight of a JSON body on this path; None for a body of another type."""
    if NO_JSON.fullmatch(path) or (kind == codec.MSGPACK and not ONLY_JSON.fullmatch(path)):
        return None
    return WEIGHT if most_bytes(path) == BODY_BYTES else LARGER_WEIGHT


def run_extensions(episodes: Episodes, sessions: Sessions, orders: SampleOrders) -> Extensions:
    """Returns the extensions of this process, as a run receives them."""

    def forget(job_id: str) -> None:
        episodes.forget(job_id)
        sessions.leave(job_id)

    players = {**PLAYERS, "worker": functools.partial(worker_episodes.play, episodes, sessions)}
    return Extensions(
        play_group=functools.partial(play_group, players),
        environment_of=environment_of,
        teacher_of=Teacher,
        tracker_of=trackers.JobTrackers,
        source_of=PushedGroups,
        drive=orders.drive,
        diagnose=diagnosing.diagnose_run,
        warn_of=trackers.missing,
        attending=episodes.run_of,
        forget=forget,
    )


def _add_routes(
    service: Service,
    settings: Settings,
    store: Store,
    named: access.Keys,
    submissions: Submissions,
    orders: SampleOrders,
) -> None:
    tinker.add_routes(service, settings, store, submissions, orders)
    jobs.add_routes(service, settings, store, submissions)
    history.add_routes(service, store)
    rollouts.add_routes(service, store)
    rollouts.add_regrading(service, settings, store)
    diagnosing.add_routes(service, store)
    stack.add_routes(service, settings, store)
    files.add_routes(service, settings, store)
    access.add_routes(service, settings, named)
    fine_tuning.add_routes(service, settings, store, submissions)
    page.add_routes(service)


def _add_agents_routes(
    service: Service, settings: Settings, store: Store, sessions: Sessions, offered: Episodes
) -> None:
    worker_episodes.add_routes(service, store, offered)
    calling.add_routes(service, settings, store, sessions)
    dialects.add_routes(service, sessions)
    pushing = GroupIntake(store)
    groups.add_routes(service, pushing)
    atropos.add_routes(service, settings, pushing)


def _add_gauges(service: Service, workers: Sequence[Worker]) -> None:
    service.gauge("running_jobs", "Jobs that its workers have").set_function(
        lambda: sum(worker.has_job for worker in workers)
    )
    service.gauge("queued_jobs", "Jobs in Redis that wait to begin").set_function(
        lambda: workers[0].num_queued
    )


async def _work(worker: Worker, draining: DrainState) -> None:
    """Runs the worker until the service is asked to end. The worker then gives its lease back at
    once, because open connections may keep the service for a while."""
    task = asyncio.create_task(worker.run_forever())
    task.add_done_callback(_stopped)
    await draining.wait()
    await stop(task)
    await worker.leave()


def _stopped(worker: asyncio.Task[None]) -> None:
    """Ends the process if a bug ended the worker: an orchestrator that accepts jobs and runs none
    is worse."""
    if not worker.cancelled() and (error := worker.exception()):
        raise SystemExit(f"the worker stopped: {error!r}") from error
