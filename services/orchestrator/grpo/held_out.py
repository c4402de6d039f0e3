"""Held-out accuracy: scores on problems that are never trained on, by the job's rewards. The policy
is evaluated between steps. A job of 0 steps evaluates each of its models (`Comparison`): the
samplers load one model after the other, and each answers the same problems with the same seeds.
Jobs that learn from given answers have the loss of the trainer's weights on held-out answers
instead, which needs no sampler.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.orchestrator.data.choosing import BadRow
from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.grpo.advantages import Advantages
from services.orchestrator.grpo.estimates import (
    differences,
    drop_partial_pass_at_k,
    estimate,
    estimates,
    means,
    problem_metrics,
)
from services.orchestrator.grpo.examples import to_examples
from services.orchestrator.grpo.groups import MAX_MISSING, is_graded, sample_group
from services.orchestrator.grpo.prompts import HeldOut, group_seed
from services.orchestrator.grpo.supervised import SFTExample, add_sft_advantages, sft_examples
from services.orchestrator.samplers.services import Services
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.leases import Journal
from services.orchestrator.tasks import gather_all, write_despite_cancel
from shared.job import EvaluatedModel, Job
from shared.wire import (
    EvaluationReport,
    Example,
    GradedRollout,
    Message,
    ModelScores,
    Prompt,
    RolloutGroup,
    Sampling,
    Score,
    ScoredGroup,
    SetReport,
    Wire,
)

MAX_PROMPTS = 64
"""Held-out prompts that are sampled or graded at a time: enough to keep a GPU busy, and few enough
that groups of the next step need not wait for all."""

IGNORED = "ignored"
"""The metric that marks a held-out set as ignored, because too many of its completions have no
reward. It is their share."""


LOW, HIGH = "reward_low", "reward_high"
"""The metrics of a held-out set that bound its mean reward, with 95 % confidence."""

STORED_PROBLEMS, STORED_SAMPLES, STORED_CHARS = 64, 2, 20_000
"""Bounds of what is stored of an evaluation for people to read: its first problems, completions of
each, and characters of a completion and of a prompt."""


@dataclass(frozen=True)
class Answers:
    """The part of a problem's graded completions that is kept: the tokens of a large set would fill
    the memory."""

    scores: tuple[Score, ...]
    metrics: dict[str, float]
    stored: tuple[GradedRollout, ...] = ()


def metric_prefix(name: str) -> str:
    """Returns the beginning of the metrics of a held-out set: "eval/" of `data.eval`, which is
    named ""; "eval/<name>/" of a set with a name."""
    return f"eval/{name}/" if name else "eval/"


def prefixed_metrics(name: str, answers_P: Sequence[Answers]) -> dict[str, float]:
    """Returns `eval/reward`, `eval/pass@1` and so on of the answers to a held-out set;
    `eval/<name>/reward` of a set with a name."""
    prefix = metric_prefix(name)
    return {prefix + metric: value for metric, value in set_metrics(answers_P).items()}


def set_metrics(answers_P: Sequence[Answers]) -> dict[str, float]:
    """Returns the metrics of one held-out set: means over its problems, the confidence interval of
    the reward, and the shares of completions that went wrong or got no reward."""
    scores = [score for answers in answers_P for score in answers.scores]
    missing = [is_graded(score) and score.value is None for score in scores]
    problems = [answers.metrics for answers in answers_P]
    return (
        means(drop_partial_pass_at_k(problems))
        | _interval(problems)
        | {
            "missing_rewards": statistics.fmean(missing),
            "errored_rollouts": statistics.fmean(not is_graded(score) for score in scores),
        }
    )


def _interval(problems: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the 95 % confidence interval of the mean reward; empty if there is none."""
    rewards = [metrics["reward"] for metrics in problems if "reward" in metrics]
    mean = estimate(rewards) if rewards else None
    if mean is None or mean.low is None or mean.high is None:
        return {}
    return {LOW: mean.low, HIGH: mean.high}


