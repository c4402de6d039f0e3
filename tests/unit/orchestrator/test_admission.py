"""Who is given room, and what becomes of room that was given to somebody who left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.orchestrator.pool.admission import Admission
from services.orchestrator.pool.replica import Replica
from shared.errors import Unavailable
from shared.http.client import Client


@pytest.fixture
async def replicas() -> AsyncGenerator[list[Replica]]:
    """Two samplers that serve, of one completion at a time each."""
    async with Client("rollout", "http://one") as one, Client("rollout", "http://two") as two:
        yield [Replica(client, up=True, max_num_seqs=1) for client in (one, two)]


def admission_of(replicas: list[Replica]) -> Admission:
    return Admission(lambda: replicas, lambda: Unavailable("nobody"))


async def test_room_given_to_a_group_that_is_cancelled_goes_to_the_next(
    replicas: list[Replica],
) -> None:
    only = replicas[0]
    admission = admission_of([only])
    assert await admission.room_for(1) is only
    first = asyncio.create_task(admission.room_for(1))
    second = asyncio.create_task(admission.room_for(1))
    await asyncio.sleep(0)
    only.give_back(1)
    admission.admit()
    first.cancel()  # it was given room, and does not know yet
    async with asyncio.timeout(60):
        assert await second is only
    assert first.cancelled() and only.under_way == 1


async def test_a_sampler_that_leaves_gets_no_group_a_second_time(replicas: list[Replica]) -> None:
    first, second = replicas
    admission = admission_of(replicas)
    assert admission.spare(first) is second
    second.listed = False
    assert admission.spare(first) is None
