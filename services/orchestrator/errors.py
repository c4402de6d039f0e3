"""Errors of a job that any room of the orchestrator raises; `jobs/decisions.py` decides on them."""

from __future__ import annotations

from shared.errors import Failed


class OperatorActionNeeded(Failed):
    """The job cannot continue until an operator has done what the sentence says. Nothing is lost:
    it continues where it was."""


class Preempted(OperatorActionNeeded):
    """The job made room for another one, and continues automatically once it has something to
    do."""


class BudgetExceeded(OperatorActionNeeded):
    """The job has reached its cost limit."""


class SyncFailed(Failed):
    """The sampler does not serve the published weights, though they were pushed twice."""
