"""A word with the policy of a job, through the orchestrator's `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import Unavailable

if TYPE_CHECKING:
    from hone.async_client import AsyncClient
    from hone.trainer.modes import Address

POLICY = "policy"
"""What samplers call the weights that serve now."""

RECENT = 100
"""Jobs that may have had the samplers since."""


def chat(
    address: Address, job: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> str:
    """Returns the answer of the job's policy. Raises Unavailable if no sampler has it."""

    async def ask(client: AsyncClient) -> str:
        model = job if job in await client.models() else await _policy(client, job)
        return await client.chat(model, messages, **sampling)

    with address.connect() as client:
        return client.run(ask)


async def _policy(client: AsyncClient, job: str) -> str:
    """Returns the name of the serving weights. Raises Unavailable unless they are the job's."""
    record = await client.get(job)
    if record.status == "queued":
        raise Unavailable(f"job {job} is queued, and no sampler has its weights yet")
    others = [each for each in await client.list(RECENT) if each.id != job]
    ended_at = record.finished_at or 0.0
    since = [
        each.id
        for each in others
        if each.status == "running" or (each.started_at or 0.0) > ended_at
    ]
    if record.status != "running" and since:
        raise Unavailable(
            f"job {since[0]} has the samplers since job {job} ended; `vllm serve` on its "
            "checkpoint answers"
        )
    return POLICY