def ignored_metrics(metrics: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Returns the metric "ignored" for each held-out set with more than a share of MAX_MISSING of
    its completions without a reward. Its value is that share."""
    ignored: dict[str, float] = {}
    for name in names:
        prefix = metric_prefix(name)
        share = metrics[prefix + "missing_rewards"] + metrics[prefix + "errored_rollouts"]
        if share > MAX_MISSING:
            ignored[prefix + IGNORED] = share
    return ignored


async def sample_held_out(
    job: Job,
    name: str,
    prompts: Sequence[Prompt],
    services: Services,
    version: int,
    *,
    done: Callable[[], None] = lambda: None,
) -> list[Answers]:
    """Returns the answers to each problem `[P]` of the held-out set `name`, by weights of at least
    `version`. Verdicts are cached in the job's run folder. `done` is called after each problem."""
    spec = job.evaluation
    sampling = Sampling(
        n=spec.samples,
        max_tokens=spec.max_tokens or job.sampling.max_tokens,
        temperature=spec.temperature,
        stop=job.sampling.stop,
        stop_token_ids=job.sampling.stop_token_ids,
    )
    place = ("eval", name) if name else ("eval",)
    at_once = asyncio.Semaphore(MAX_PROMPTS)

    async def grade(prompt: Prompt, position: int) -> Answers:
        key = ":".join(map(str, (services.caller.owner, *place, version, position)))
        seed = group_seed(job, *place, position, prompt.index)
        seeded = sampling.model_copy(update={"seed": seed})
        async with at_once:
            group = await sample_group(services, job, prompt, version, key=key, sampling=seeded)
            scores = await services.reward.score(prompt, group, job_id=services.caller.job_id)
        done()
        scored = ScoredGroup(prompt=prompt, group=group, scores=scores)
        stored = _to_store(scored) if position < STORED_PROBLEMS else ()
        return Answers(scores, problem_metrics(scored, job), stored)

    return await gather_all(grade(prompt, position) for position, prompt in enumerate(prompts))


def _to_store(scored: ScoredGroup) -> tuple[GradedRollout, ...]:
    """Returns the first completions of a problem with their verdicts."""
    prompt = bounded_prompt(scored.prompt.content)
    pairs = zip(scored.group.rollouts[:STORED_SAMPLES], scored.scores, strict=False)
    return tuple(
        GradedRollout(
            prompt_index=scored.prompt.index,
            prompt=prompt,
            completion=rollout.text[:STORED_CHARS],
            finish_reason=rollout.finish_reason,
            versions=rollout.versions,
            reward=score.value,
            parts=score.parts,
            advantage=None,
        )
        for rollout, score in pairs
    )


def bounded_prompt(content: str | tuple[Message, ...]) -> str | tuple[Message, ...]:
    """Returns at most `STORED_CHARS` characters of a prompt: the beginning of a text, or the last
    messages of a chat, of which the first may be cut."""
    if isinstance(content, str):
        return content[:STORED_CHARS]
    kept: list[Message] = []
    num_left = STORED_CHARS
    for message in reversed(content):
        text = message.get("content")
        text = text if isinstance(text, str) else ""
        whole = message | {"content": ""} if text else message
        num_left -= len(str(whole))
        if num_left <= 0:
            break
        kept.append(whole | {"content": text[:num_left]} if text else whole)
        num_left -= len(text)
    return tuple(reversed(kept))


# --- the loss on given answers --------------------------------------------------------------------

EXAMPLES_AT_ONCE = 512
"""Examples of a request to the trainer: some megabytes."""


def held_out_sft_examples(job: Job, held_out: HeldOut) -> list[SFTExample]:
    """Returns the SFT examples of a held-out set; none if the job grades completions and some row
    has no answer. Raises BadRow for a row without an answer in a job that grades nothing. Rendering
    the templates may take long: call it off the event loop."""
    try:
        return sft_examples(held_out.prompts(), job, held_out.where)
    except BadRow:
        if job.rewards:
            return []
        raise


async def losses(
    job: Job, sft_examples_by_set: Mapping[str, Sequence[SFTExample]], services: Services, step: int
) -> dict[str, float]:
    """Returns `eval/loss` of each held-out set (`eval/<name>/loss` for a named set) by the weights
    of the last applied step, and for preferences also `rewards/margins` and `rewards/accuracies`. A
    set without any answer that fits the model has no metrics."""
    metrics: dict[str, float] = {}
    for name, set_examples in sft_examples_by_set.items():
        prefix = metric_prefix(name)
        examples = await _examples(job, name, set_examples, services)
        if examples:
            of_set = await _losses(job, examples, services, step)
            metrics |= {prefix + metric: value for metric, value in of_set.items()}
    return metrics


async def _examples(
    job: Job, name: str, set_examples: Sequence[SFTExample], services: Services
) -> tuple[Example, ...]:
    async def group_of(position: int, example: SFTExample) -> RolloutGroup:
        key = f"{services.caller.owner}:eval:{name}:given:{position}"
        return add_sft_advantages(
            await services.samplers.read(example.prompt, example.answers, key=key), job
        )

    groups = await gather_all(
        group_of(position, example) for position, example in enumerate(set_examples)
    )
    whole = [group for group in groups if not any(one.went_wrong for one in group.rollouts)]
    advantages: Advantages = [[one.advantages[0] for one in group.rollouts] for group in whole]
    return to_examples(whole, advantages)


async def _losses(
    job: Job, examples: tuple[Example, ...], services: Services, step: int
) -> dict[str, float]:
    sums: list[tuple[float, float, int]] = []
    for start in range(0, len(examples), EXAMPLES_AT_ONCE):
        several = examples[start : start + EXAMPLES_AT_ONCE]
        result = await services.trainer.forward(step, several)
        at = 0
        for example in several:
            end = at + len(example.token_ids)
            of_example = math.fsum(result.logprobs[at:end])
            sums.append((of_example, math.fsum(result.reference_logprobs[at:end]), end - at))
            at = end
    if job.training.objective == "dpo":
        return _preferences(sums, job.training.dpo_beta)
    num_tokens = sum(length for _, _, length in sums)
    return {"loss": -math.fsum(logprob for logprob, _, _ in sums) / num_tokens}


def _preferences(sums: Sequence[tuple[float, float, int]], dpo_beta: float) -> dict[str, float]:
    """Returns the metrics of pairs, from the log-probs of each answer by policy and reference:
    services/trainer/learning/correction.py has the formulas."""
    rewards = [dpo_beta * (logprob - reference) for logprob, reference, _ in sums]
    margins = [
        chosen - rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)
    ]
    # -log sigmoid(m) = log(1 + e^-m), without overflow
    losses = [max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in margins]
    return {
        "loss": statistics.fmean(losses),
        "rewards/margins": statistics.fmean(margins),
        "rewards/accuracies": statistics.fmean(m > 0 for m in margins),
    }


