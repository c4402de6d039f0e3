"""Samplers lent to an evaluation. While an evaluation has samplers no job begins, and while a job
has them an evaluation gets none."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.store.connection import Connection
from services.orchestrator.store.leases import Asked, Lease, LeaseLost
from services.orchestrator.store.lua import SHARED, once

LEND = once("""
  if are_taken(call.samplers) then return '' end
  local attempt = lease(call.samplers)
  redis.call('SET', LOAN .. attempt, call.name, 'PX', call.lease_ms)
  return attempt
""")
"""call: name (of an evaluation), samplers (with blanks between), lease_ms. Gives the evaluation a
lease on samplers. Returns its attempt; '' if one of the samplers is taken."""

RENEW = (
    SHARED
    + """
for name in string.gmatch(call.samplers, '%S+') do
  if redis.call('GET', LEASE .. name) ~= call.attempt then return 'lost' end
end
for name in string.gmatch(call.samplers, '%S+') do
  redis.call('PEXPIRE', LEASE .. name, call.lease_ms)
end
redis.call('PEXPIRE', LOAN .. call.attempt, call.lease_ms)
return ''
"""
)
"""call: samplers, attempt, lease_ms. Renews an evaluation's lease. Returns '' or 'lost'."""

END_LOAN = (
    SHARED
    + """
for name in string.gmatch(call.samplers, '%S+') do
  if redis.call('GET', LEASE .. name) == call.attempt then redis.call('DEL', LEASE .. name) end
end
redis.call('DEL', LOAN .. call.attempt)
return ''
"""
)
"""call: samplers, attempt. Ends the rest of an evaluation's lease. Returns ''."""


class Loans:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call
        self._lend = connection.client.register_script(LEND)
        self._renew = connection.beats.register_script(RENEW)
        self._end = connection.client.register_script(END_LOAN)

    async def lend(self, name: str, samplers: Sequence[str], lease_s: float) -> Lease | None:
        """Returns a lease on all of the `samplers` for the evaluation `name`; None while a job or
        another evaluation has one of them."""
        attempt = await self._call(
            self._lend, name=name, samplers=" ".join(samplers), lease_ms=int(lease_s * 1000)
        )
        return Lease(name, int(attempt), "", lease_s, tuple(samplers)) if attempt else None

    async def beat(self, lease: Lease) -> Asked | None:
        """Renews the lease; never returns a request. Raises LeaseLost."""
        arguments = _of(lease) | {"lease_ms": str(int(lease.lease_s * 1000))}
        if await self._call(self._renew, **arguments) == "lost":
            raise LeaseLost(lease.job_id)
        return None

    async def end(self, lease: Lease) -> None:
        """Gives back the rest of the lease."""
        await self._call(self._end, **_of(lease))


def _of(lease: Lease) -> dict[str, str]:
    return {"samplers": " ".join(lease.samplers), "attempt": str(lease.attempt)}
