"""The services of a job: its trainer, its reward service (clients.py) and its samplers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.orchestrator.samplers.clients import RewardClient, TrainerClient
from services.orchestrator.samplers.discovery import (
    Registered,
    check_parsers,
    is_one_host,
    none_registered,
    sampler_urls,
)
from services.orchestrator.samplers.pool import Pool
from services.orchestrator.samplers.sampler import Push
from services.orchestrator.samplers.status import AttemptStatus, Caller, tracks_call
from services.orchestrator.seams import NO_EXTENSIONS, Environment, Extensions, Teacher
from shared.errors import BadRequest, HoneError, Unavailable
from shared.host import tracing
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.http.retry import MAX_PAUSE_S
from shared.job import EvaluatedModel, SyncMethod
from shared.wire import (
    AbortRequest,
    ConversationPrefix,
    GenerateRequest,
    Message,
    ModelRequest,
    Prompt,
    Published,
    RolloutGroup,
    SampleOrder,
    Sampling,
    ServingWeights,
    SleepRequest,
    ToolChoice,
    VersionInfo,
)
from shared.wire.packed import TokenIds

PRESENCE_DEADLINE_S = 15.0
"""Seconds that a service has to answer the question whether it is there, or what it does."""

VERSION_DEADLINE_S = 5.0

MAX_CONVERSATIONS = 192
"""Conversations of a job at a time: fewer than the reward service opens episodes for it."""


@dataclass(frozen=True)
class AnswerOptions:
    """Fields of a `GenerateRequest` for an answer: the tools that it may call, and what limits it.
    `template_args` are added to the job's."""

    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    json_schema: dict[str, Any] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])


