"""Facts of a run, made by hand: a list of values for each metric, from step 1 on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from services.orchestrator.extensions.diagnosis.diagnosing import diagnose
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot
from shared.job import Job
from shared.wire import Batch, Finding, MetricsRow, Part, Prompt, Rollout, RolloutGroup, Score
from tests.support.scored_batches import make_job


def job_with(**changes: Any) -> Job:
    """A job of 100 steps with one reward, changed so; a section is given as a dict."""
    return Job.model_validate(make_job().model_dump() | {"steps": 100} | changes)


def facts(
    metrics: Mapping[str, Sequence[float | None]], job: Job | None = None, **others: Any
) -> RunSnapshot:
    """A run whose step 1 has the first value of each metric; None: the step lacks it."""
    columns = itertools.zip_longest(*metrics.values())
    rows = [
        MetricsRow(
            step=step,
            metrics={
                name: value
                for name, value in zip(metrics, values, strict=True)
                if value is not None
            },
        )
        for step, values in enumerate(columns, 1)
    ]
    return RunSnapshot(job=job or job_with(), rows=rows, **others)


def codes(found: RunSnapshot) -> list[str]:
    return [finding.code for finding in diagnose(found)]


def only(found: RunSnapshot) -> Finding:
    """The one finding of the run."""
    (finding,) = diagnose(found)
    assert finding.title and finding.cause and finding.remedy and finding.evidence
    return finding


def rollout(text: str = "x", **changes: Any) -> Rollout:
    return Rollout.model_validate(
        {"text": text, "token_ids": (1,), "finish_reason": "stop"} | changes
    )


def batch(
    texts_PG: Sequence[Sequence[str]],
    parts_PG: Sequence[Sequence[Mapping[str, float]]] | None = None,
    *,
    step: int = 1,
) -> Batch:
    """A batch with these completions; `parts_PG` are what each reward gave, 0 by default."""
    parts_PG = parts_PG or [[{"right": 0.0} for _ in texts_G] for texts_G in texts_PG]
    return Batch(
        step=step,
        version=step - 1,
        prompts=tuple(
            Prompt(index=index, content=f"problem {index}", row={})
            for index in range(len(texts_PG))
        ),
        groups=tuple(
            RolloutGroup(
                prompt_token_ids=(1,),
                rollouts=tuple(map(rollout, texts_G)),
            )
            for texts_G in texts_PG
        ),
        scores=tuple(
            tuple(
                Score(
                    value=sum(parts.values()),
                    parts={name: Part(value=value) for name, value in parts.items()},
                )
                for parts in parts_G
            )
            for parts_G in parts_PG
        ),
    )
