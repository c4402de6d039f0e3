"""A stack with HONE_TOKEN, and keys of access "own" for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any

from pydantic import SecretStr

from services.orchestrator.api.access import Keys
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import accept
from services.orchestrator.store.store import Store
from shared.http.gate import caller
from shared.job import Job
from shared.settings import Settings
from shared.wire import ApiKey
from tests.support.job_records import JOB

ROOT = "root-token-of-the-stack"

AS_ROOT = {"authorization": f"Bearer {ROOT}"}


def with_token(settings: Settings) -> Settings:
    settings.runs_dir.mkdir(parents=True, exist_ok=True)
    return settings.model_copy(update={"token": SecretStr(ROOT)})


def key_of(name: str, weight: float = 1.0) -> ApiKey:
    return ApiKey(name=name, access="own", created_at=int(time.time()), weight=weight)


def bearer(settings: Settings, name: str) -> dict[str, str]:
    secret = Keys(settings.runs_dir).create(name, "own", 3.0).secret
    return {"authorization": f"Bearer {secret}"}


@contextlib.contextmanager
def called_by(name: str) -> Generator[ApiKey]:
    """The key of that name calls while the block lasts."""
    token = caller.set(key_of(name))
    try:
        yield key_of(name)
    finally:
        caller.reset(token)


async def submitted(store: Store, settings: Settings, by: ApiKey | None, job: Job = JOB) -> str:
    submission = Submission(job, settings.runs_dir, by=by)
    return (await accept(store, submission)).id


def program(model: str = "owner/model", **changes: Any) -> Job:
    """A model of a program."""
    document = {
        "name": "program",
        "model": model,
        "steps": 9,
        "rewards": [],
        "training": {"objective": "program"},
        "lora": {"rank": 32},
    }
    return Job.model_validate(document | changes)
