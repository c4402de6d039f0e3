"""Hone's Python API: submit a job, follow it, look at what it did.

    import hone

    client = hone.Client("http://127.0.0.1:8000")
    record = client.submit(hone.load_job("job.toml", ["training.learning_rate=1e-5"]))
    for event in client.events(record.id, follow=True):
        print(event.message)

`Trainer` does the same from a script or notebook, by the names that TRL has:

    hone.Trainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs="math", train_dataset=rows).train()

`AsyncClient` has the same methods for asynchronous code. Lists that a client returns are iterated,
counted and indexed as lists are; the job may be a dict, and a path a str. Every error is a
HoneError, whose `detail` is a sentence:

    BadRequest      the caller is wrong; among them Unauthorized, Forbidden, NotFound
    Conflict        not possible in the present state, such as cancelling a job that has succeeded
    Unavailable     nothing answers, or it is starting: ask again
    Failed          the orchestrator could not do it
    NotEnded        the time that `wait` was given is over, and the job continues
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.lazily import export_lazily

if TYPE_CHECKING:
    from hone.agents.working import work
    from hone.async_client import AsyncClient, NotEnded
    from hone.client import Client
    from hone.trainer.modes import Distributed, Local, Remote, SingleNode
    from hone.trainer.run import Detached, Run, TrainOutput, attach
    from hone.trainer.simple import Simple
    from hone.trainer.trainer import Trainer, from_toml
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
    from shared.job.file import load_job
    from shared.rewards import FunctionConfig, Outcome, Reward, RewardEnvironment, SandboxConfig
    from shared.wire import Event, JobRecord, JobSummary
else:
    __getattr__, __dir__ = export_lazily(__file__, globals())

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "Conflict",
    "Detached",
    "Distributed",
    "Event",
    "Failed",
    "Forbidden",
    "FunctionConfig",
    "HoneError",
    "Job",
    "JobRecord",
    "JobSummary",
    "Local",
    "NotEnded",
    "NotFound",
    "Outcome",
    "Remote",
    "Reward",
    "RewardEnvironment",
    "Run",
    "SandboxConfig",
    "Simple",
    "SingleNode",
    "TrainOutput",
    "Trainer",
    "Unauthorized",
    "Unavailable",
    "attach",
    "from_toml",
    "load_job",
    "work",
]
