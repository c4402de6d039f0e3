"""Samplers that registered themselves, each until its lease ends."""

from __future__ import annotations

import json
import time

from services.orchestrator.store.connection import Connection
from services.orchestrator.store.lua import SHARED
from shared.errors import Conflict
from shared.wire import RegisteredSampler, Registration

REGISTRATION_S = 15.0
"""Seconds that a registration lasts; a sampler renews it after a third of that. Long enough for a
pause of its process; meanwhile other samplers take its groups."""

REGISTER = (
    SHARED
    + """
local key = SAMPLER .. call.replica
local known = redis.call('GET', key)
local url = known and cjson.decode(known).url
if url and url ~= cjson.decode(call.registration).url then return url end
redis.call('SADD', SAMPLERS, call.replica)
redis.call('SET', key, call.registration, 'PX', call.lease_ms)
return 'ok'
"""
)
"""call: replica, registration (JSON), lease_ms. Registers the sampler, or renews its lease. Returns
'ok', or the URL of another sampler that has the name."""

UNREGISTER = (
    SHARED
    + """
local known = redis.call('GET', SAMPLER .. call.replica)
if known and call.boot_id and cjson.decode(known).boot_id ~= call.boot_id then return 'other' end
redis.call('SREM', SAMPLERS, call.replica)
redis.call('DEL', SAMPLER .. call.replica)
return 'ok'
"""
)
"""call: replica; perhaps boot_id. Returns 'ok', also if it was not registered; 'other', and changes
nothing, if another `boot_id` has the registration."""

REGISTERED = (
    SHARED
    + """
local found = {}
for _, replica in ipairs(redis.call('SMEMBERS', SAMPLERS)) do
  local registration = redis.call('GET', SAMPLER .. replica)
  if registration then
    local left_ms = redis.call('PTTL', SAMPLER .. replica)
    found[#found + 1] = {replica, registration, left_ms}
  else
    redis.call('SREM', SAMPLERS, replica)
  end
end
return cjson.encode(found)
"""
)
"""Returns a list of [replica, registration, milliseconds left], as JSON; {} for none. Forgets
samplers whose lease has ended."""


class Registrations:
    """The samplers that registered themselves. Every method raises StoreUnavailable when Redis
    cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call
        self._register = connection.client.register_script(REGISTER)
        self._unregister = connection.client.register_script(UNREGISTER)
        self._registered = connection.client.register_script(REGISTERED)

    async def register(self, replica: str, registration: Registration) -> RegisteredSampler:
        """Registers a sampler for REGISTRATION_S seconds. Raises Conflict while another sampler, at
        another URL, has the name."""
        text = registration.model_dump_json()
        lease_ms = int(REGISTRATION_S * 1000)
        answer = await self._call(
            self._register, replica=replica, registration=text, lease_ms=lease_ms
        )
        if answer != "ok":
            raise Conflict(
                f"sampler {replica!r} is registered at {answer}, got {registration.url}; give each "
                "sampler a name of its own (HONE_ROLLOUT_REPLICA), or wait until the lease of the "
                f"other one ends ({REGISTRATION_S:g} s)"
            )
        return _registered(replica, text, lease_ms)

    async def unregister(self, replica: str, boot_id: str | None = None) -> None:
        """Ends the registration; with `boot_id` only if that process registered."""
        await self._call(self._unregister, replica=replica, boot_id=boot_id)

    async def all(self) -> list[RegisteredSampler]:
        """Returns the samplers whose registration has not expired, by name."""
        found = json.loads(await self._call(self._registered))
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
