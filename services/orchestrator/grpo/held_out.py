"""Held-out accuracy: scores on problems that are never trained on, by the job's rewards. Of the
policy between steps, and of each model of a job of 0 steps (comparison.py)."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.orchestrator.grpo.estimates import estimate, means, of_all, problem_metrics
from services.orchestrator.grpo.groups import is_graded, sample_group
from services.orchestrator.grpo.prompts import group_seed
from services.orchestrator.samplers.services import Services
from services.orchestrator.tasks import all_of
from shared.job import Job
from shared.wire import GradedRollout, Message, Prompt, Sampling, Score, ScoredGroup

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
    """What remains of a problem's graded completions. The tokens of a large set would fill the
    memory."""

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
        means(of_all(problems))
        | _interval(problems)
        | {
            "missing_rewards": statistics.fmean(missing),
            "errored_rollouts": statistics.fmean(not is_graded(score) for score in scores),
        }
    )


def _interval(problems: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the 95 % confidence interval of the mean reward; empty if the problems show none."""
    rewards = [metrics["reward"] for metrics in problems if "reward" in metrics]
    found = estimate(rewards) if rewards else None
    if found is None or found.low is None or found.high is None:
        return {}
    return {LOW: found.low, HIGH: found.high}


def ignored(metrics: Mapping[str, float], names: Iterable[str], limit: float) -> dict[str, float]:
    """Returns the metric "ignored" for each held-out set with more than a share of `limit` of its
    completions without a reward. Its value is that share."""
    found: dict[str, float] = {}
    for name in names:
        prefix = metric_prefix(name)
        share = metrics[prefix + "missing_rewards"] + metrics[prefix + "errored_rollouts"]
        if share > limit:
            found[prefix + IGNORED] = share
    return found


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
    room = asyncio.Semaphore(MAX_PROMPTS)

    async def grade(prompt: Prompt, position: int) -> Answers:
        key = ":".join(map(str, (services.owner, *place, version, position)))
        seed = group_seed(job, *place, position, prompt.index)
        seeded = sampling.model_copy(update={"seed": seed})
        async with room:
            group = await sample_group(services, job, prompt, version, key=key, sampling=seeded)
            scores = await services.score(prompt, group, job_id=services.job_id)
        done()
        scored = ScoredGroup(prompt=prompt, group=group, scores=scores)
        stored = _to_store(scored) if position < STORED_PROBLEMS else ()
        return Answers(scores, problem_metrics(scored, job), stored)

    return await all_of(grade(prompt, position) for position, prompt in enumerate(prompts))


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
    room = STORED_CHARS
    for message in reversed(content):
        text = message.get("content")
        text = text if isinstance(text, str) else ""
        whole = message | {"content": ""} if text else message
        room -= len(str(whole))
        if room <= 0:
            break
        kept.append(whole | {"content": text[:room]} if text else whole)
        room -= len(text)
    return tuple(reversed(kept))
