"""The loss on answers of held-out problems, which are never trained on: of jobs that learn from
given answers. The weights are the trainer's; no sampler needs them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from services.orchestrator.data.choosing import BadRow
from services.orchestrator.grpo.advantages import Advantages
from services.orchestrator.grpo.examples import to_examples
from services.orchestrator.grpo.held_out import metric_prefix
from services.orchestrator.grpo.prompts import HeldOut
from services.orchestrator.grpo.supervised import Lesson, learned, lessons
from services.orchestrator.samplers.services import Services
from services.orchestrator.tasks import all_of
from shared.job import Job
from shared.wire import Example, RolloutGroup

EXAMPLES_AT_ONCE = 512
"""Examples of a request to the trainer: some megabytes."""


def lessons_of(job: Job, held_out: HeldOut) -> list[Lesson]:
    """Returns the lessons of a held-out set; none if the job grades completions and not every row
    has an answer. Raises BadRow for a row without one in a job that grades nothing. Takes as long
    as the templates."""
    try:
        return lessons(held_out.prompts(), job, held_out.where)
    except BadRow:
        if job.rewards:
            return []
        raise


async def losses(
    job: Job, lessons_of_sets: Mapping[str, Sequence[Lesson]], services: Services, step: int
) -> dict[str, float]:
    """Returns `eval/loss` of each held-out set (`eval/<name>/loss` for a named set) by the weights
    of the last applied step, and of preferences also `rewards/margins` and `rewards/accuracies`. A
    set without an answer that the model can take has none."""
    metrics: dict[str, float] = {}
    for name, found in lessons_of_sets.items():
        prefix = metric_prefix(name)
        examples = await _examples(job, name, found, services)
        if examples:
            of_set = await _losses(job, examples, services, step)
            metrics |= {prefix + metric: value for metric, value in of_set.items()}
    return metrics


async def _examples(
    job: Job, name: str, found: Sequence[Lesson], services: Services
) -> tuple[Example, ...]:
    async def group_of(position: int, lesson: Lesson) -> RolloutGroup:
        key = f"{services.owner}:eval:{name}:given:{position}"
        return learned(await services.given(lesson.prompt, lesson.answers, key=key), job)

    groups = await all_of(group_of(position, lesson) for position, lesson in enumerate(found))
    whole = [group for group in groups if not any(one.went_wrong for one in group.rollouts)]
    advantages: Advantages = [[one.advantages[0] for one in group.rollouts] for group in whole]
    return to_examples(whole, advantages)


async def _losses(
    job: Job, examples: tuple[Example, ...], services: Services, step: int
) -> dict[str, float]:
    sums: list[tuple[float, float, int]] = []
    for start in range(0, len(examples), EXAMPLES_AT_ONCE):
        several = examples[start : start + EXAMPLES_AT_ONCE]
        result = await services.forward(step, several)
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
    services/trainer/learning/preference.py has the formulas."""
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
