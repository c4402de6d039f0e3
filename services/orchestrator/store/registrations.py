"""Samplers that registered themselves, each until its lease ends."""

from __future__ import annotations

import json
import time

from services.orchestrator.store.connection import Connection
from shared.errors import Conflict
from shared.wire import RegisteredSampler, Registration

REGISTRATION_S = 15.0
"""Seconds that a registration lasts; a sampler renews it after a third of that. Long enough for a
pause of its process; meanwhile other samplers take its groups."""


class Registrations:
    """The samplers that registered themselves. Every method raises StoreUnavailable when Redis
    cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def register(self, replica: str, registration: Registration) -> RegisteredSampler:
        """Registers a sampler for REGISTRATION_S seconds. Raises Conflict while another sampler, at
        another URL, has the name."""
        text = registration.model_dump_json()
        lease_ms = int(REGISTRATION_S * 1000)
        answer = await self._call("register", replica=replica, registration=text, lease_ms=lease_ms)
        if answer != "ok":
            raise Conflict(
                f"sampler {replica!r} is registered at {answer}, got {registration.url}; give each "
                "sampler a name of its own (HONE_ROLLOUT_REPLICA), or wait until the lease of the "
                f"other one ends ({REGISTRATION_S:g} s)"
            )
        return _registered(replica, text, lease_ms)

    async def unregister(self, replica: str, boot_id: str | None = None) -> None:
        """Ends the registration; with `boot_id` only if that process registered."""
        await self._call("unregister", replica=replica, boot_id=boot_id)

    async def all(self) -> list[RegisteredSampler]:
        """Returns the samplers whose registration has not expired, by name."""
        found = json.loads(await self._call("registered"))
        return [_registered(*each) for each in sorted(found)]

    async def urls(self) -> list[str]:
        return [sampler.url for sampler in await self.all()]


def _registered(replica: str, text: str, left_ms: int) -> RegisteredSampler:
    return RegisteredSampler.model_validate(
        {
            **json.loads(text),
            "replica": replica,
            "lease_s": REGISTRATION_S,
            "expires_at": time.time() + left_ms / 1000,
        },
        extra="ignore",
    )
