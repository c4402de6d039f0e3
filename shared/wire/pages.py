"""The most entries of one answer of the jobs API. Nothing is imported here, so that `hone logs
--help` starts fast."""

from __future__ import annotations

MAX_EVENTS = 1000

MAX_LAST = 10_000
"""Most events from the end of a job's list (`last`)."""

MAX_ROWS = 10_000
"""Most steps with metrics, or rollouts of a step, in one answer."""
