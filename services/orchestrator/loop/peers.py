"""The three services a job runs on, as functions. Each call's deadline is a setting; retries are
the client's."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.client import Client
from shared.config import Settings
from shared.errors import HoneError
from shared.job import Job, SyncMethod
from shared.logs import get_logger
from shared.presence import Tell, tell_nobody
from shared.wire import (
    Aborted,
    AbortRequest,
    Checkpoint,
    CheckpointRequest,
    Example,
    Fenced,
    GenerateRequest,
    ModelRequest,
    Prompt,
    PublishRequest,
    RolloutGroup,
    Sampling,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    ServingWeights,
    StepResult,
    StepTotals,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    Validated,
    ValidateRequest,
    VersionInfo,
    WeightsRef,
)

ABORT_S = 2.0
"""Seconds that a sampler has to end a job's requests. A worker that is stopped does not wait
longer."""

NOT_GRADED = Score(value=None, parts={})
"""The score of a rollout that ended in an error."""


class Peers:
    """One job's view of the services. `close` ends the connections."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        job_id: str = "unnamed",
        attempt: int = 0,
        tell: Tell = tell_nobody,
    ) -> None:
        self._job = job
        self._who = Fenced(job_id=job_id, attempt=attempt)
        self._settings = settings
        token = settings.bearer()
        patience_s = settings.patience_s
        self._rollout = Client(
            "rollout",
            settings.rollout_url,
            token=token,
            binary=True,
            patience_s=patience_s,
            tell=tell,
        )
        self._trainer = Client(
            "trainer",
            settings.trainer_url,
            token=token,
            binary=True,
            patience_s=patience_s,
            tell=tell,
        )
        self._reward = Client(
            "reward",
            settings.reward_url,
            token=token,
            binary=True,
            patience_s=patience_s,
            tell=tell,
        )

    def new_epoch(self) -> None:
        """Makes every call from now on one of another epoch: what was asked for
        before is refused or never joined."""
        self._who = self._who.model_copy(update={"epoch": self._who.epoch + 1})

    @property
    def job_id(self) -> str:
        return self._who.job_id

    @property
    def attempt(self) -> int:
        return self._who.attempt

    @property
    def life(self) -> str:
        """Names the job and the epoch of its weights."""
        return f"{self._who.job_id}:{self._who.attempt}:{self._who.epoch}"

    async def close(self) -> None:
        for client in (self._rollout, self._trainer, self._reward):
            await client.close()

    async def put_model(self) -> ServingWeights:
        job = self._job
        spec = ModelRequest(
            **self._fence(),
            model=job.model,
            revision=job.model_revision,
            dtype=job.training.dtype,
            max_model_len=job.max_model_len,
            seed=job.seed,
        )
        deadline_s = self._settings.start_deadline_s
        return await self._rollout.call(
            "PUT", "/model", spec, ServingWeights, deadline_s=deadline_s
        )

    async def put_job(self) -> TrainerState:
        body = TrainerJob(**self._fence(), job=self._job)
        return await self._trainer.call(
            "PUT", "/job", body, TrainerState, deadline_s=self._settings.start_deadline_s
        )

    async def trainer_state(self) -> TrainerState:
        return await self._trainer.get("/state", TrainerState, deadline_s=self._settings.patience_s)

    async def generate(
        self, prompt: Prompt, min_version: int, *, key: str, sampling: Sampling | None = None
    ) -> RolloutGroup:
        body = GenerateRequest(
            **self._fence(),
            prompt=prompt.content,
            sampling=sampling or self._sampling(),
            min_version=min_version,
        )
        deadline_s = self._settings.generate_deadline_s
        return await self._rollout.call(
            "POST", "/generate", body, RolloutGroup, deadline_s=deadline_s, key=key
        )

    async def score(
        self, prompt: Prompt, group: RolloutGroup, *, job_id: str | None = None
    ) -> tuple[Score, ...]:
        """Returns the group's scores `[G]`: NOT_GRADED for rollouts that ended in an error. What
        graders cache goes into the run folder of `job_id`, if given."""
        items = tuple(
            ScoreItem(
                prompt=prompt.content,
                completion=rollout.text,
                finish_reason=rollout.finish_reason,
                num_tokens=len(rollout.token_ids),
                row=prompt.row,
            )
            for rollout in group.rollouts
            if rollout.finish_reason != "error"
        )
        if not items:
            return (NOT_GRADED,) * len(group.rollouts)
        body = ScoreRequest(items=items, rewards=self._job.rewards, job_id=job_id)
        deadline_s = self._settings.score_deadline_s
        result = await self._reward.call("POST", "/score", body, ScoreResult, deadline_s=deadline_s)
        scores = iter(result.scores)
        return tuple(
            NOT_GRADED if rollout.finish_reason == "error" else next(scores)
            for rollout in group.rollouts
        )

    async def validate_rewards(self, columns: tuple[str, ...]) -> None:
        body = ValidateRequest(rewards=self._job.rewards, columns=columns)
        await self._reward.call("POST", "/graders/validate", body, Validated, deadline_s=60.0)

    async def train_step(
        self, step: int, examples: tuple[Example, ...], totals: StepTotals
    ) -> StepResult:
        body = TrainStepRequest(**self._fence(), step=step, examples=examples, totals=totals)
        deadline_s = self._settings.train_deadline_s
        return await self._trainer.call(
            "POST", "/train_step", body, StepResult, deadline_s=deadline_s
        )

    async def publish_weights(self, version: int, method: SyncMethod) -> WeightsRef:
        body = PublishRequest(**self._fence(), version=version, method=method)
        deadline_s = self._settings.sync_deadline_s
        return await self._trainer.call(
            "POST", "/publish_weights", body, WeightsRef, deadline_s=deadline_s
        )

    async def reload_weights(self, ref: WeightsRef) -> ServingWeights:
        deadline_s = self._settings.sync_deadline_s
        return await self._rollout.call(
            "POST", "/reload_weights", ref, ServingWeights, deadline_s=deadline_s
        )

    async def checkpoint(self, step: int) -> Checkpoint:
        body = CheckpointRequest(**self._fence(), step=step)
        deadline_s = self._settings.sync_deadline_s
        return await self._trainer.call(
            "POST", "/checkpoints", body, Checkpoint, deadline_s=deadline_s
        )

    async def abort(self) -> None:
        """Ends what the sampler has under way of this job. Nothing depends on it: if the sampler
        does not answer soon, that is logged, and its fence keeps the rest from other weights."""
        try:
            body = AbortRequest(**self._fence())
            await self._rollout.call("POST", "/abort", body, Aborted, deadline_s=ABORT_S)
        except HoneError as error:
            get_logger().warning("not aborted", job=self.job_id, reason=error.detail)

    async def versions(self) -> dict[str, dict[str, Any]]:
        """Returns what each service says of its versions."""
        clients = (self._rollout, self._trainer, self._reward)
        found = await asyncio.gather(*(client.get("/version", VersionInfo) for client in clients))
        return {info.service: info.model_dump(exclude={"service"}) for info in found}

    def _fence(self) -> dict[str, Any]:
        return self._who.model_dump()

    def _sampling(self) -> Sampling:
        spec = self._job.sampling
        return Sampling(
            n=spec.group_size,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            stop=spec.stop,
        )
