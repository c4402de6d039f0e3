"""A submission that is taken back, by its idempotency key: before it arrives, while it is checked,
and after it was accepted."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Conflict
from shared.wire import JobList, JobState, Withdrawn, WithdrawRequest
from tests.support.orchestrator_stack import Stack, job, stack

__all__ = ["job", "stack"]

KEY = "key-of-the-test"


async def withdraw(stack: Stack) -> Withdrawn:
    body = WithdrawRequest(key=KEY)
    return await stack.client.call("POST", "/v1/jobs/withdraw", body, Withdrawn, deadline_s=30)


async def jobs(stack: Stack) -> JobList:
    return await stack.client.get("/v1/jobs", JobList)


async def test_a_submission_that_arrives_after_it_was_withdrawn_is_refused(stack: Stack) -> None:
    assert await withdraw(stack) == Withdrawn(job=None)
    assert await withdraw(stack) == Withdrawn(job=None)  # twice is once
    with pytest.raises(Conflict, match="was withdrawn; use a new key"):
        await stack.submit(key=KEY)
    assert len(await jobs(stack)) == 0
    assert (await stack.submit(key="another")).status == "queued"


async def test_one_that_is_withdrawn_while_it_is_checked_becomes_no_job(stack: Stack) -> None:
    checking = stack.fakes.hold("validate")
    submitting = asyncio.create_task(stack.submit(key=KEY))
    await checking.arrival()
    assert await withdraw(stack) == Withdrawn(job=None)
    checking.released.set()
    with pytest.raises(Conflict, match="was withdrawn"):
        await submitting
    assert len(await jobs(stack)) == 0


async def test_the_job_of_one_that_was_accepted_is_cancelled(stack: Stack) -> None:
    record = await stack.submit(key=KEY)
    found = (await withdraw(stack)).job
    assert found is not None and found.id == record.id and found.cancel_requested
    assert (await stack.until(record.id)).status == "cancelled"
    again = (await withdraw(stack)).job
    assert again == JobState(id=record.id, status="cancelled", cancel_requested=True)
    assert (await stack.submit(key=KEY)).id == record.id  # the same key is the same job


async def test_a_job_that_has_succeeded_is_unchanged(stack: Stack) -> None:
    record = await stack.submit(key=KEY)
    await stack.until(record.id)
    found = (await withdraw(stack)).job
    assert found is not None and (found.id, found.status) == (record.id, "succeeded")
