"""Held-out accuracy: what the policy gets on problems that are never trained on, by the job's own
rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.orchestrator.loop.estimates import means, problem_metrics
from services.orchestrator.loop.groups import GradedGroup
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.seeds import group_seed
from services.orchestrator.loop.tasks import all_of
from services.orchestrator.record.telemetry import reward_metrics
from shared.job import Job
from shared.wire import Prompt, Sampling, Score

MAX_PROMPTS = 64
"""Held-out prompts that are sampled or graded at a time. A GPU has enough to do with that many, and
groups of the next step need not wait for all of them."""

SHARES = ("missing_rewards", "errored_rollouts")
"""Metrics of training that are of completions, and not of problems."""


@dataclass(frozen=True)
class Answers:
    """What is left of a problem's completions once they are graded: the tokens of all of a large
    set would fill the memory."""

    scores: tuple[Score, ...]
    metrics: dict[str, float]


async def evaluate(
    job: Job, held_out: Mapping[str, Sequence[Prompt]], peers: Peers, version: int
) -> dict[str, float]:
    """Returns `eval/reward`, `eval/pass@1` and so on of each held-out set, those of a set with a
    name as `eval/<name>/reward`, sampled by weights of at least `version`; empty without sets."""
    metrics: dict[str, float] = {}
    for name, prompts in held_out.items():
        answers_P = await sample_held_out(
            job, name, prompts, peers, version, cache_for=peers.job_id
        )
        prefix = f"eval/{name}/" if name else "eval/"
        found = set_metrics(answers_P, job).items()
        metrics |= {prefix + metric: value for metric, value in found}
    return metrics


def set_metrics(answers_P: Sequence[Answers], job: Job) -> dict[str, float]:
    """Returns the metrics of one held-out set: means over its problems, and what of its completions
    could not be graded."""
    of_rewards = reward_metrics([answers.scores for answers in answers_P], job)
    kept = {
        name: value
        for name, value in of_rewards.items()
        if name in SHARES or name.startswith("rewards/")
    }
    return means([answers.metrics for answers in answers_P]) | kept


async def sample_held_out(
    job: Job,
    name: str,
    prompts: Sequence[Prompt],
    peers: Peers,
    version: int,
    *,
    cache_for: str | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Answers]:
    """Returns what each problem `[P]` of the held-out set `name` was answered, by weights of at
    least `version`. Verdicts are cached in the run folder of `cache_for`, if given. `done` is
    called after each problem."""
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
        key = ":".join(map(str, (peers.owner, *place, version, position)))
        seed = group_seed(job, *place, position, prompt.index)
        seeded = sampling.model_copy(update={"seed": seed})
        async with room:
            group = await peers.generate(prompt, version, key=key, sampling=seeded)
            scores = await peers.score(prompt, group, job_id=cache_for)
        done()
        return Answers(scores, problem_metrics(GradedGroup(prompt, group, scores), job))

    return await all_of(grade(prompt, position) for position, prompt in enumerate(prompts))
