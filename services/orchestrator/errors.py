"""Errors of a job that any folder may raise; `jobs/decisions.py` decides what follows."""

from __future__ import annotations

from typing import Literal

from shared.errors import BadRequest, Failed, HoneError

CheckNeeds = Literal["settings", "data", "services"]
"""The inputs of a check of a job: only the job and the settings; or models and data, which take
long to read; or the job's services, and its first prompts."""


class OperatorActionNeeded(Failed):
    """The job needs operator action, which the sentence names. Nothing is lost: the job continues
    where it was."""


class Preempted(OperatorActionNeeded):
    """The job was preempted by another one, and continues automatically with its next operation."""


class BudgetExceeded(OperatorActionNeeded):
    """The job has reached its cost limit."""


class CheckFailed(HoneError):
    """A check at the start of an attempt failed because of `cause`. `needs` are the inputs of the
    check."""

    def __init__(self, check: str, needs: CheckNeeds, cause: HoneError) -> None:
        detail = cause.detail
        if isinstance(cause, BadRequest) and needs != "settings":
            detail = (
                f"its {check} were accepted when it was submitted, and are refused now: {detail}"
            )
        super().__init__(detail, code=cause.code)
        self.needs, self.cause = needs, cause


class SyncFailed(Failed):
    """A sampler does not serve the published weights, or cannot take them by this method."""
