"""The three services a job runs on, as functions. Each call's deadline is a setting; retries are
the client's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from services.orchestrator.samplers.abilities import check_parsers
from services.orchestrator.samplers.discovery import (
    Registered,
    is_one_host,
    none_registered,
    sampler_urls,
)
from services.orchestrator.samplers.pool import Pool
from services.orchestrator.samplers.sampler import Push
from services.orchestrator.samplers.transport import transport_to
from services.orchestrator.samplers.trial import Trial, trial
from services.orchestrator.samplers.waits import Waits, waits_for
from services.orchestrator.seams import NO_EXTENSIONS, Environment, Extensions, Teacher
from shared.errors import BadRequest, HoneError, Unavailable
from shared.host import tracing
from shared.host.logs import get_logger
from shared.http import ownership
from shared.http.client import Client
from shared.http.connecting import MAX_PAUSE_S, Tell, tell_nobody
from shared.job import EvaluatedModel, Job, SyncMethod
from shared.settings import Settings
from shared.wire import (
    AbortRequest,
    Checkpoint,
    CheckpointRequest,
    Example,
    Fenced,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardRequest,
    ForwardResult,
    GenerateRequest,
    Known,
    Message,
    ModelRequest,
    Optimization,
    OptimStepRequest,
    OptimStepResult,
    Prompt,
    Published,
    PublishRequest,
    Released,
    ReleaseRequest,
    Rollout,
    RolloutGroup,
    SampleOrder,
    Sampling,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    ServingWeights,
    SleepRequest,
    StepResult,
    StepTotals,
    TokenIds,
    TokenLoss,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    Tried,
    TryRequest,
    Validated,
    ValidateRequest,
    VersionInfo,
    WeightsRef,
)

MAX_PROMPTS_TRIED = 8
"""How many rows are looked at before a job begins: enough to see that a column is another one than
meant, and soon done."""

VALIDATE_DEADLINE_S = 60.0

TRY_DEADLINE_S = 30.0

PRESENCE_DEADLINE_S = 15.0
"""Seconds that an idle service has to answer the question whether it is there."""

RELEASE_S = 2.0
"""Seconds that the trainer has to hear that the job has left it."""

VERSION_DEADLINE_S = 5.0

MAX_CONVERSATIONS = 192
"""Conversations of a job at a time: fewer than the reward service opens episodes for it."""

NOT_GRADED = Score(value=None, parts={})
"""The score of a rollout that went wrong."""


class Services:
    """One job's trainer, reward service and pool of samplers. `close` ends the connections.
    `sync_method` is how weights go to the samplers in this epoch, once that was chosen
    (syncing.py), and `published` is the version of this epoch that serves. `waits` says what is
    under way. `trainer_gpu` is the GPU that the trainer sends from and its memory space, once it
    has the job. `identity` names the orchestrator's Redis, by which trainer and samplers know whose
    job it is. With `grading_waits`, grading waits for a reward service that is unreachable, so that
    the sampled completions are not lost. `beside` are the attempts with which the trainer and the
    samplers are shared, and `weight` is the share of the trainer that the job has, with the other
    jobs of its API `key`. `environment` is what conversations act in, and `conversations` the room
    for them. `tell` reports to the job's events."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        job_id: str = "unnamed",
        attempt: int = 0,
        tell: Tell = tell_nobody,
        registered: Registered = none_registered,
        *,
        identity: str | None = None,
        grading_waits: bool = False,
        beside: tuple[int, ...] = (),
        weight: float = 1.0,
        key: str | None = None,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        self._job, self.extensions = job, extensions
        self._beside, self._weight, self._key = beside, weight, key
        self._who = Fenced(job_id=job_id, attempt=attempt, epoch=0)
        self.settings = settings
        limit_s = (settings.wait_limit_s or math.inf) + MAX_PAUSE_S  # no last try before the limit
        self._reward_patience_s = limit_s if grading_waits else None
        headers = ownership.headers(identity, settings, job_id)
        self.pool = Pool(settings, tell, registered, headers)
        self._registered = registered
        self.sync_method: SyncMethod | None = None
        self.published: Published | None = None
        self.waits = Waits()
        self.conversations = asyncio.Semaphore(MAX_CONVERSATIONS)
        self.tell = tell
        self.trainer_gpu: tuple[str | None, str | None] = (None, None)
        self._has_trainer = False
        client = functools.partial(
            Client,
            token=settings.bearer(),
            binary=True,
            patience_s=settings.patience_s,
            tell=tell,
        )
        trainer, reward = settings.trainer_url, settings.reward_url
        self._trainer = client("trainer", trainer, transport=transport_to(trainer), headers=headers)
        self._reward = client("reward", reward, transport=transport_to(reward))
        self.teacher: Teacher | None = None
        if job.teacher:
            wait_s = None if grading_waits else settings.patience_s
            self.teacher = extensions.teacher_of(job.teacher, settings, tell, wait_s)
        self.environment: Environment | None = None
        if job.environment:
            self.environment = extensions.environment_of(
                job, job_id, self._reward, self._reward_patience_s, settings
            )

    def new_epoch(self) -> None:
        """Begins another epoch: requests of the epoch before are refused or never joined."""
        self._who = self._who.model_copy(update={"epoch": self._who.epoch + 1})
        self.published = None
        if self._job.weight_sync == "auto":
            self.sync_method = None

    @property
    def one_host(self) -> bool:
        """Whether all possible samplers are on one host."""
        return is_one_host(self.settings.rollout_urls)

    @property
    def job_id(self) -> str:
        return self._who.job_id

    @property
    def attempt(self) -> int:
        return self._who.attempt

    @property
    def owner(self) -> str:
        """Whose weights requests ask for: job, attempt and epoch, with colons between them."""
        return f"{self._who.job_id}:{self._who.attempt}:{self._who.epoch}"

    async def close(self) -> None:
        await self.pool.close()
        if self.teacher:
            await self.teacher.close()
        if self.environment:
            await self.environment.shut()
        for client in (self._trainer, self._reward):
            await client.close()

    @waits_for("rollout", "loading the model")
    async def put_model(self) -> None:
        """Loads the job's model into the samplers, and returns once one of them has it."""
        job = self._job
        spec = self._model_request().model_copy(
            update={
                "max_lora_rank": job.served_rank,
                "sampling_masks": job.needs_masks,
                "keep_prefixes": job.sampling.keep_prefixes,
            }
        )
        await self.pool.open(spec)

    @waits_for("rollout", "loading the model")
    async def serve_own_weights(self, model: EvaluatedModel) -> None:
        """Loads a model into the samplers, to be sampled as it is, as version 0. Returns once one
        of them serves it."""
        chosen = {"model": model.model, "revision": model.revision, "own_weights": True}
        await self.pool.open(self._model_request().model_copy(update=chosen))

    async def free_gpu(self) -> None:
        """Leaves the GPU to the trainer until the next weights are pushed, if samplers share it."""
        if self.settings.colocate:
            await self.pool.sleep(SleepRequest(**self._fence()))

    @waits_for("trainer", "loading the job")
    async def put_job(self) -> TrainerState:
        body = TrainerJob(
            **self._fence(),
            job=self._job,
            beside=self._beside,
            weight=self._weight,
            key=self._key,
        )
        self._has_trainer = True
        state = await self._trainer.call(
            "PUT", "/job", body, TrainerState, deadline_s=self.settings.start_deadline_s
        )
        self.trainer_gpu = state.gpu, state.memory_space
        return state

    async def trainer_state(self) -> TrainerState:
        return await self._trainer.get("/state", TrainerState, deadline_s=self.settings.patience_s)

    @waits_for("rollout", "sampling a group", "generate")
    async def generate(
        self,
        prompt: Prompt,
        min_version: int,
        *,
        key: str,
        seed: int | None = None,
        sampling: Sampling | None = None,
    ) -> RolloutGroup:
        """Returns the prompt's group, by the job's sampling and `seed` or by `sampling`."""
        tracing.note(prompt=prompt.index)
        spec = self._job.sampling
        body = GenerateRequest(
            **self._fence(),
            prompt=prompt.content,
            template_args=spec.template_args,
            truncate_prompt=spec.overlong_prompts == "truncate",
            deadline_s=self.settings.generate_deadline_s,
            sampling=sampling or self.sampling(seed),
            min_version=min_version,
        )
        return await self._sampled(body, key)

    @waits_for("rollout", "reading an answer", "generate")
    async def given(
        self, prompt: Prompt, answers: tuple[str | Message, ...], *, key: str
    ) -> RolloutGroup:
        """Returns the tokens of a prompt and of given answers to it, as their group."""
        tracing.note(prompt=prompt.index)
        body = GenerateRequest(
            **self._fence(),
            prompt=prompt.content,
            answers=answers,
            template_args=self._job.sampling.template_args,
            sampling=Sampling(n=len(answers)),
        )
        return await self._sampled(body, key)

    @waits_for("rollout", "sampling an answer", "generate")
    async def answer(
        self,
        messages: tuple[Message, ...],
        min_version: int,
        *,
        key: str,
        tools: tuple[dict[str, Any], ...],
        known: Known | None,
        sampling: Sampling,
        tool_choice: Literal["auto", "none"] = "auto",
        template_args: Mapping[str, Any] | None = None,
    ) -> RolloutGroup:
        """Returns the answer to a conversation of which `known` are the tokens so far, as a group
        of one. The answers of a conversation come from the sampler with its cache, if that has
        room. Keys of one conversation differ after their last colon."""
        body = GenerateRequest(
            **self._fence(),
            prompt=messages,
            tools=tools,
            tool_choice=tool_choice,
            known=known,
            template_args={**self._job.sampling.template_args, **(template_args or {})},
            deadline_s=self.settings.generate_deadline_s,
            fit=True,
            sampling=sampling,
            min_version=min_version,
        )
        return await self._sampled(body, key, key.rpartition(":")[0])

    @waits_for("rollout", "sampling an answer", "generate")
    async def go_on(
        self, prompt: str | TokenIds, min_version: int, *, key: str, sampling: Sampling
    ) -> RolloutGroup:
        """Returns what follows a text or token ids, as a group of one. Keys are as in `answer`."""
        body = GenerateRequest(
            **self._fence(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            deadline_s=self.settings.generate_deadline_s,
            fit=True,
            sampling=sampling,
            min_version=min_version,
        )
        return await self._sampled(body, key, key.rpartition(":")[0])

    @waits_for("rollout", "sampling a group", "generate")
    async def sample(
        self,
        order: SampleOrder,
        *,
        key: str,
    ) -> RolloutGroup:
        """Returns the samples that a program asked for."""
        session = order.session
        body = GenerateRequest(
            **self._fence(),
            prompt_token_ids=order.prompt_token_ids,
            deadline_s=self.settings.generate_deadline_s,
            fit=True,
            sampling=order.sampling,
            min_version=session.step,
            snapshot=session.adapter,
            own_weights=session.own_weights,
            prompt_logprobs=order.prompt_logprobs is not None,
            top_prompt_logprobs=order.top_prompt_logprobs,
            top_logprobs=order.top_logprobs,
        )
        return await self._sampled(body, key)

    async def _sampled(
        self, body: GenerateRequest, key: str, conversation: str | None = None
    ) -> RolloutGroup:
        group = await self.pool.generate(body, key, conversation)
        tracing.note(sampler=group.replica, tokens=sum(r.num_sampled for r in group.rollouts))
        return group

    @waits_for("reward", "checking the environment")
    async def validate_environment(self, prompts: tuple[Prompt, ...]) -> None:
        """Raises BadRequest where the job's environment cannot be made and reset for the first
        prompt, gives no reward although the job has no other, or offers tools whose calls a sampler
        cannot find."""
        if self.environment is None:
            return
        found = await self.environment.validate(prompts[0].row)
        if not found.has_reward and all(
            reward.grader == "environment" for reward in self._job.rewards
        ):
            raise BadRequest(
                "the environment has no get_reward, and the job has no other reward; expected one "
                "of them"
            )
        if found.tools:
            urls = await sampler_urls(self.settings.rollout_urls, self._registered)
            await check_parsers(urls, self.settings)

    @waits_for("reward", "grading a group", "grade")
    async def score(
        self, prompt: Prompt, group: RolloutGroup, *, job_id: str | None = None
    ) -> tuple[Score, ...]:
        """Returns the group's scores `[G]`: NOT_GRADED for rollouts that went wrong. What
        graders cache goes into the run folder of `job_id`, if given."""
        tracing.note(prompt=prompt.index)
        items = tuple(
            score_item(prompt, rollout) for rollout in group.rollouts if not rollout.went_wrong
        )
        if not items:
            return (NOT_GRADED,) * len(group.rollouts)
        if not self._job.rewards:
            nothing = Score(value=0.0, parts={})
            return tuple(NOT_GRADED if one.went_wrong else nothing for one in group.rollouts)
        body = ScoreRequest(items=items, rewards=self._job.rewards, job_id=job_id)
        result = await self._reward.call(
            "POST",
            "/score",
            body,
            ScoreResult,
            deadline_s=self.settings.score_deadline_s,
            patience_s=self._reward_patience_s,
        )
        scores = iter(result.scores)
        return tuple(
            NOT_GRADED if rollout.went_wrong else next(scores) for rollout in group.rollouts
        )

    @waits_for("teacher", "asking the teacher")
    async def taught(self, group: RolloutGroup, scores: tuple[Score, ...]) -> tuple[Score, ...]:
        """Returns the scores with the teacher's log-probs, if the job has a teacher."""
        if self.teacher is None:
            return scores
        return await self.teacher.score(group, scores, alone=not self._job.rewards)

    @waits_for("reward", "checking the rewards")
    async def validate_rewards(
        self, columns: tuple[str, ...], prompts: tuple[Prompt, ...] = ()
    ) -> None:
        """Raises BadRequest where the rewards would not work on rows with these columns, or on one
        of the first few `prompts`, or the teacher has another vocabulary."""
        if self.teacher:
            with self.waits.on("teacher", "comparing the vocabularies"):
                await self.teacher.check(self._job)
        if not self._job.rewards:
            return
        environment = self._job.environment
        given = ("environments",) if environment and environment.kind == "class" else ()
        body = ValidateRequest(
            rewards=self._job.rewards,
            columns=(*columns, *given),
            prompts=prompts[:MAX_PROMPTS_TRIED],
        )
        await self._reward.call(
            "POST", "/graders/validate", body, Validated, deadline_s=VALIDATE_DEADLINE_S
        )

    async def try_rewards(self, prompts: tuple[Prompt, ...]) -> Trial | None:
        """Returns what the rewards give empty completions and reference answers of the first few
        `prompts`; None without prompts or rewards, and if the service does not say so soon: nothing
        depends on it."""
        shown = prompts[:MAX_PROMPTS_TRIED]
        if not shown or not self._job.rewards:
            return None
        body = TryRequest(rewards=self._job.rewards, prompts=shown)
        try:
            tried = await self._reward.call(
                "POST", "/graders/try", body, Tried, deadline_s=TRY_DEADLINE_S
            )
        except HoneError as error:
            get_logger().warning("rewards not tried", job=self.job_id, reason=error.detail)
            return None
        return trial(self._job.rewards, tried.rewards, len(shown))

    @waits_for("trainer", "training a step", "train")
    async def train_step(
        self, step: int, examples: tuple[Example, ...], totals: StepTotals
    ) -> StepResult:
        """Trains one step, while the samplers sleep if they share the trainer's GPU."""
        tracing.note(examples=len(examples))
        await self.free_gpu()
        body = TrainStepRequest(**self._fence(), step=step, examples=examples, totals=totals)
        deadline_s = self._in_turns(self.settings.train_deadline_s)
        return await self._trainer.call(
            "POST", "/train_step", body, StepResult, deadline_s=deadline_s
        )

    @waits_for("trainer", "computing log-probs", "forward")
    async def forward(self, step: int, examples: tuple[Example, ...]) -> ForwardResult:
        """Returns what the weights of the last applied step give the examples."""
        body = ForwardRequest(**self._fence(), step=step, examples=examples)
        deadline_s = self._in_turns(self.settings.train_deadline_s)
        return await self._trainer.call(
            "POST", "/forward", body, ForwardResult, deadline_s=deadline_s
        )

    @waits_for("trainer", "adding up a gradient", "forward_backward")
    async def forward_backward(
        self, step: int, examples: tuple[Example, ...], loss: TokenLoss
    ) -> ForwardBackwardResult:
        """Adds the gradient of the examples' loss, as operation `step`."""
        await self.free_gpu()
        body = ForwardBackwardRequest(**self._fence(), step=step, examples=examples, loss=loss)
        deadline_s = self._in_turns(self.settings.train_deadline_s)
        return await self._trainer.call(
            "POST", "/forward_backward", body, ForwardBackwardResult, deadline_s=deadline_s
        )

    @waits_for("trainer", "taking an optimizer step", "optim_step")
    async def optim_step(self, step: int, optimization: Optimization) -> OptimStepResult:
        """Changes the weights by the gradient so far, as operation `step`."""
        await self.free_gpu()
        body = OptimStepRequest(**self._fence(), step=step, optimization=optimization)
        deadline_s = self._in_turns(self.settings.train_deadline_s)
        return await self._trainer.call(
            "POST", "/optim_step", body, OptimStepResult, deadline_s=deadline_s
        )

    @waits_for("trainer", "publishing weights", "publish")
    async def publish_weights(
        self, version: int, method: SyncMethod, snapshot: int | None = None
    ) -> WeightsRef:
        tracing.note(version=version, weight_sync=method)
        body = PublishRequest(**self._fence(), version=version, method=method, snapshot=snapshot)
        deadline_s = self._in_turns(self.settings.sync_deadline_s)
        return await self._trainer.call(
            "POST", "/publish_weights", body, WeightsRef, deadline_s=deadline_s
        )

    @waits_for("rollout", "loading weights", "load")
    async def push_weights(self, push: Push) -> list[ServingWeights]:
        """Makes every sampler serve what is pushed; returns what each answered."""
        tracing.note(version=push.ref.root.version)
        return await self.pool.push(push)

    @waits_for("trainer", "writing a checkpoint", "checkpoint")
    async def checkpoint(self, step: int, keep: tuple[int, ...] = ()) -> Checkpoint:
        """Writes the step's checkpoint. Old ones are removed, except the steps `keep`."""
        body = CheckpointRequest(**self._fence(), step=step, keep=keep)
        deadline_s = self._in_turns(self.settings.sync_deadline_s)
        return await self._trainer.call(
            "POST", "/checkpoints", body, Checkpoint, deadline_s=deadline_s
        )

    def _in_turns(self, deadline_s: float) -> float:
        """Returns the deadline of a command that may wait for one of each job that shares the
        trainer."""
        others = self.settings.places - 1 if self._job.shares_as else 0
        return deadline_s + others * self.settings.train_deadline_s

    def away(self) -> dict[str, float]:
        """Returns the unreachable services, and since when (Unix time)."""
        clients = (
            self._trainer,
            self._reward,
            *(sampler.client for sampler in self.pool.samplers.values()),
        )
        found: dict[str, float] = {}
        for who, at in (client.away for client in clients if client.away):
            found[who] = min(at, found.get(who, at))
        return found

    @property
    def reward_away_since(self) -> float | None:
        """Since when the reward service, or what it needs, is unreachable (Unix time); None: it is
        not."""
        return self._reward.away[1] if self._reward.away else None

    async def sampler_doing(self) -> str | None:
        """Returns what takes a sampler long that loads the model; None: nothing that it tells."""
        deadline_s = PRESENCE_DEADLINE_S
        client = self.pool.one()
        return (await client.get("/weights", ServingWeights, deadline_s=deadline_s)).doing

    async def look(self) -> None:
        """Asks each service without a call under way whether it is there, so that the job's events
        say within seconds which is unreachable. Of the other services the calls themselves say it,
        and more reliably: a service that is still starting answers this question too. The client
        reports errors, and the call that needs the service decides what follows."""
        clients = {
            "trainer": (self._trainer,),
            "reward": (self._reward,),
            "rollout": tuple(sampler.client for sampler in self.pool.up()),
        }
        idle = clients.keys() - self.waits.services
        asked = (client for service in sorted(idle) for client in clients[service])
        calls = (
            client.get("/version", VersionInfo, deadline_s=PRESENCE_DEADLINE_S) for client in asked
        )
        await asyncio.gather(*calls, return_exceptions=True)

    async def abort(self) -> None:
        """Ends what the samplers have under way of this job, and lets another orchestrator have
        them and the trainer, if they answer soon."""
        aborting = self.pool.abort(AbortRequest(**self._fence()))
        await asyncio.gather(aborting, self._release_trainer())

    async def _release_trainer(self) -> None:
        """Nothing depends on it: a trainer that hears nothing of its owner is free later."""
        if not self._has_trainer:
            return
        body = ReleaseRequest(**self._fence())
        try:
            await self._trainer.call(
                "POST", "/release", body, Released, deadline_s=RELEASE_S, patience_s=0.0
            )
        except HoneError as error:
            get_logger().warning("trainer not released", job=self.job_id, reason=error.detail)

    async def versions(self) -> dict[str, dict[str, Any]]:
        """Returns what each service says of its versions; a service that does not answer soon is
        left out."""
        clients = [self._trainer, self._reward]
        with contextlib.suppress(Unavailable):  # there is no sampler now
            clients.append(self.pool.one())
        found = await asyncio.gather(*map(_version, clients))
        return {info.service: info.model_dump(exclude={"service"}) for info in found if info}

    def _model_request(self) -> ModelRequest:
        job = self._job
        return ModelRequest(
            **self._fence(),
            beside=self._beside,
            model=job.model,
            revision=job.model_revision,
            dtype=job.training.dtype,
            max_model_len=job.max_model_len,
            seed=job.seed,
        )

    def _fence(self) -> dict[str, Any]:
        return self._who.model_dump()

    def sampling(self, seed: int | None) -> Sampling:
        """Returns how the job samples a group."""
        spec = self._job.sampling
        return Sampling(
            n=spec.group_size,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            stop=spec.stop,
            stop_token_ids=spec.stop_token_ids,
            seed=seed,
        )


async def _version(client: Client) -> VersionInfo | None:
    try:
        return await client.get("/version", VersionInfo, deadline_s=VERSION_DEADLINE_S)
    except HoneError as error:
        get_logger().warning("version not known", service=client.name, reason=error.detail)
        return None


def score_item(prompt: Prompt, rollout: Rollout) -> ScoreItem:
    """Returns what a rollout is graded by. Its length is what the policy sampled: in a
    conversation, without what tools said."""
    return ScoreItem(
        prompt=prompt.content,
        completion=rollout.text,
        prompt_end=rollout.prompt_end,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_sampled,
        row=prompt.row,
        messages=rollout.messages,
        info=rollout.info,
    )
