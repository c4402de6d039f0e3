"""Fetches a job's data from the Hugging Face Hub into this machine's cache, from which its rows are
then read. A download may hang, so a process does it, which is killed at its deadline, or once
nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from services.orchestrator.data.apart import NotInTime, apart
from services.orchestrator.data.hub_tables import Pinned
from services.orchestrator.data.sources import COMMIT, Ask, asks_of, is_on_hub, open_source
from shared.errors import Unavailable
from shared.job import Job
from shared.model.names import hub_is_offline
from shared.settings import Settings

FETCH_S = 1200.0
"""Seconds that reading a data set from the Hub may take."""


def asks_hub(job: Job, settings: Settings) -> bool:
    """Whether the Hub must be asked for any of the job's data."""
    return not hub_is_offline() and any(map(_is_asked, asks_of(job, settings).values()))


async def fetch(asks: Iterable[Ask]) -> None:
    """Puts sources on the Hub into this machine's cache, except streams, which are not kept. Raises
    as `load_prompts`, and Unavailable if the Hub hangs."""
    asked = [ask for ask in asks if await asyncio.to_thread(_is_asked, ask)]
    if not asked or hub_is_offline():
        return
    try:
        await apart(_fetch, asked, deadline_s=FETCH_S)
    except NotInTime as error:
        raise Unavailable(f"the job's data was not fetched: {error.detail}") from error


def _fetch(asks: Sequence[Ask]) -> None:
    for ask in asks:
        table = open_source(ask)
        if ask.spec.streaming:
            next(table.stream(), None)
        else:
            table.rows()


def _is_asked(ask: Ask) -> bool:
    if not is_on_hub(ask.source):
        return False
    commit = ask.wanted or ask.spec.revision or ""
    is_known = COMMIT.fullmatch(commit) is not None
    return not (is_known and Pinned(ask.text, ask.spec.config, commit).cached())
