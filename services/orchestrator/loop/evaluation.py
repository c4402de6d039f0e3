"""Held-out accuracy: the mean reward of problems that are never trained on, by the job's own
rewards."""

from __future__ import annotations

import asyncio

from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.seeds import group_seed
from services.orchestrator.loop.tasks import all_of
from services.orchestrator.record.telemetry import reward_metrics
from shared.job import Job
from shared.wire import Prompt, Sampling, Score

MAX_PROMPTS = 64
"""Held-out prompts that are sampled or graded at a time. A GPU has enough to do with that many, and
groups of the next step need not wait for all of them."""


async def evaluate(
    job: Job, prompts: tuple[Prompt, ...], peers: Peers, version: int
) -> dict[str, float]:
    """Returns `eval/reward` and the other reward metrics over `prompts`, sampled by weights of at
    least `version`; empty without prompts."""
    if not prompts:
        return {}
    spec = job.evaluation
    sampling = Sampling(
        n=spec.samples,
        max_tokens=spec.max_tokens or job.sampling.max_tokens,
        temperature=spec.temperature,
        stop=job.sampling.stop,
        stop_token_ids=job.sampling.stop_token_ids,
    )

    room = asyncio.Semaphore(MAX_PROMPTS)

    async def grade(prompt: Prompt, position: int) -> tuple[Score, ...]:
        key = f"{peers.owner}:eval:{version}:{position}"
        seed = group_seed(job, "eval", position, prompt.index)
        seeded = sampling.model_copy(update={"seed": seed})
        async with room:
            group = await peers.generate(prompt, version, key=key, sampling=seeded)
            return await peers.score(prompt, group, job_id=peers.job_id)

    scores_PG = await all_of(grade(prompt, position) for position, prompt in enumerate(prompts))
    metrics = reward_metrics(scores_PG, job)
    kept = ("reward", "missing_rewards", "errored_rollouts")
    return {
        f"eval/{name}": value
        for name, value in metrics.items()
        if name in kept or name.startswith("rewards/")
    }
