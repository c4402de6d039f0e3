"""Compares models on held-out problems, without a job. The samplers load one model after the other,
unchanged; each answers the same problems with the same seeds.

The samplers are lent (store/loans.py): no job begins meanwhile, and the evaluation is refused while
a job has them. Its calls are fenced like a job's, with an epoch for each model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.orchestrator.data.allowed import named_model_folder
from services.orchestrator.data.fetching import fetch
from services.orchestrator.data.sources import asks_of
from services.orchestrator.evals.estimates import differences, estimates, of_all
from services.orchestrator.evals.held_out import Answers, sample_held_out, set_metrics
from services.orchestrator.loop.prompts import HeldOut, load_held_out
from services.orchestrator.pool.services import Services
from services.orchestrator.store import heartbeat
from services.orchestrator.store.connection import StoreEmptied
from services.orchestrator.store.leases import Lease, LeaseLost
from services.orchestrator.store.lists import Wanted
from services.orchestrator.store.resources import resource
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import stop, to_the_end
from shared.errors import BadRequest, Conflict, Failed, Unavailable
from shared.host.logs import get_logger
from shared.http.presence import Presence, tell_nobody
from shared.job import Job
from shared.model.check import check_model_folder
from shared.settings import Settings
from shared.wire import (
    EvaluatedModel,
    EvaluationReport,
    EvaluationRequest,
    EvaluationState,
    ModelScores,
    Prompt,
    SetReport,
)


@dataclass
class Comparison:
    """One evaluation under way."""

    request: EvaluationRequest
    settings: Settings
    store: Store
    _number: int = field(default=0, init=False)
    _num_done: int = field(default=0, init=False)
    _num_problems: int = field(default=0, init=False)

    @property
    def state(self) -> EvaluationState:
        models = self.request.models
        return EvaluationState(
            id=self.request.id,
            model=models[max(self._number - 1, 0)].name,
            number=self._number,
            num_models=len(models),
            num_done=self._num_done,
            num_problems=self._num_problems,
        )

    async def run(self) -> EvaluationReport:
        """Returns the models' scores. Raises BadRequest for models or problems that cannot be
        evaluated, and Conflict while a job or another evaluation has the samplers."""
        job = self.request.job
        sets = await self._checked_sets()
        self._num_problems = sum(len(held_out.problems) for held_out in sets)
        asked_at = time.monotonic()
        settings, lease = await self._borrow()
        presence = Presence("Redis", tell_nobody)
        beat = asyncio.create_task(heartbeat.keep(self.store.loans, lease, asked_at, presence))
        work = asyncio.create_task(self._compare(settings, lease, sets))
        try:
            await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await stop(work)
                raise _lost(beat)
            scores_MS = work.result()
        finally:
            await stop(work, beat)
            await asyncio.gather(beat, return_exceptions=True)
            await to_the_end(self._give_back(lease))
        return EvaluationReport(
            id=self.request.id,
            temperature=job.evaluation.temperature,
            seed=job.seed,
            sets=tuple(
                _report(held_out, [scores_S[number] for scores_S in scores_MS], self.request)
                for number, held_out in enumerate(sets)
            ),
        )

    async def _checked_sets(self) -> list[HeldOut]:
        """Returns the held-out sets, after checking models, problems and rewards."""
        job = self.request.job
        if not job.evaluates:
            raise BadRequest(
                "the job has no held-out problems; expected data.eval, or evaluation.sets"
            )
        for model in self.request.models:
            folder = await asyncio.to_thread(named_model_folder, model.model, self.settings)
            if folder:
                await asyncio.to_thread(check_model_folder, folder, job.max_model_len)
        asks = asks_of(job, self.settings)
        await fetch(ask for name, ask in asks.items() if name != "train")
        sets = await asyncio.to_thread(load_held_out, job, self.settings)
        services = Services(job, self.settings.per_trainer[0])
        try:
            for held_out in sets:
                prompts = await asyncio.to_thread(held_out.prompts)
                await services.validate_rewards(held_out.columns, prompts)
        finally:
            await services.close()
        return sets

    async def _borrow(self) -> tuple[Settings, Lease]:
        """Returns a lease on the samplers of a free trainer, and the settings that name them."""
        for settings in self.settings.per_trainer:
            samplers = sorted({resource(url) for url in settings.rollout_urls})
            lease = await self.store.loans.lend(self.request.id, samplers, settings.lease_s)
            if lease:
                return settings, lease
        raise Conflict(f"the samplers are taken: {await self._who_has_them()}")

    async def _who_has_them(self) -> str:
        for job in (await self.store.list(None, 1, Wanted(status="running"))).jobs:
            return (
                f"job {job.id!r} trains (step {job.step} of {job.steps}); evaluate once it has "
                f"ended, or `hone pause {job.id}` first, and `hone resume {job.id}` afterwards"
            )
        return "another evaluation runs, or what had them ended without giving them back; try again"

    async def _give_back(self, lease: Lease) -> None:
        try:
            await self.store.loans.end(lease)
        except (StoreEmptied, Unavailable) as error:  # the lease ends anyway; the result is valid
            get_logger().warning("samplers not given back", reason=error.detail)

    async def _compare(
        self, settings: Settings, lease: Lease, sets: Sequence[HeldOut]
    ) -> list[list[_Scores]]:
        """Returns each model's scores on each set: `[M][S]`."""
        prompts_S = [await asyncio.to_thread(held_out.prompts) for held_out in sets]
        names = [held_out.name for held_out in sets]
        return [
            await self._answers(number, self._services(number, settings, lease), names, prompts_S)
            for number in range(1, len(self.request.models) + 1)
        ]

    def _services(self, number: int, settings: Settings, lease: Lease) -> Services:
        """Returns the services for model `number`, from 1, which is also its epoch."""
        return Services(
            _with_model(self.request.job, self.request.models[number - 1]),
            settings,
            lease.job_id,
            lease.attempt,
            registered=self.store.samplers.urls,
            epoch=number,
            identity=self.store.identity,
        )

    async def _answers(
        self,
        number: int,
        services: Services,
        sets: Sequence[str],
        prompts_S: Sequence[Sequence[Prompt]],
    ) -> list[_Scores]:
        """Returns the model's scores on each set: `[S]`."""
        self._number, self._num_done = number, 0
        job = _with_model(self.request.job, self.request.models[number - 1])
        try:
            await services.serve_own_weights()
            return [
                _scores(await sample_held_out(job, name, prompts, services, 0, done=self._one_done))
                for name, prompts in zip(sets, prompts_S, strict=True)
            ]
        finally:
            await to_the_end(_close(services))

    def _one_done(self) -> None:
        self._num_done += 1


