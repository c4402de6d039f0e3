"""Leases: the right of a worker with its job to use services for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Asked = Literal["cancel", "pause"]


class LeaseLost(Exception):
    """The lease expired or another worker took the job over. This worker must stop at once and
    change nothing more."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a job with a trainer, for `lease_s` seconds from each heartbeat.
    `attempt` fences: it is larger than the attempt of any earlier lease. `tries` counts the
    attempts in a row, this one included, that completed no new step."""

    job_id: str
    attempt: int
    trainer: str
    lease_s: float
    tries: int = 1