class JobSamplers:
    """What a job asks of the samplers in its `pool`. `sync_method` is how weights go to them in
    this epoch, once that was chosen (syncing.py), and `published` is the version of this epoch that
    serves. `conversations` is the room for conversations."""

    def __init__(self, caller: Caller, registered: Registered = none_registered) -> None:
        self.caller = caller
        self.pool = Pool(caller, registered)
        self._registered = registered
        self.sync_method: SyncMethod | None = None
        self.published: Published | None = None
        self.conversations = asyncio.Semaphore(MAX_CONVERSATIONS)

    @property
    def one_host(self) -> bool:
        """Whether all possible samplers are on one host."""
        return is_one_host(self.caller.settings.rollout_urls)

    @tracks_call("rollout", "loading the model")
    async def load_model(self) -> None:
        """Loads the job's model into the samplers, and returns once one of them has it."""
        job = self.caller.job
        spec = self._model_request().model_copy(
            update={
                "max_lora_rank": job.served_rank,
                "sampling_masks": job.needs_masks,
                "keep_prefixes": job.sampling.keep_prefixes,
            }
        )
        await self.pool.open(spec)

    @tracks_call("rollout", "loading the model")
    async def serve_own_weights(self, model: EvaluatedModel) -> None:
        """Loads a model into the samplers, to be sampled unchanged, as version 0. Returns once one
        of them serves it."""
        chosen = {"model": model.model, "revision": model.revision, "own_weights": True}
        await self.pool.open(self._model_request().model_copy(update=chosen))

    @tracks_call("rollout", "loading weights", "load")
    async def push_weights(self, push: Push) -> list[ServingWeights]:
        """Makes every sampler serve what is pushed; returns what each answered."""
        tracing.note(version=push.ref.root.version)
        return await self.pool.push(push)

    async def free_gpu(self) -> None:
        """Leaves the GPU to the trainer until the next weights are pushed, if samplers share it."""
        if self.caller.settings.colocate:
            await self.pool.sleep(SleepRequest(**self.caller.fence))

    async def check_parsers(self) -> None:
        """Raises BadRequest if a sampler says that it finds no calls of tools."""
        urls = await sampler_urls(self.caller.settings.rollout_urls, self._registered)
        await check_parsers(urls, self.caller.settings)

    async def state(self, deadline_s: float) -> ServingWeights:
        """Returns what a sampler says of itself."""
        client = self.pool.one()
        return await client.get("/weights", ServingWeights, deadline_s=deadline_s, beside=True)

    @tracks_call("rollout", "sampling a group", "generate")
    async def sample(
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
        spec = self.caller.job.sampling
        body = GenerateRequest(
            **self.caller.fence,
            prompt=prompt.content,
            template_args=spec.template_args,
            truncate_prompt=spec.overlong_prompts == "truncate",
            deadline_s=self.caller.settings.generate_deadline_s,
            sampling=sampling or self.sampling(seed),
            min_version=min_version,
        )
        return await self._sampled(body, key)

    @tracks_call("rollout", "reading an answer", "generate")
    async def read(
        self, prompt: Prompt, answers: tuple[str | Message, ...], *, key: str
    ) -> RolloutGroup:
        """Returns the tokens of a prompt and of given answers to it, as their group."""
        tracing.note(prompt=prompt.index)
        body = GenerateRequest(
            **self.caller.fence,
            prompt=prompt.content,
            answers=answers,
            template_args=self.caller.job.sampling.template_args,
            sampling=Sampling(n=len(answers)),
        )
        return await self._sampled(body, key)

    @tracks_call("rollout", "sampling an answer", "generate")
    async def answer(
        self,
        messages: tuple[Message, ...],
        min_version: int,
        *,
        key: str,
        options: AnswerOptions,
        known: ConversationPrefix | None,
        sampling: Sampling,
    ) -> RolloutGroup:
        """Returns the answer to a conversation of which `known` are the tokens so far, as a group
        of one. The answers of a conversation come from the sampler with its cache, if that has
        room. Keys of one conversation differ after their last colon."""
        of_job = self.caller.job.sampling.template_args
        body = GenerateRequest(
            **self.caller.fence,
            prompt=messages,
            **{**vars(options), "template_args": {**of_job, **options.template_args}},
            known=known,
            deadline_s=self.caller.settings.generate_deadline_s,
            fit=True,
            sampling=sampling,
            min_version=min_version,
        )
        return await self._sampled(body, key, key.rpartition(":")[0])

    @tracks_call("rollout", "sampling an answer", "generate")
    async def complete(
        self, prompt: str | TokenIds, min_version: int, *, key: str, sampling: Sampling
    ) -> RolloutGroup:
        """Returns what follows a text or token ids, as a group of one. Keys are as in `answer`."""
        body = GenerateRequest(
            **self.caller.fence,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            deadline_s=self.caller.settings.generate_deadline_s,
            fit=True,
            sampling=sampling,
            min_version=min_version,
        )
        return await self._sampled(body, key, key.rpartition(":")[0])

    @tracks_call("rollout", "sampling a group", "generate")
    async def sample_order(self, order: SampleOrder, *, key: str) -> RolloutGroup:
        """Returns the samples that a program asked for."""
        session = order.session
        body = GenerateRequest(
            **self.caller.fence,
            prompt_token_ids=order.prompt_token_ids,
            deadline_s=self.caller.settings.generate_deadline_s,
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

    def _model_request(self) -> ModelRequest:
        job = self.caller.job
        return ModelRequest(
            **self.caller.fence,
            beside=self.caller.beside,
            model=job.model,
            revision=job.model_revision,
            dtype=job.training.dtype,
            max_model_len=job.max_model_len,
            seed=job.seed,
        )

    def sampling(self, seed: int | None) -> Sampling:
        """Returns how the job samples a group."""
        spec = self.caller.job.sampling
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


@dataclass(frozen=True, eq=False)
class Services:
    """The services of one attempt at a job; `close` ends the connections. `environment` is what
    conversations act in."""

    caller: Caller
    trainer: TrainerClient
    reward: RewardClient
    samplers: JobSamplers
    teacher: Teacher | None
    environment: Environment | None
    extensions: Extensions

    @classmethod
    def of(
        cls,
        caller: Caller,
        registered: Registered = none_registered,
        extensions: Extensions = NO_EXTENSIONS,
        *,
        grading_waits: bool = False,
    ) -> Services:
        """Returns the services of the caller's job. With `grading_waits`, grading waits for a
        reward service that is unreachable, so that the sampled completions are not lost."""
        job, settings = caller.job, caller.settings
        limit_s = (settings.wait_limit_s or math.inf) + MAX_PAUSE_S  # no last try before the limit
        grading_patience_s = limit_s if grading_waits else None
        samplers = JobSamplers(caller, registered)
        reward = RewardClient(caller, grading_patience_s)
        teacher = environment = None
        if job.teacher:
            wait_s = None if grading_waits else settings.patience_s
            teacher = extensions.teacher_of(job.teacher, settings, caller.tell, wait_s)
        if job.environment:
            environment = extensions.environment_of(
                job, caller.job_id, reward.client, grading_patience_s, settings
            )
        return cls(
            caller,
            TrainerClient(caller, samplers.free_gpu),
            reward,
            samplers,
            teacher,
            environment,
            extensions,
        )

    @property
    def status(self) -> AttemptStatus:
        return self.caller.status

    def new_epoch(self) -> None:
        """Begins another epoch: requests of the epoch before are refused or never joined."""
        self.caller.epoch += 1
        self.samplers.published = None
        if self.caller.job.weight_sync == "auto":
            self.samplers.sync_method = None

    async def close(self) -> None:
        await self.samplers.pool.close()
        if self.teacher:
            await self.teacher.close()
        if self.environment:
            await self.environment.shut()
        for client in (self.trainer.client, self.reward.client):
            await client.close()

    async def validate(self, columns: tuple[str, ...], prompts: tuple[Prompt, ...]) -> None:
        """Raises BadRequest where the job's rewards would not work on rows with these columns, or
        on one of the first few `prompts`, the teacher has another vocabulary, or the environment
        does not work."""
        if self.teacher:
            with self.status.on("teacher", "comparing the vocabularies"):
                await self.teacher.check(self.caller.job)
        await self.reward.validate(columns, prompts)
        if self.environment:
            with self.status.on("reward", "checking the environment"):
                await self._validate_environment(self.environment, prompts[0])

    async def _validate_environment(self, environment: Environment, prompt: Prompt) -> None:
        """Raises BadRequest where the job's environment cannot be made and reset for the prompt,
        gives no reward although the job has no other, or offers tools whose calls a sampler cannot
        find."""
        found = await environment.validate(prompt.row)
        rewards = self.caller.job.rewards
        if not found.has_reward and all(reward.grader == "environment" for reward in rewards):
            raise BadRequest(
                "the environment has no get_reward, and the job has no other reward; expected one "
                "of them"
            )
        if found.tools:
            await self.samplers.check_parsers()

    async def look(self) -> None:
        """Asks each service without a call under way whether it is there, so that the job's events
        say within seconds which is unreachable. Of the other services the calls themselves say it,
        and more reliably: a service that is still starting answers this question too. While the job
        is loaded, also asks a sampler what it does. The client reports errors, and the
        call that needs the service decides what follows."""
        clients = {
            "trainer": (self.trainer.client,),
            "reward": (self.reward.client,),
            "rollout": tuple(sampler.client for sampler in self.samplers.pool.up()),
        }
        idle = clients.keys() - self.status.services
        asked = (client for service in sorted(idle) for client in clients[service])
        calls: list[Awaitable[object]] = [
            client.get("/version", VersionInfo, deadline_s=PRESENCE_DEADLINE_S) for client in asked
        ]
        if self.status.loads:
            calls.append(self._note_sampler())
        await asyncio.gather(*calls, return_exceptions=True)

    async def _note_sampler(self) -> None:
        """Notes in the job's status, and says once in its events, what takes a sampler long."""
        doing = (await self.samplers.state(PRESENCE_DEADLINE_S)).doing
        if doing and doing != self.status.sampler and self.status.loads:
            self.status.sampler = doing
            await self.caller.tell(f"the sampler is {doing}", False)

    async def abort(self) -> None:
        """Ends what the samplers have under way of this job, and lets another orchestrator have
        them and the trainer, if they answer soon."""
        aborting = self.samplers.pool.abort(AbortRequest(**self.caller.fence))
        await asyncio.gather(aborting, self.trainer.release())

    async def versions(self) -> dict[str, dict[str, Any]]:
        """Returns what each service says of its versions; a service that does not answer soon is
        left out."""
        clients = [self.trainer.client, self.reward.client]
        with contextlib.suppress(Unavailable):  # there is no sampler now
            clients.append(self.samplers.pool.one())
        found = await asyncio.gather(*map(_version, clients))
        return {info.service: info.model_dump(exclude={"service"}) for info in found if info}


async def _version(client: Client) -> VersionInfo | None:
    try:
        return await client.get("/version", VersionInfo, deadline_s=VERSION_DEADLINE_S)
    except HoneError as error:
        get_logger().warning("version not known", service=client.name, reason=error.detail)
        return None