async def _close(services: Services) -> None:
    await services.abort()
    await services.close()


def _with_model(job: Job, model: EvaluatedModel) -> Job:
    """Returns the job for sampling the model: seeded, so that only the model differs."""
    sampling = job.sampling.model_copy(update={"repeatable": True})
    return job.model_copy(
        update={"model": model.model, "model_revision": model.revision, "sampling": sampling}
    )


def _lost(beat: asyncio.Task[object]) -> Unavailable:
    error = beat.exception()
    why = str(error) if isinstance(error, LeaseLost) else repr(error)
    return Unavailable(f"the samplers are no longer lent to the evaluation: {why}; ask again")


@dataclass(frozen=True)
class _Scores:
    """A model's scores on a held-out set: the metrics of each problem `[P]`, and the shares of
    completions that count nowhere."""

    problems_P: list[dict[str, float]]
    missing_rewards: float
    errored_rollouts: float


def _scores(answers_P: Sequence[Answers]) -> _Scores:
    metrics = set_metrics(answers_P)
    return _Scores(
        of_all([answers.metrics for answers in answers_P]),
        metrics["missing_rewards"],
        metrics["errored_rollouts"],
    )


def _report(
    held_out: HeldOut, scores_M: Sequence[_Scores], request: EvaluationRequest
) -> SetReport:
    first = scores_M[0].problems_P
    models = tuple(
        ModelScores(
            name=model.name,
            metrics=estimates(scores.problems_P),
            differences=differences(scores.problems_P, first) if number else {},
            missing_rewards=scores.missing_rewards,
            errored_rollouts=scores.errored_rollouts,
        )
        for number, (model, scores) in enumerate(zip(request.models, scores_M, strict=True))
    )
    if not any(scores.metrics for scores in models):
        raise Failed(f"no completion on {held_out.where} could be sampled and graded")
    return SetReport(
        name=held_out.name,
        source=held_out.where,
        num_problems=len(held_out.problems),
        num_samples=request.job.evaluation.samples,
        models=models,
    )
