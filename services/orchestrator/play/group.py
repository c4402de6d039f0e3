"""How a prompt's group comes to be: completions of one turn, or, with `[environment]`,
conversations, played as its kind says. All are a `RolloutGroup`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from services.orchestrator.play import agents
from services.orchestrator.play.conversation import ENVIRONMENT_FAILED, Conversation, after
from services.orchestrator.pool.services import Services
from services.orchestrator.tasks import all_of
from shared.job import Job
from shared.wire import Prompt, RolloutGroup, Sampling, TokenIds


async def sample_group(
    services: Services,
    job: Job,
    prompt: Prompt,
    min_version: int,
    *,
    key: str,
    seed: int | None = None,
    sampling: Sampling | None = None,
) -> RolloutGroup:
    """Returns the prompt's group, by weights of at least `min_version`. `sampling` is by default
    the job's, with `seed`. Requests under the same `key` happen once."""
    if job.environment is None or job.is_pushed:
        return await services.generate(prompt, min_version, key=key, seed=seed, sampling=sampling)
    chosen, play = sampling or services.sampling(seed), PLAYERS[job.environment.kind]
    played = await all_of(
        play(services, job, prompt, min_version, f"{key}:{number}", _nth(chosen, number))
        for number in range(chosen.n)
    )
    return joined(played)


async def _converse(
    services: Services, job: Job, prompt: Prompt, min_version: int, key: str, sampling: Sampling
) -> RolloutGroup:
    return await Conversation(services, job, prompt, min_version, key, sampling).play()


Player = Callable[[Services, Job, Prompt, int, str, Sampling], Coroutine[Any, Any, RolloutGroup]]

PLAYERS: dict[str, Player] = {
    "class": _converse,
    "tools": _converse,
    "openenv": _converse,
    "worker": agents.play,
}
"""How one rollout of a kind of environment is played."""


def environment_failed(group: RolloutGroup) -> bool:
    """Returns whether a rollout of the group has no reward because its environment failed."""
    return any(ENVIRONMENT_FAILED in rollout.info for rollout in group.rollouts)


def _nth(sampling: Sampling, number: int) -> Sampling:
    seed = None if sampling.seed is None else sampling.seed + number
    return sampling.model_copy(update={"n": 1, "seed": seed})


def _are_equal(ids: tuple[int, ...]) -> bool:
    return len(set(ids)) == 1


def joined(played: list[RolloutGroup]) -> RolloutGroup:
    """Returns one group of groups of one. Its prompt is what all prompts begin with; what differs,
    such as what each environment said first, begins the rollouts as tokens that no one sampled."""
    whole = [group for group in played if not group.rollouts[0].went_wrong]
    prompts = [list(group.prompt_token_ids) for group in whole] or [[]]
    shared = [ids[0] for ids in itertools.takewhile(_are_equal, zip(*prompts, strict=False))]
    rollouts = tuple(
        after(group, len(shared)) if group in whole else group.rollouts[0] for group in played
    )
    return RolloutGroup(
        prompt_token_ids=TokenIds(shared),
        rollouts=rollouts,
        replica=next((group.replica for group in whole), played[0].replica),
        overlong=any(group.overlong for group in played),
    )