# --- models compared: a job of 0 steps ------------------------------------------------------------

ASKED = {"num_prompts", "samples", "temperature", "max_tokens", "pass_reward"}
"""Keys of `[evaluation]` that decide the scores. A paused job may continue with other values."""


class Scores(Wire):
    """The scores of a model on a held-out set, as they are stored: the metrics of each problem
    `[P]`, and the shares of completions that are left out of them. `key` is the digest of all that
    decides the scores."""

    key: str
    model: str
    set: str
    problems: tuple[dict[str, float], ...]
    missing_rewards: float
    errored_rollouts: float

    @property
    def has_any(self) -> bool:
        """Whether any completion was sampled and graded."""
        return any("reward" in metrics for metrics in self.problems)


@dataclass
class Comparison:
    """The comparison in one attempt at the job. Call `begin` first; then `evaluate` what is `next`,
    until that is None."""

    job: Job
    sets: Sequence[HeldOut]
    services: Services
    folder: RunFolder
    journal: Journal
    _found: dict[str, Scores] = field(default_factory=dict[str, Scores], init=False)
    _prompts: dict[str, tuple[Prompt, ...]] = field(
        default_factory=dict[str, tuple[Prompt, ...]], init=False
    )
    _loaded: EvaluatedModel | None = field(default=None, init=False)

    async def begin(self) -> int:
        """Reads the scores that earlier attempts stored, and returns their number."""
        rows = await asyncio.to_thread(self.folder.scores)
        stored = [Scores.model_validate(row, extra="ignore") for row in rows]
        self._found = {scores.key: scores for scores in stored}
        return len(self._found)

    @property
    def next(self) -> tuple[EvaluatedModel, HeldOut] | None:
        """The next model and the held-out set on which its scores are not known; None: all are."""
        pairs = itertools.product(self.job.evaluated_models, self.sets)
        return next((pair for pair in pairs if self._key(*pair) not in self._found), None)

    async def evaluate(self, model: EvaluatedModel, held_out: HeldOut) -> None:
        """Samples and grades the set's problems with the model, and stores its scores."""
        await self._load(model)
        name = held_out.name
        if name not in self._prompts:
            with self.services.status.on("data", "reading the prompts"):
                self._prompts[name] = await asyncio.to_thread(held_out.prompts)
        known = (each for each in self.sets if self._key(model, each) in self._found)
        num_known, num_done = sum(len(each.problems) for each in known), itertools.count()
        total = sum(len(each.problems) for each in self.sets)

        def tell() -> None:
            done = f"{num_known + next(num_done)} of {total} problems"
            self.services.status.begin(f"evaluating {self._named(model)}: {done}")

        tell()
        sampling = self.job.sampling.model_copy(update={"repeatable": True})
        seeded = self.job.model_copy(update={"sampling": sampling})  # so only the model differs
        answers_P = await sample_held_out(
            seeded, name, self._prompts[name], self.services, 0, done=tell
        )
        scores = _scores(self._key(model, held_out), model.label, name, answers_P)
        if scores.has_any:  # without any, a later attempt tries again
            stored = [rollout for answers in answers_P for rollout in answers.stored]
            number = self.job.evaluated_models.index(model)
            await write_despite_cancel(self.folder.write_held_out, name, number, stored)
            await write_despite_cancel(self.folder.append_scores, scores.model_dump())
        self._found[scores.key] = scores
        await self.journal.evaluated(model.label, name, set_metrics(answers_P))

    def report(self) -> EvaluationReport:
        """Returns the report, once all scores are known. Raises OperatorActionNeeded if no model
        has any score on a set."""
        return EvaluationReport(
            id=self.services.caller.job_id,
            temperature=self.job.evaluation.temperature,
            seed=self.job.seed,
            dtype=", ".join(sorted({each.dtype for each in self.services.samplers.pool.up()})),
            sets=tuple(self._of_set(held_out) for held_out in self.sets),
        )

    def _of_set(self, held_out: HeldOut) -> SetReport:
        models = self.job.evaluated_models
        scores_M = [self._found[self._key(model, held_out)] for model in models]
        if not any(scores.has_any for scores in scores_M):
            raise OperatorActionNeeded(
                f"no completion on {held_out.where} could be sampled and graded; look into the "
                "logs of the samplers and of the reward service"
            )
        first = scores_M[0].problems
        reports = (
            ModelScores(
                name=model.label,
                metrics=estimates(scores.problems),
                differences=differences(scores.problems, first) if number else {},
                missing_rewards=scores.missing_rewards,
                errored_rollouts=scores.errored_rollouts,
            )
            for number, (model, scores) in enumerate(zip(models, scores_M, strict=True))
        )
        return SetReport(
            name=held_out.name,
            source=held_out.where,
            num_problems=len(held_out.problems),
            num_samples=self.job.evaluation.samples,
            models=tuple(reports),
        )

    async def _load(self, model: EvaluatedModel) -> None:
        if self._loaded == model:
            return
        self.services.status.begin(f"loading {self._named(model)} into the samplers")
        await self.journal.log(f"loading {self._named(model)} into the samplers")
        self.services.new_epoch()
        await self.services.samplers.serve_own_weights(model)
        self._loaded = model

    def _named(self, model: EvaluatedModel) -> str:
        models = self.job.evaluated_models
        return f"{model.label} ({models.index(model) + 1} of {len(models)})"

    def _key(self, model: EvaluatedModel, held_out: HeldOut) -> str:
        """Returns a digest of everything that decides the scores and may differ between the models
        and attempts of this job."""
        spec = self.job.evaluation
        of_set = spec.sets.get(held_out.name)
        decisive = (
            model.model,
            model.revision,
            held_out.name,
            spec.model_dump(mode="json", include=ASKED),
            of_set.model_dump(mode="json") if of_set else None,
        )
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def _scores(key: str, model: str, name: str, answers_P: Sequence[Answers]) -> Scores:
    metrics = set_metrics(answers_P)
    return Scores(
        key=key,
        model=model,
        set=name,
        problems=tuple(drop_partial_pass_at_k([answers.metrics for answers in answers_P])),
        missing_rewards=metrics["missing_rewards"],
        errored_rollouts=metrics["errored_rollouts"],
    )
