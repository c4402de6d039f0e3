"""Ctrl-C during `hone submit`, as a process, at several moments: what remains of the submission,
and what is said of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hone import AsyncClient
from shared.wire import JobList
from tests.support.proxy import proxy
from tests.support.served_stack import ServedStack, served_stack

pytestmark = pytest.mark.slow

EXIT_S = 120.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    with served_stack(tmp_path_factory.mktemp("served")) as stack:
        yield stack


@pytest.fixture
def job(tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(20))
    (tmp_path / "train.jsonl").write_text(rows)
    file = tmp_path / "job.toml"
    file.write_text(
        f'name = "{tmp_path.name.replace("_", "-")[:30]}"\nmodel = "owner/model"\nsteps = 50\n'
        f'[data]\ntrain = "{tmp_path}/train.jsonl"\n[[rewards]]\ngrader = "exact_match"\n'
        "[sampling]\nprompts_per_step = 4\ngroup_size = 2\nmax_tokens = 4\n"
    )
    return file


async def submit(url: str, *arguments: str) -> Process:
    """Starts `hone submit` as from a terminal: a shell's background jobs, of which the tests may be
    one, ignore Ctrl-C."""
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hone.cli", "submit", *arguments),
            env={**os.environ, "HONE_ORCHESTRATOR_URL": url},
            cwd=ROOT,
            stdout=PIPE,
            stderr=PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, ignored)


async def interrupted(process: Process) -> str:
    """Returns what a command said on stderr that got Ctrl-C."""
    process.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(process.communicate(), EXIT_S)
    assert process.returncode == 130, said
    return said.decode()


async def jobs_of(served: ServedStack, job: Path) -> JobList:
    name = json.loads(job.read_text().splitlines()[0].partition(" = ")[2])
    async with AsyncClient(served.url) as client:
        return await client.list(name=name)


def held(begun: asyncio.Event, released: asyncio.Event) -> Callable[[bytes], Awaitable[bytes]]:
    async def hold(body: bytes) -> bytes:
        begun.set()
        await released.wait()
        return body

    return hold


async def test_a_request_that_arrives_after_ctrl_c_makes_no_job(
    served: ServedStack, job: Path
) -> None:
    begun, released = asyncio.Event(), asyncio.Event()
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def note(body: bytes) -> bytes:
        answers.put_nowait(body)
        return body

    hold = held(begun, released)
    async with proxy(served.url, "/v1/jobs", request=hold, response=note) as url:
        process = await submit(url, str(job))
        await asyncio.wait_for(begun.wait(), EXIT_S)
        said = await interrupted(process)
        released.set()
        answered = await asyncio.wait_for(answers.get(), EXIT_S)
    assert "interrupted: the job is not submitted" in said
    assert b"was withdrawn; use a new key" in answered
    assert len(await jobs_of(served, job)) == 0


async def test_ctrl_c_while_the_job_is_checked_makes_no_job(served: ServedStack, job: Path) -> None:
    begun, released = threading.Event(), threading.Event()

    async def hold(_: Any) -> None:
        begun.set()
        while not released.is_set():
            await asyncio.sleep(0.01)

    served.fakes.fault["validate"] = hold
    process = await submit(served.url, str(job))
    assert await asyncio.to_thread(begun.wait, EXIT_S)
    said = await interrupted(process)
    released.set()
    del served.fakes.fault["validate"]
    assert "interrupted: the job is not submitted" in said
    assert len(await jobs_of(served, job)) == 0
    again = await submit(served.url, str(job), "-o", "json")
    record = json.loads((await asyncio.wait_for(again.communicate(), EXIT_S))[0])
    assert [each.id for each in await jobs_of(served, job)] == [record["id"]]


async def test_a_job_accepted_but_not_yet_shown_is_cancelled(
    served: ServedStack, job: Path
) -> None:
    begun, released = asyncio.Event(), asyncio.Event()
    async with proxy(served.url, "/v1/jobs", response=held(begun, released)) as url:
        process = await submit(url, str(job))
        await asyncio.wait_for(begun.wait(), EXIT_S)
        said = await interrupted(process)
        released.set()
    (found,) = await jobs_of(served, job)
    assert f"interrupted: job {found.id} was accepted just before, and is " in said
    async with AsyncClient(served.url) as client:
        assert (await client.wait(found.id, timeout_s=EXIT_S)).status == "cancelled"


async def test_ctrl_c_after_the_id_was_shown_leaves_the_job(served: ServedStack, job: Path) -> None:
    process = await submit(served.url, str(job), "--follow")
    assert process.stdout
    accepted = (await asyncio.wait_for(process.stdout.readline(), EXIT_S)).decode()
    (found,) = await jobs_of(served, job)
    assert f"job {found.id} accepted" in accepted
    await asyncio.wait_for(process.stdout.readuntil(b"step 1/"), EXIT_S)
    assert f"detached; job {found.id} continues" in await interrupted(process)
    async with AsyncClient(served.url) as client:
        assert (await client.wait(found.id, timeout_s=EXIT_S)).status == "succeeded"


async def test_a_key_of_ones_own_is_not_withdrawn(served: ServedStack, job: Path) -> None:
    begun, released = asyncio.Event(), asyncio.Event()
    key = job.parent.name
    async with proxy(served.url, "/v1/jobs", request=held(begun, released)) as url:
        process = await submit(url, str(job), "--key", key)
        await asyncio.wait_for(begun.wait(), EXIT_S)
        said = await interrupted(process)
        released.set()
    assert f"the job may be submitted by --key {key}; the same command again shows it" in said
    again = await submit(served.url, str(job), "--key", key, "-o", "json")
    record = json.loads((await asyncio.wait_for(again.communicate(), EXIT_S))[0])
    assert [each.id for each in await jobs_of(served, job)] == [record["id"]]


async def test_an_orchestrator_that_is_gone_leaves_it_open_and_says_so(
    served: ServedStack, job: Path
) -> None:
    begun, released = asyncio.Event(), asyncio.Event()
    gone = asyncio.Event()

    async def refuse(body: bytes) -> bytes:
        gone.set()
        raise ConnectionError("the orchestrator is gone")

    async with (
        proxy(served.url, "/v1/jobs/withdraw", request=refuse) as inner,
        proxy(inner, "/v1/jobs", request=held(begun, released)) as url,
    ):
        process = await submit(url, str(job))
        await asyncio.wait_for(begun.wait(), EXIT_S)
        said = await interrupted(process)
        released.set()
    assert gone.is_set()
    assert "it is not known whether the job was submitted; `hone ls --name" in said
