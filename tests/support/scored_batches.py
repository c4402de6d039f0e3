"""Jobs, scores and batches for the tests of advantages, in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.job import Job
from shared.wire import Batch, Part, Prompt, Rollout, RolloutGroup, Score


def make_job(*rewards: dict[str, Any], **advantages: Any) -> Job:
    return Job.model_validate(
        {
            "name": "t",
            "model": "m/m",
            "steps": 1,
            "data": {"train": "x"},
            "rewards": rewards or ({"grader": "right"},),
            "advantages": advantages,
        }
    )


def score(job: Job, *values: float | str | None) -> Score:
    """The score of a rollout whose rewards gave `values` in the job's order; "skipped" does not
    apply, None is missing."""
    parts = {
        reward.label: Part(value=None, verdict="skipped" if value == "skipped" else "error")
        if not isinstance(value, float)
        else Part(value=value)
        for reward, value in zip(job.rewards, values, strict=True)
    }
    applicable = [
        (reward.weight, parts[reward.label].value)
        for reward in job.rewards
        if parts[reward.label].verdict != "skipped"
    ]
    missing = not applicable or any(value is None for _, value in applicable)
    return Score(
        value=None if missing else sum(weight * (value or 0.0) for weight, value in applicable),
        parts=parts,
    )


def make_rollout(
    length: int = 1, reason: str = "stop", versions: Sequence[int] = (0,), text: str = "x"
) -> Rollout:
    """A rollout of `length` tokens, one sampled by each version and the rest by the last."""
    return Rollout.model_validate(
        {
            "text": text,
            "token_ids": tuple(range(length)),
            "logprobs": (-0.5,) * length,
            "finish_reason": reason,
            "spans": [{"version": each, "start": start} for start, each in enumerate(versions)],
        }
    )


def make_batch(
    *scores_PG: tuple[Score, ...],
    cut_off: tuple[int, ...] = (),
    indices: Sequence[int] | None = None,
    **changes: Any,
) -> Batch:
    """A batch with these scores, of prompts with these `indices` (0, 1 and so on, if not given).
    The rollouts at positions `cut_off` of each group ended at max_tokens."""

    def group(scores_G: tuple[Score, ...]) -> RolloutGroup:
        rollouts = tuple(
            make_rollout(reason="length" if index in cut_off else "stop")
            for index in range(len(scores_G))
        )
        return RolloutGroup(prompt_token_ids=(1,), rollouts=rollouts)

    numbers = range(len(scores_PG)) if indices is None else indices
    batch = Batch(
        step=1,
        version=0,
        prompts=tuple(Prompt(index=index, content="p", row={}) for index in numbers),
        groups=tuple(map(group, scores_PG)),
        scores=scores_PG,
    )
    return batch.model_copy(update=changes)
