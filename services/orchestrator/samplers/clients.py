"""The clients of a job's trainer and of its reward service. Each call's deadline is a setting;
retries are the HTTP client's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from services.orchestrator.samplers.status import Caller, tracks_call
from services.orchestrator.samplers.transport import client_to
from shared.errors import HoneError
from shared.host import tracing
from shared.host.logs import get_logger
from shared.job import RewardSpec, SyncMethod
from shared.wire import (
    Checkpoint,
    CheckpointRequest,
    Example,
    Fenced,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardRequest,
    ForwardResult,
    Optimization,
    OptimStepRequest,
    OptimStepResult,
    Prompt,
    PublishRequest,
    Released,
    ReleaseRequest,
    Rollout,
    RolloutGroup,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    StepResult,
    StepTotals,
    TokenLoss,
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

MAX_PROMPTS_TRIED = 8
"""How many rows are looked at before a job begins: enough to see that a column is another one than
meant, and soon done."""

VALIDATE_DEADLINE_S = 60.0

TRY_DEADLINE_S = 30.0

RELEASE_S = 2.0
"""Seconds that the trainer has to hear that the job has left it."""

NOT_GRADED = Score(value=None, parts={})
"""The score of a rollout that went wrong."""

W = TypeVar("W", bound=BaseModel)


class TrainerClient:
    """A job's trainer. Once it has the job, `gpu` is the GPU that it sends weights from, and
    `memory_space` that GPU's (shared/weights/meeting.py). `free_gpu` makes samplers that share the
    GPU sleep; steps begin with it."""

    def __init__(self, caller: Caller, free_gpu: Callable[[], Awaitable[None]]) -> None:
        self.caller = caller
        self.client = client_to("trainer", caller.settings.trainer_url, caller)
        self.gpu: str | None = None
        self.memory_space: str | None = None
        self._free_gpu = free_gpu
        self._has_job = False

    @tracks_call("trainer", "loading the job")
    async def load_job(self) -> TrainerState:
        caller = self.caller
        body = TrainerJob(
            **caller.fence,
            job=caller.job,
            beside=caller.beside,
            weight=caller.weight,
            key=caller.key,
        )
        self._has_job = True
        deadline_s = caller.settings.operation_deadline_s
        state = await self.client.call("PUT", "/job", body, TrainerState, deadline_s=deadline_s)
        self.gpu, self.memory_space = state.gpu, state.memory_space
        return state

    async def state(self, deadline_s: float | None = None) -> TrainerState:
        deadline_s = self.caller.settings.patience_s if deadline_s is None else deadline_s
        return await self.client.get("/state", TrainerState, deadline_s=deadline_s, beside=True)

    @tracks_call("trainer", "training a step", "train")
    async def train_step(
        self, step: int, examples: tuple[Example, ...], totals: StepTotals
    ) -> StepResult:
        """Trains one step, while the samplers sleep if they share the trainer's GPU."""
        tracing.note(examples=len(examples))
        await self._free_gpu()
        body = TrainStepRequest(**self.caller.fence, step=step, examples=examples, totals=totals)
        return await self._post("/train_step", body, StepResult)

    @tracks_call("trainer", "computing log-probs", "forward")
    async def forward(self, step: int, examples: tuple[Example, ...]) -> ForwardResult:
        """Returns what the weights of the last applied step give the examples."""
        body = ForwardRequest(**self.caller.fence, step=step, examples=examples)
        return await self._post("/forward", body, ForwardResult)

    @tracks_call("trainer", "adding up a gradient", "forward_backward")
    async def forward_backward(
        self, step: int, examples: tuple[Example, ...], loss: TokenLoss
    ) -> ForwardBackwardResult:
        """Adds the gradient of the examples' loss, as operation `step`."""
        await self._free_gpu()
        body = ForwardBackwardRequest(**self.caller.fence, step=step, examples=examples, loss=loss)
        return await self._post("/forward_backward", body, ForwardBackwardResult)

    @tracks_call("trainer", "taking an optimizer step", "optim_step")
    async def optim_step(self, step: int, optimization: Optimization) -> OptimStepResult:
        """Changes the weights by the gradient so far, as operation `step`."""
        await self._free_gpu()
        body = OptimStepRequest(**self.caller.fence, step=step, optimization=optimization)
        return await self._post("/optim_step", body, OptimStepResult)

    @tracks_call("trainer", "publishing weights", "publish")
    async def publish_weights(
        self, version: int, method: SyncMethod, snapshot: int | None = None
    ) -> WeightsRef:
        tracing.note(version=version, weight_sync=method)
        body = PublishRequest(
            **self.caller.fence, version=version, method=method, snapshot=snapshot
        )
        deadline_s = self.caller.settings.short_deadline_s
        return await self._post("/publish_weights", body, WeightsRef, deadline_s)

    @tracks_call("trainer", "writing a checkpoint", "checkpoint")
    async def checkpoint(
        self, step: int, keep: tuple[int, ...] = (), patience_s: float | None = None
    ) -> Checkpoint:
        """Writes the step's checkpoint. Old ones are removed, except the steps `keep`. Waits
        `patience_s` seconds for a trainer that is unreachable or cannot write; None: as long as any
        call."""
        body = CheckpointRequest(**self.caller.fence, step=step, keep=keep)
        deadline_s = self.caller.settings.short_deadline_s
        return await self._post("/checkpoints", body, Checkpoint, deadline_s, patience_s)

    async def release(self) -> None:
        """Lets another orchestrator have the trainer, if it answers soon. Nothing depends on it: a
        trainer that hears nothing of its owner is free later."""
        if not self._has_job:
            return
        body = ReleaseRequest(**self.caller.fence)
        try:
            await self.client.call(
                "POST", "/release", body, Released, deadline_s=RELEASE_S, patience_s=0.0
            )
        except HoneError as error:
            job_id = self.caller.job_id
            get_logger().warning("trainer not released", job=job_id, reason=error.detail)

    async def _post(
        self,
        path: str,
        body: Fenced,
        answer: type[W],
        deadline_s: float | None = None,
        patience_s: float | None = None,
    ) -> W:
        """Returns the answer to a command, which may wait for one of each other job that shares the
        trainer. Without `deadline_s` it is `HONE_OPERATION_DEADLINE_S`."""
        settings = self.caller.settings
        others = settings.places - 1 if self.caller.job.shares_as else 0
        deadline_s = deadline_s or settings.operation_deadline_s
        deadline_s += others * settings.operation_deadline_s
        return await self.client.call(
            "POST", path, body, answer, deadline_s=deadline_s, patience_s=patience_s
        )


