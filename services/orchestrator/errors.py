"""Errors of a job that any room of the orchestrator raises; `run/decisions.py` decides on them."""

from __future__ import annotations

from shared.errors import Failed


class MustPause(Failed):
    """The job cannot go on until a person has done what the sentence says. Nothing is lost: it goes
    on where it was."""


class TooDear(MustPause):
    """The job has reached its cost limit."""


class SyncFailed(Failed):
    """The sampler does not serve the published weights, though they were pushed twice."""
