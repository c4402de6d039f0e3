"""Samplers and trainers that are registered in Redis, each until its registration expires; uploaded
files that were removed; and the models that jobs use."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.store import keys
from services.orchestrator.store.connection import Connection
from shared.errors import Conflict
from shared.wire import RegisteredSampler, Registration, UploadedFile

SAMPLER_REGISTRATION_S = 15.0
"""Seconds that a registration lasts; a sampler renews it after a third of that. Long enough for a
pause of its process; meanwhile other samplers take its groups."""

REGISTER_TRAINER_S = 2.0
"""Seconds between two registrations of a trainer by its worker."""

TRAINER_REGISTRATION_S = 10.0
"""Seconds that a trainer's registration lasts: as long as an orchestrator takes to restart.
Meanwhile an interrupted job is left to its own trainer, if that is free, because only that trainer
has the job's latest state: another trainer would repeat the steps since the newest checkpoint. A
longer time would count an orchestrator twice that restarts with another host name, as a container
does."""


class SamplerRegistrations:
    """The samplers that registered themselves. Every method raises StoreUnavailable when Redis
    cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def register(self, replica: str, registration: Registration) -> RegisteredSampler:
        """Registers a sampler for SAMPLER_REGISTRATION_S seconds. Raises Conflict while another
        sampler, at another URL, has the name."""
        text = registration.model_dump_json()
        lease_ms = int(SAMPLER_REGISTRATION_S * 1000)
        answer = await self._call(
            "register_sampler", replica=replica, registration=text, lease_ms=lease_ms
        )
        if answer != "ok":
            raise Conflict(
                f"sampler {replica!r} is registered at {answer}, got {registration.url}; give each "
                "sampler a name of its own (HONE_ROLLOUT_REPLICA), or wait until the lease of the "
                f"other one ends ({SAMPLER_REGISTRATION_S:g} s)"
            )
        return _sampler(replica, text, lease_ms)

    async def unregister(self, replica: str, boot_id: str | None = None) -> None:
        """Ends the registration; with `boot_id` only if that process registered."""
        await self._call("unregister_sampler", replica=replica, boot_id=boot_id)

    async def all(self) -> list[RegisteredSampler]:
        """Returns the samplers whose registration has not expired, by name."""
        rows = json.loads(await self._call("samplers"))
        return [_sampler(*each) for each in sorted(rows)]

    async def urls(self) -> list[str]:
        return [sampler.url for sampler in await self.all()]


@dataclass(frozen=True)
class RegisteredTrainer:
    """`missing` is a sentence about the dependency that its jobs lack; None: they lack none.
    `free`: it takes a job now."""

    trainer: str
    missing: str | None = None
    free: bool = False


class TrainerRegistrations:
    """The trainers of all orchestrators that share this Redis. So a job's place in the queue says
    why no trainer takes it, and an interrupted job is left to its own trainer. Every method raises
    StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def register(
        self, name: str, trainer: str, samplers: Sequence[str], missing: str | None
    ) -> int:
        """Registers for TRAINER_REGISTRATION_S seconds that the worker `name` has the trainer and
        the samplers, and why they take no job (`missing`). Returns how many jobs wait to begin."""
        registration = {"trainer": trainer, "samplers": " ".join(samplers)}
        away = {"away": missing} if missing else {}
        # Without ASCII escapes: Redis cannot decode the escape of a lone surrogate, which becomes
        # `?`.
        answer = await self._call(
            "register_trainer",
            name=name,
            registration=json.dumps(registration | away, ensure_ascii=False),
            lease_ms=int(TRAINER_REGISTRATION_S * 1000),
        )
        return int(answer)

    async def all(self) -> list[RegisteredTrainer]:
        rows = json.loads(await self._call("trainers"))
        return [RegisteredTrainer(each["trainer"], each.get("away"), each["free"]) for each in rows]


def _sampler(replica: str, text: str, left_ms: int) -> RegisteredSampler:
    return RegisteredSampler.model_validate(
        {
            **json.loads(text),
            "replica": replica,
            "lease_s": SAMPLER_REGISTRATION_S,
            "expires_at": time.time() + left_ms / 1000,
        },
        extra="ignore",
    )


class Removals:
    """Uploaded files that were removed: no job can be submitted with such a file. Each is
    remembered for `ttl_s` seconds. Every method raises StoreUnavailable when Redis
    cannot be reached."""

    def __init__(self, connection: Connection, ttl_s: int) -> None:
        self._call, self._do, self._redis = connection.call, connection.do, connection.client
        self._ttl_s = ttl_s

    async def add(self, file: UploadedFile) -> None:
        """Rejects further jobs that name the uploaded file. Raises Conflict while a job that has
        not ended names it."""
        answer = await self._call(
            "remove_file", file=file.id, created_at=file.created_at, removed_ttl_s=self._ttl_s
        )
        if answer != "ok":
            job_id, status = answer.split(" ")
            raise Conflict(
                f"file {file.id!r} is in use by job {job_id!r}, which is {status}; cancel the job "
                "or wait for its end"
            )

    async def undo(self, file_id: str) -> None:
        """Accepts jobs again that name a file which was removed and uploaded again."""
        await self._do(self._redis.delete(keys.REMOVED + file_id))

    async def created_at(self, file_id: str) -> int | None:
        """Returns when a removed file had been made, in Unix seconds; None if the file was not
        removed."""
        created_at = await self._do(self._redis.get(keys.REMOVED + file_id))
        return None if created_at is None else int(created_at)


@dataclass(frozen=True)
class Use:
    """The folder of a model, with a job that uses it and has not ended."""

    path: Path
    job_id: str
    status: str


def uses_below(folder: Path, models: Iterable[tuple[str, str, str]]) -> list[Use]:
    """Returns the uses of models in `folder`. `models`: each model, its job's id and status."""
    folder = folder.resolve()
    uses = [Use(Path(model).resolve(), job_id, status) for model, job_id, status in models]
    return [use for use in uses if use.path.is_relative_to(folder)]
