"""Plays the conversations of a prompt's group. All are one `RolloutGroup`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from services.orchestrator.extensions.environments.conversation import Conversation, after
from services.orchestrator.samplers.services import Services
from services.orchestrator.seams import Player
from services.orchestrator.tasks import all_of
from shared.job import Job
from shared.wire import Prompt, RolloutGroup, Sampling, TokenIds


async def play_group(
    players: Mapping[str, Player],
    services: Services,
    job: Job,
    prompt: Prompt,
    min_version: int,
    key: str,
    sampling: Sampling,
) -> RolloutGroup:
    """Returns the group of `sampling.n` conversations, each by the player of the environment's
    kind."""
    assert job.environment is not None
    play = players[job.environment.kind]
    played = await all_of(
        play(services, job, prompt, min_version, f"{key}:{number}", _nth(sampling, number))
        for number in range(sampling.n)
    )
    return joined(played)


async def converse(
    services: Services, job: Job, prompt: Prompt, min_version: int, key: str, sampling: Sampling
) -> RolloutGroup:
    """Returns one conversation with an environment, as a group of one."""
    return await Conversation(services, job, prompt, min_version, key, sampling).play()


PLAYERS: dict[str, Player] = {"class": converse, "tools": converse, "openenv": converse}


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
