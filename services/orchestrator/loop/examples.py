"""From scored rollouts to what the trainer eats."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.loop.advantages import Advantages
from shared.wire import Example, RolloutGroup


def to_examples(groups_P: Sequence[RolloutGroup], advantages_PG: Advantages) -> tuple[Example, ...]:
    """Returns an example for each rollout that has an advantage and tokens, with the sampler's
    token ids and log-probs as they came."""
    return tuple(
        Example(
            prompt_token_ids=group.prompt_token_ids,
            token_ids=rollout.token_ids,
            old_logprobs=rollout.logprobs,
            advantage=advantage,
        )
        for group, advantages_G in zip(groups_P, advantages_PG, strict=True)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True)
        if advantage is not None and rollout.token_ids
    )