class RewardClient:
    """The reward service of a job. Grading waits `patience_s` seconds for a service that is
    unreachable; None: as long as any call."""

    def __init__(self, caller: Caller, patience_s: float | None = None) -> None:
        self.caller = caller
        self.client = client_to("reward", caller.settings.reward_url, caller)
        self._patience_s = patience_s

    @tracks_call("reward", "grading a group", "grade")
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
        if not self.caller.job.rewards:
            nothing = Score(value=0.0, parts={})
            return tuple(NOT_GRADED if one.went_wrong else nothing for one in group.rollouts)
        body = ScoreRequest(items=items, rewards=self.caller.job.rewards, job_id=job_id)
        result = await self.client.call(
            "POST",
            "/score",
            body,
            ScoreResult,
            deadline_s=self.caller.settings.short_deadline_s,
            patience_s=self._patience_s,
        )
        scores = iter(result.scores)
        return tuple(
            NOT_GRADED if rollout.went_wrong else next(scores) for rollout in group.rollouts
        )

    @tracks_call("reward", "checking the rewards")
    async def validate(self, columns: tuple[str, ...], prompts: tuple[Prompt, ...] = ()) -> None:
        """Raises BadRequest where the rewards would not work on rows with these columns, or on one
        of the first few `prompts`."""
        job = self.caller.job
        if not job.rewards:
            return
        given = ("environments",) if job.environment and job.environment.kind == "class" else ()
        body = ValidateRequest(
            rewards=job.rewards, columns=(*columns, *given), prompts=prompts[:MAX_PROMPTS_TRIED]
        )
        await self.client.call(
            "POST", "/graders/validate", body, Validated, deadline_s=VALIDATE_DEADLINE_S
        )

    async def try_rewards(self, prompts: tuple[Prompt, ...]) -> Trial | None:
        """Returns what the rewards give empty completions and reference answers of the first few
        `prompts`, or why the service does not say so soon: nothing depends on it. None without
        prompts or rewards."""
        shown = prompts[:MAX_PROMPTS_TRIED]
        if not shown or not self.caller.job.rewards:
            return None
        body = TryRequest(rewards=self.caller.job.rewards, prompts=shown)
        try:
            tried = await self.client.call(
                "POST", "/graders/try", body, TriedRewards, deadline_s=TRY_DEADLINE_S
            )
        except HoneError as error:
            get_logger().warning("rewards not tried", job=self.caller.job_id, reason=error.detail)
            return Trial(f"rewards not tried: {error.detail}", ())
        return trial(self.caller.job.rewards, tried.rewards, len(shown))


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


