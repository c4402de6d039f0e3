"""Hone's Python API: submit a job, follow it, look at what it did.

import hone

client = hone.Client("http://127.0.0.1:8000")
record = client.submit(hone.load_job(Path("job.toml"), ["training.learning_rate=1e-5"]))
for event in client.events(record.id, follow=True):
    print(event.message)
"""

from hone.client import Client
from shared.errors import (
    BadRequest,
    Conflict,
    Failed,
    Forbidden,
    HoneError,
    NotFound,
    Unauthorized,
    Unavailable,
)
from shared.job import Job
from shared.job_file import load_job
from shared.rewards import Outcome, Reward
from shared.wire import Event, JobRecord, JobSummary

__all__ = [
    "BadRequest",
    "Client",
    "Conflict",
    "Event",
    "Failed",
    "Forbidden",
    "HoneError",
    "Job",
    "JobRecord",
    "JobSummary",
    "NotFound",
    "Outcome",
    "Reward",
    "Unauthorized",
    "Unavailable",
    "load_job",
]
