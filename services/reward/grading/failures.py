"""How a grader says that it cannot grade."""

from __future__ import annotations

from typing import Literal

from shared.wire import Part

ErrorName = Literal[
    "formula_parse_error",
    "invalid_variable_error",
    "model_grader_parse_error",
    "model_grader_refusal_error",
    "model_grader_server_error",
    "other_error",
    "python_grader_runtime_error",
    "python_grader_server_error",
    "sample_parse_error",
    "truncated_observation_error",
    "unresponsive_reward_error",
]
"""OpenAI's names of what can go wrong in grading, as a grader run reports them; `Part.errors` has
them."""


class GradingFailed(Exception):
    """A grader cannot say what a completion earns. Its items have no value; `detail` says why,
    `errors` classify it."""

    def __init__(self, detail: str, *errors: ErrorName, by_sandbox: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors or ("other_error",)
        self.by_sandbox = by_sandbox

    def part(self) -> Part:
        return Part(
            value=None,
            verdict="sandbox_error" if self.by_sandbox else "error",
            detail=self.detail[:1000],
            errors=self.errors,
        )


def wrong_row(detail: str) -> GradingFailed:
    """Returns the failure of a row by which no completion can be graded."""
    return GradingFailed(detail, "invalid_variable_error")
