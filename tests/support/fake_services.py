"""Stand-ins for rollout, trainer and reward at the HTTP seam, to reach the orchestrator's faults on
demand.

They speak the real wire through the real service factory, refuse a superseded caller, and are
otherwise as thin as can be: the "model" answers right with probability `version / 10`, so that a
run's reward rises only if its weights are trained and pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from services.trainer.disk.checkpoints import checkpoints_dir, path_of, remove_old
from shared.errors import BadRequest, Conflict, StateLost
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    Aborted,
    AbortRequest,
    AnyWeights,
    Canary,
    CheckedWeights,
    Checkpoint,
    CheckpointRequest,
    Fence,
    Fencing,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardRequest,
    ForwardResult,
    GenerateRequest,
    Logprobs,
    Message,
    ModelRequest,
    NoBody,
    OptimStepRequest,
    OptimStepResult,
    Part,
    PublishRequest,
    Released,
    ReleaseRequest,
    Rollout,
    RolloutGroup,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    ServingWeights,
    SleepRequest,
    Span,
    StepResult,
    TokenIds,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    TriedReward,
    TriedRewards,
    TryRequest,
    Validated,
    ValidateRequest,
    WeightsRef,
)
from tests.support.running import serve

TAKES_OVER = frozenset({"job", "model", "reload"})
"""Routes by which a newer attempt or epoch takes over."""

PROMPT_IDS = TokenIds((9,))

WHERE: dict[str, dict[str, Any]] = {
    "http": {"files": ()},
    "delta": {"files": ()},
    "lora": {"path": "/w", "adapter": "job/v1"},
    "nccl": {"deadline_s": 1.0, "port": 1, "key": "k", "chunks": ()},
    "ipc": {"deadline_s": 1.0, "gpu": "GPU-1", "shared": ()},
}
"""What a reference says of where the weights are, where that is no folder."""


class Hold:
    """Calls that are held. `reached` is set at the first; setting `released` lets all continue."""

    def __init__(self, when: Callable[[Any], object]) -> None:
        self.reached, self.released = asyncio.Event(), asyncio.Event()
        self._when = when

    async def __call__(self, body: Any) -> None:
        if self._when(body):
            self.reached.set()
            await self.released.wait()

    async def arrival(self) -> None:
        await asyncio.wait_for(self.reached.wait(), 60)


class FakeServices:
    """All three in one. `calls` counts; setting `fault[route]` to a function runs it in that route
    first, and what it answers goes through `change[route]`. `errors` says why a prompt cannot be
    sampled, if so; `fence` is the newest seen, and `gpus` are the trainer's and the sampler's, in
    `spaces` of memory. A
    model of `skills` answers right that much more often. `kept[step]` are the checkpoints that were
    to be kept when that of the step was written."""

    def __init__(self, settings: Settings) -> None:
        self.calls: Counter[str] = Counter()
        self._runs_dir = settings.runs_dir
        self.fault: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.change: dict[str, Callable[[Any], Any]] = {}
        self.job: TrainerJob | None = None
        self.step = 0
        self.serving = ServingWeights()
        self.spec: ModelRequest | None = None
        self.trained: list[TrainStepRequest] = []
        self.operations: list[ForwardBackwardRequest | OptimStepRequest] = []
        self.grade: Callable[[ScoreItem], Part] = lambda item: Part(
            value=float(item.completion == "right")
        )
        self._random = random.Random(0)
        self.checkpointed: set[int] = {0}
        self.remembers_jobs = False  # else a job that another one displaced begins again
        self._checkpoints: dict[str, set[int]] = {}
        self.restarts = 0
        self.last_failure: str | None = None
        self.damaged: tuple[str, ...] = ()
        self.doing: str | None = None
        self.skipped: set[int] = set()
        self.trainer_metrics: dict[str, float] = {}
        self.reloads: list[AnyWeights] = []
        self.aborted: list[AbortRequest] = []
        self.errors: Callable[[GenerateRequest], str | None] = lambda _: None
        self.fence: Fence = (0, 0)
        self.gpus: tuple[str | None, tuple[str, ...]] = (None, ())
        self.spaces: tuple[str | None, str | None] = ("here", "here")
        self.skills: dict[str, float] = {}
        self.kept: dict[int, tuple[int, ...]] = {}
        self._services = {
            name: Service(name, settings) for name in ("rollout", "trainer", "reward")
        }
        for name, method, path, handler in (
            ("rollout", "PUT", "/model", self._put_model),
            ("rollout", "POST", "/generate", self._generate),
            ("rollout", "POST", "/reload_weights", self._reload),
            ("rollout", "POST", "/abort", self._abort),
            ("rollout", "POST", "/sleep", self._sleep),
            ("rollout", "POST", "/weights/check", self._check),
            ("trainer", "PUT", "/job", self._put_job),
            ("trainer", "POST", "/train_step", self._train_step),
            ("trainer", "POST", "/forward", self._forward),
            ("trainer", "POST", "/forward_backward", self._forward_backward),
            ("trainer", "POST", "/optim_step", self._optim_step),
            ("trainer", "POST", "/publish_weights", self._publish),
            ("trainer", "POST", "/checkpoints", self._checkpoint),
            ("trainer", "POST", "/release", self._release),
            ("reward", "POST", "/score", self._score),
            ("reward", "POST", "/graders/validate", self._validate),
            ("reward", "POST", "/graders/try", self._try),
        ):
            self._services[name].operation(method, path, handler)
        self._services["trainer"].query("/state", self._state)
        self._services["rollout"].query("/weights", self._weights)

    def service(self, name: str) -> Service:
        return self._services[name]

    def hold(self, route: str, when: Callable[[Any], object] = lambda _: True) -> Hold:
        """Holds the calls of the route for which `when` is true."""
        hold = self.fault[route] = Hold(when)
        return hold

    def restart_trainer(self) -> None:
        """What a killed trainer does: it comes back from its newest checkpoint, by
        itself."""
        self.step, self.restarts = max(self.checkpointed), self.restarts + 1
        self.trained = [request for request in self.trained if request.step <= self.step]

    def lose_trainer(self) -> None:
        """What is left when the trainer's disk goes as well."""
        self.job, self.checkpointed, self.trained = None, {0}, []

    @contextlib.asynccontextmanager
    async def running(self, settings: Settings) -> AsyncGenerator[Settings]:
        """Serves all three on free ports; yields the settings that name them."""
        servers = {f"{name}_url": self._services[name].server(0) for name in self._services}
        tasks = [asyncio.create_task(serve(server)) for server in servers.values()]
        while not all(server.started for server in servers.values()):
            await asyncio.sleep(0.001)
        urls = {
            name: f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            for name, server in servers.items()
        }
        try:
            yield settings.model_copy(update=urls)
        finally:
            for server in servers.values():
                server.should_exit = True
            await asyncio.gather(*tasks)

    async def _note(self, route: str, body: Any) -> None:
        self.calls[route] += 1
        if route in self.fault:
            await self.fault[route](body)
        if isinstance(body, Fencing) and route in TAKES_OVER:
            owned = self._services["trainer" if route == "job" else "rollout"].ownership
            self.fence = max((0, 0) if owned.take(body) else self.fence, body.fence)
        if isinstance(body, Fencing) and body.fence < self.fence:
            raise Conflict(f"got {body.fence}, superseded by {self.fence}", code="stale")

    def _answer(self, route: str, answer: Any) -> Any:
        return self.change.get(route, lambda same: same)(answer)

    async def _put_model(self, spec: ModelRequest) -> ServingWeights:
        await self._note("model", spec)
        self.serving = ServingWeights(
            model=spec.model, gpus=self.gpus[1], memory_space=self.spaces[1]
        )
        if spec.own_weights:
            of_job = spec.model_dump(include={"job_id", "attempt", "epoch"})
            self.serving = self.serving.model_copy(update={**of_job, "version": 0})
        self.spec = spec
        return self.serving

    async def _weights(self) -> ServingWeights:
        taken = self._services["rollout"].ownership.taken()
        return self.serving.model_copy(update={"taken": taken, "doing": self.doing})

    async def _release(self, body: ReleaseRequest) -> Released:
        self._services["trainer"].ownership.leave(body)
        return Released(job_id=body.job_id)

    async def _put_job(self, body: TrainerJob) -> TrainerState:
        await self._note("job", body)
        if self.job is None or self.job.job_id != body.job_id:
            known = self._checkpoints.setdefault(body.job_id, {0}) if self.remembers_jobs else {0}
            self.job, self.step, self.checkpointed = body, max(known), known
        return await self._state()

    async def _state(self) -> TrainerState:
        return TrainerState(
            job_id=self.job.job_id if self.job else None,
            step=self.step,
            num_ranks=1,
            dtype="float32",
            device="cpu",
            num_parameters=1,
            restarts=self.restarts,
            last_failure=self.last_failure,
            damaged=self.damaged,
            gpu=self.gpus[0],
            memory_space=self.spaces[0],
            taken=self._services["trainer"].ownership.taken(),
        )

    async def _generate(self, body: GenerateRequest) -> RolloutGroup:
        await self._note("generate", body)
        if body.answers:
            return RolloutGroup(
                prompt_token_ids=PROMPT_IDS, rollouts=tuple(map(_given, body.answers))
            )
        version = self.serving.version
        if body.snapshot is not None or body.own_weights:
            version = body.snapshot.version if body.snapshot else 0
        if version is None or version < (body.min_version or 0):
            raise Conflict(
                f"serving version {version}, asked for {body.min_version}", code="out_of_order"
            )
        if error := self.errors(body):
            failed = Rollout(text="", token_ids=TokenIds(), finish_reason="error", error=error)
            rollouts = (failed,) * body.sampling.n
            return RolloutGroup(prompt_token_ids=PROMPT_IDS, rollouts=rollouts)
        seed = body.sampling.seed
        draws = self._random if seed is None else random.Random(seed)
        skill = version / 10 + self.skills.get(self.serving.model or "", 0.0)
        right = [draws.random() < skill for _ in range(body.sampling.n)]
        rollouts = tuple(
            Rollout(
                text="right" if r else "wrong",
                token_ids=TokenIds((1, 2)),
                logprobs=Logprobs((-0.5, -0.5)),
                finish_reason="stop",
                top_ids=TokenIds((1, 3, 2, 3)[: 2 * body.top_logprobs]),
                top_logprobs=Logprobs((-0.5, -1, -0.5, -1)[: 2 * body.top_logprobs]),
                spans=(Span(version=version, start=0),),
            )
            for r in right
        )
        num = len(body.prompt_token_ids or ()) - 1 if body.prompt_logprobs else 0
        found = Logprobs([-float(place) for place in range(1, num + 1)])
        num_top = len(body.prompt_token_ids or ()) - 1 if body.top_prompt_logprobs else 0
        top = [-float(place) for place in range(num_top * body.top_prompt_logprobs)]
        group = RolloutGroup(
            prompt_token_ids=PROMPT_IDS,
            rollouts=rollouts,
            prompt_logprobs=found,
            prompt_top_ids=TokenIds([int(9 - one) for one in top]),
            prompt_top_logprobs=Logprobs(top),
        )
        return self._answer("generate", group)

    async def _abort(self, body: AbortRequest) -> Aborted:
        await self._note("abort", body)
        self.aborted.append(body)
        self._services["rollout"].ownership.leave(body)
        return Aborted(num_requests=0)

    async def _sleep(self, body: SleepRequest) -> ServingWeights:
        await self._note("sleep", body)
        self.serving = ServingWeights(model=self.serving.model)
        return self.serving

    async def _reload(self, request: WeightsRef) -> ServingWeights:
        ref = request.root
        await self._note("reload", ref)
        if self.serving.model is None:
            raise StateLost("no model is loaded; PUT /model loads one")
        self.reloads.append(ref)
        serving = self.serving
        same = (serving.job_id, serving.fence) == (ref.job_id, ref.fence)
        if same and ref.version < (serving.version or 0):
            raise Conflict(
                f"'version': got {ref.version}, serving {serving.version}; versions only go up"
            )
        self.serving = ServingWeights(
            job_id=ref.job_id,
            attempt=ref.attempt,
            epoch=ref.epoch,
            version=ref.version,
            digest=ref.digest,
            model="m",
            canary_logprobs=logprobs_of(ref.version),
            dtype="float32",
        )
        return self._answer("reload", self.serving)

    async def _check(self, _: NoBody) -> CheckedWeights:
        await self._note("check", _)
        return CheckedWeights(
            version=self.serving.version, replica="", num_tensors=2, differing=("norm",)
        )

    async def _train_step(self, body: TrainStepRequest) -> StepResult:
        await self._note("train_step", body)
        if self.job is None:
            raise StateLost(f"got job {body.job_id!r}, but no job is loaded; PUT /job first")
        if self.trained and body.step == self.step and _same(body, self.trained[-1]):
            return self._result(body)
        if body.step != self.step + 1:
            raise Conflict(f"got step {body.step}, expected {self.step + 1}", code="out_of_order")
        self.step = body.step
        self.trained.append(body)
        return self._result(body)

    async def _forward(self, body: ForwardRequest) -> ForwardResult:
        """Gives each token of a longer answer less, by policy and reference."""
        await self._note("forward", body)
        lengths = [len(example.token_ids) for example in body.examples]
        return ForwardResult(
            logprobs=Logprobs([-0.5 * length for length in lengths for _ in range(length)]),
            reference_logprobs=Logprobs([-1.0 for length in lengths for _ in range(length)]),
        )

    async def _forward_backward(self, body: ForwardBackwardRequest) -> ForwardBackwardResult:
        await self._note("forward_backward", body)
        self._count_operation(body)
        num = sum(len(example.token_ids) for example in body.examples)
        return ForwardBackwardResult(
            step=body.step, loss=float(num), logprobs=Logprobs([-0.5] * num), train_s=0.0
        )

    async def _optim_step(self, body: OptimStepRequest) -> OptimStepResult:
        await self._note("optim_step", body)
        self._count_operation(body)
        return OptimStepResult(step=body.step, grad_norm=2.0, num_calls=1, train_s=0.0)

    def _count_operation(self, body: ForwardBackwardRequest | OptimStepRequest) -> None:
        """Counts the operation unless it is the last one again."""
        if self.job is None:
            raise StateLost(f"got job {body.job_id!r}, but no job is loaded; PUT /job first")
        plain = body.model_copy(update={"attempt": 0, "epoch": 0})
        if body.step == self.step and self.operations and plain == self.operations[-1]:
            return
        if body.step != self.step + 1:
            raise Conflict(f"got step {body.step}, expected {self.step + 1}", code="out_of_order")
        self.step = body.step
        self.operations = [*self.operations[: body.step - 1], plain]

    def _result(self, body: TrainStepRequest) -> StepResult:
        tokens = sum(len(example.token_ids) for example in body.examples)
        sampled = [
            logprob
            for example in body.examples
            for logprob, was_sampled in itertools.zip_longest(
                example.old_logprobs, example.sampled, fillvalue=1
            )
            if was_sampled
        ]
        return StepResult(
            step=body.step,
            skipped=body.step in self.skipped,
            loss=0.0,
            grad_norm=1.0,
            learning_rate=1e-3,
            num_examples=len(body.examples),
            num_tokens=tokens,
            train_s=0.0,
            metrics=self.trainer_metrics,
            logprobs=Logprobs([one + 0.01 for one in sampled]),
            entropies=Logprobs([0.25] * len(sampled)),
        )

    async def _publish(self, body: PublishRequest) -> WeightsRef:
        await self._note("publish", body)
        if body.version != self.step:
            raise Conflict(
                f"got version {body.version}, expected {self.step}, the last applied step",
                code="out_of_order",
            )
        where = WHERE.get(body.method, {"path": "/w"})
        return WeightsRef.model_validate(
            {
                **body.model_dump(exclude={"snapshot"}),
                **where,
                "digest": f"digest-{body.version}",
                "size_bytes": 1,
                "canary": Canary(token_ids=TokenIds((1, 2, 3)), logprobs=logprobs_of(body.version)),
            }
        )

    async def _checkpoint(self, body: CheckpointRequest) -> Checkpoint:
        await self._note("checkpoint", body)
        if body.step not in {self.step, *self.checkpointed}:
            raise Conflict(f"got step {body.step}, expected {self.step}", code="out_of_order")
        self.checkpointed.add(body.step)
        self.kept[body.step] = body.keep
        return self._answer("checkpoint", self._written(body.step, body.keep))

    def _written(self, step: int, keep: tuple[int, ...]) -> Checkpoint:
        assert self.job
        folder = checkpoints_dir(self._runs_dir, self.job.job_id)
        path_of(folder, step).mkdir(parents=True, exist_ok=True)
        remove_old(folder, self.job.job.checkpoints, keep)
        return Checkpoint(step=step, path=str(path_of(folder, step)), size_bytes=1)

    async def _score(self, body: ScoreRequest) -> ScoreResult:
        await self._note("score", body)
        parts = [self.grade(item) for item in body.items]
        return ScoreResult(
            scores=tuple(Score(value=part.value, parts={"right": part}) for part in parts)
        )

    async def _try(self, body: TryRequest) -> TriedRewards:
        await self._note("try", body)
        found = TriedReward(reward="exact_match", empty=0.0, reference=1.0, num_references=6)
        return self._answer("try", TriedRewards(rewards=(found,) * len(body.rewards)))

    async def _validate(self, body: ValidateRequest) -> Validated:
        await self._note("validate", body)
        if body.rewards[0].grader == "lenght":
            raise BadRequest("unknown grader 'lenght'; did you mean 'length'?")
        return Validated(rewards=tuple(reward.label for reward in body.rewards))


def _given(answer: str | Message) -> Rollout:
    """Returns the answer in a token for each of its letters."""
    ids = TokenIds([ord(letter) % 100 for letter in str(answer)])
    return Rollout(text=str(answer), token_ids=ids, finish_reason="stop")


def logprobs_of(version: int) -> Logprobs:
    """Returns what the "model" of a version gives the canary."""
    return Logprobs((-1.0, -0.1 * version))


def _same(one: TrainStepRequest, other: TrainStepRequest) -> bool:
    """Returns whether both train on the same; the caller does not count."""
    return (one.step, one.examples, one.totals) == (other.step, other.examples, other.totals)