# --- rewards tried --------------------------------------------------------------------------------

# A job's rewards are tried on known completions, and the values are reported as sentences. So a
# silently wrong reward is seen before training.

NEARLY = 0.995
"""From here on a mean shows as 1.00, though not all references have the full mark."""

LIKELY = {
    "math": "likely another column has the answer, or it is neither a number nor a formula",
    "exact_match": "likely another column has the answer",
    "python_value": "likely another column has the value",
    "code_tests": "likely the tests are of another function, or the answer is more than a program",
    "function": "likely your function looks at another column, or expects another form of answer",
}


@dataclass(frozen=True)
class Trial:
    """`summary` says which values were given, and `warnings` what is probably wrong."""

    summary: str
    warnings: tuple[str, ...]


def trial(rewards: Sequence[RewardSpec], tried: Sequence[TriedReward], num_rows: int) -> Trial:
    """Returns the rewards' values for empty completions and reference answers of `num_rows`
    rows."""
    told = "; ".join(map(_told, tried))
    pairs = zip(rewards, tried, strict=True)
    warnings = [_warning(spec, found) for spec, found in pairs if spec.weight > 0]
    return Trial(f"rewards tried on {num_rows} rows: {told}", tuple(filter(None, warnings)))


def _told(found: TriedReward) -> str:
    if found.empty is None and found.reference is None:
        return f"{found.reward}: nothing ({found.why or 'it does not apply'})"
    references = (
        f"reference answers earn {_shown(found.reference)}, "
        if found.num_references
        else "no reference answers to try, "
    )
    return f"{found.reward}: {references}empty completions earn {_shown(found.empty)}"


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.2f}"


def _warning(spec: RewardSpec, found: TriedReward) -> str | None:
    """Returns what is probably wrong with a reward; None if it tells answers apart."""
    name, why = f"reward {found.reward!r}", f" ({found.why})" if found.why else ""
    likely = LIKELY.get(spec.grader, "likely it looks at another column than is meant")
    if found.num_failed:
        failed = f"failed on {found.num_failed} of the completions that it was tried on"
        return f"{name} {failed}: {found.failure}"
    if found.num_references:
        if found.reference is None:
            return f"{name} gives the rows' own reference answers nothing{why}"
        if found.full_mark is not None and found.reference < NEARLY * found.full_mark:
            return (
                f"{name} gives the rows' own reference answers {found.reference:.2f} of "
                f"{found.full_mark:g}{why}: {likely}"
            )
        if found.empty is not None and found.empty >= found.reference and not spec.shaping:
            return (
                f"{name} gives an empty completion {found.empty:.2f} and the reference answer "
                f"{found.reference:.2f}: it does not tell them apart; {likely}"
            )
    elif found.full_mark is not None and found.empty is not None and found.empty >= found.full_mark:
        return f"{name} gives an empty completion the full mark{why}: {likely}"
    return None
