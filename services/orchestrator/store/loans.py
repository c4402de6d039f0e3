"""Samplers lent to an evaluation. While an evaluation has samplers no job begins, and while a job
has them an evaluation gets none."""

from __future__ import annotations

from collections.abc import Sequence

from services.orchestrator.store.connection import Connection
from services.orchestrator.store.leases import Asked, Lease, LeaseLost


class Loans:
    """Every method raises StoreUnavailable when Redis cannot be reached."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def lend(self, name: str, samplers: Sequence[str], lease_s: float) -> Lease | None:
        """Returns a lease on all of the `samplers` for the evaluation `name`; None while a job or
        another evaluation has one of them."""
        attempt = await self._call(
            "lend", name=name, samplers=" ".join(samplers), lease_ms=int(lease_s * 1000)
        )
        return Lease(name, int(attempt), "", lease_s, tuple(samplers)) if attempt else None

    async def beat(self, lease: Lease) -> Asked | None:
        """Renews the lease; never returns a request. Raises LeaseLost."""
        arguments = _of(lease) | {"lease_ms": str(int(lease.lease_s * 1000))}
        if await self._call("renew_loan", **arguments) == "lost":
            raise LeaseLost(lease.job_id)
        return None

    async def end(self, lease: Lease) -> None:
        """Gives back the rest of the lease."""
        await self._call("end_loan", **_of(lease))


def _of(lease: Lease) -> dict[str, str]:
    return {"samplers": " ".join(lease.samplers), "attempt": str(lease.attempt)}
