"""All paused jobs resumed, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from shared.errors import HoneError, Unavailable
from shared.wire import JobStatus

if TYPE_CHECKING:
    from hone.async_client import AsyncClient


class Resumed(BaseModel):
    """A job that was paused, and its status now; None: `problem` says why it was not resumed."""

    id: str
    status: JobStatus | None = None
    problem: str | None = None


async def resume_all(client: AsyncClient) -> tuple[Resumed, ...]:
    """Resumes each paused job, oldest first, and returns the results."""
    ids: list[str] = []
    after: str | None = None
    while True:
        page = await client.list(status="paused", after=after)
        ids += [*(job.id for job in page), *page.unreadable]
        after = page.next_after
        if after is None:
            return tuple([await _resumed(client, id) for id in reversed(ids)])


async def _resumed(client: AsyncClient, id: str) -> Resumed:
    try:
        state = await client.resume(id)
    except Unavailable:
        raise
    except HoneError as error:
        return Resumed(id=id, problem=error.detail)
    return Resumed(id=id, status=state.status)
