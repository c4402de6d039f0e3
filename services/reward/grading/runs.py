"""One completion by one grader, as OpenAI's `/graders/run` has it."""

from __future__ import annotations

from typing import Any

from shared.wire import (
    GraderErrors,
    GraderRun,
    GraderRunMetadata,
    GraderRunRequest,
    Score,
    ScoreItem,
    ScoreRequest,
)
from shared.wire.graders import reward_of

LABEL = "grader"


def request_of(run: GraderRunRequest) -> ScoreRequest:
    """Raises BadRequest if `run` names no grader. The reward is LABEL, whatever its name."""
    spec = reward_of(run.grader).model_copy(update={"name": LABEL})
    item = ScoreItem(prompt="", completion=run.model_sample, row=run.item)
    return ScoreRequest(items=(item,), rewards=(spec,))


def answer(run: GraderRunRequest, score: Score) -> GraderRun:
    """Returns the score in OpenAI's shape."""
    part = score.parts[LABEL]
    flags: dict[str, Any] = dict.fromkeys(part.errors, True)
    for name in ("model_grader_server_error", "python_grader_runtime_error"):
        if name in flags:
            flags[f"{name}_details"] = part.detail
    if "python_grader_server_error" in flags:
        flags["python_grader_server_error_type"] = part.verdict
    kind = run.grader["type"]
    models = list(part.tokens)
    metadata = GraderRunMetadata(
        name=str(run.grader.get("name", kind)),
        type=kind,
        execution_time=part.seconds,
        errors=GraderErrors(**flags),
        part=part,
        scores=part.sub,
        token_usage=sum(part.tokens.values()) if models else None,
        sampled_model_name=models[0] if len(models) == 1 else None,
    )
    usage = {model: {"total_tokens": tokens} for model, tokens in part.tokens.items()}
    return GraderRun(
        reward=score.value,
        sub_rewards=part.sub,
        metadata=metadata,
        model_grader_token_usage_per_model=usage,
    )
