"""Kill -9 of a real sampler, one of two, while it samples or loads weights: every job ends with
each of its groups once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from deploy.machine import on_free_ports
from services.orchestrator.grpo.prompts import load_prompts
from services.orchestrator.store.folder import RunFolder
from shared.errors import HoneError
from shared.http.client import Client
from shared.job import Job
from shared.job.file import load_job
from shared.settings import Settings
from shared.wire import TERMINAL, Event, EventList, JobRecord, ServingWeights, SubmitRequest

pytestmark = [pytest.mark.soak, pytest.mark.system, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
NUM_KILLS = 5
"""In one stack."""

BACK_S = 240.0
"""Seconds in which a killed sampler must serve again, on a machine that does other things too."""

CHANGES = (
    "steps=15",
    "sampling.prompts_per_step=8",
    "evaluation.every=1000",
    "evaluation.num_prompts=8",
)


@dataclass
class Stack:
    supervisor: int
    orchestrator: Client
    samplers: dict[int, Client]
    job: Job

    async def run_job(self) -> tuple[JobRecord, tuple[Event, ...]]:
        """Returns a job and its events once it has ended or paused."""
        body = SubmitRequest(job=self.job)
        record = await self.orchestrator.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
        while record.status not in (*TERMINAL, "paused"):
            await asyncio.sleep(0.2)
            record = await self.orchestrator.get(f"/v1/jobs/{record.id}", JobRecord)
        events = await self.orchestrator.get(f"/v1/jobs/{record.id}/events", EventList)
        return record, events.events

    async def all_serve(self) -> None:
        """Returns once both samplers serve a version of a job."""
        async with asyncio.timeout(BACK_S):
            for sampler in self.samplers.values():
                while (serving := await _serving(sampler)).version is None:
                    await asyncio.sleep(0.1)
                assert serving.kv_cache_tokens > 0, "vLLM says how much its cache holds"

    def pid(self, port: int) -> int:
        """Returns the process of the sampler on this port: a child of the supervisor's."""
        for task in Path(f"/proc/{self.supervisor}/task").iterdir():
            for child in (task / "children").read_text().split():
                what = Path(f"/proc/{child}/cmdline").read_bytes()
                where = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                if b"services.rollout" in what and f"HONE_ROLLOUT_PORT={port}".encode() in where:
                    return int(child)
        raise AssertionError(f"no sampler runs on port {port}")


async def _serving(sampler: Client) -> ServingWeights:
    try:
        return await sampler.get("/weights", ServingWeights, deadline_s=5.0)
    except HoneError:
        return ServingWeights()


@contextlib.asynccontextmanager
async def two_samplers(folder: Path) -> AsyncGenerator[Stack]:
    """A stack of `hone up` with two samplers."""
    model = [sys.executable, "-m", "deploy.tiny_model", "--out", str(folder / "task")]
    subprocess.run([*model, "--seed", "3"], check=True, cwd=ROOT)
    text = (ROOT / "deploy/jobs/demo_tiny.toml").read_text()
    (folder / "job.toml").write_text(text.replace(".hone/demo-tiny/task", str(folder / "task")))
    ports = on_free_ports(samplers=2)
    first = int(ports["HONE_ROLLOUT_PORT"])
    environment = {
        **os.environ,
        **ports,
        "HONE_ROLLOUT_REPLICAS": "2",
        "HONE_SHM_DIR": str(folder / "shm"),
        "PYTHONPATH": str(ROOT),
    }
    local: dict[str, Any] = {"cwd": folder, "env": environment, "check": True}
    command = [sys.executable, "-m", "deploy.local"]
    told = subprocess.run([*command, "up", "--output", "json"], stdout=subprocess.PIPE, **local)
    state = json.loads(told.stdout)
    async with contextlib.AsyncExitStack() as clients:
        clients.callback(lambda: subprocess.run([*command, "down"], **local))
        orchestrator = Client("orchestrator", state["urls"]["orchestrator"])
        samplers = {
            port: Client("rollout", f"http://127.0.0.1:{port}", patience_s=0.0)
            for port in (first, first + 1)
        }
        for client in (orchestrator, *samplers.values()):
            await clients.enter_async_context(client)
        job = load_job(folder / "job.toml", list(CHANGES))
        yield Stack(state["pid"], orchestrator, samplers, job)


def loads(folder: Path, port: int) -> Callable[[], bool]:
    """Returns what says whether the sampler has begun to fetch another version."""
    place = f"shm/*/.sampler-{socket.gethostname()}-{port}/*"
    before = {*folder.glob(place)}
    return lambda: bool({*folder.glob(place)} - before)


async def kill_while_sampling(stack: Stack, port: int, choose: random.Random) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(BACK_S):
        while "\nhone_rollout_running_requests 0.0\n" in (await http.get(url)).text:
            await asyncio.sleep(0.002)
    await asyncio.sleep(choose.random() * 0.05)
    os.kill(stack.pid(port), signal.SIGKILL)


async def kill_while_loading(stack: Stack, port: int, folder: Path, choose: random.Random) -> None:
    is_loading = loads(folder, port)
    async with asyncio.timeout(BACK_S):
        while not is_loading():
            await asyncio.sleep(0.001)
    await asyncio.sleep(choose.random() * 0.02)
    os.kill(stack.pid(port), signal.SIGKILL)


@pytest.mark.parametrize("seed", range(4))
async def test_every_job_ends_with_each_group_once(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    ended: list[tuple[JobRecord, tuple[Event, ...]]] = []
    async with two_samplers(tmp_path) as stack:
        enough = asyncio.Event()

        async def keep_working() -> None:
            while not enough.is_set():
                ended.append(await stack.run_job())

        working = asyncio.create_task(keep_working())
        for number in range(NUM_KILLS):
            await stack.all_serve()
            port = choose.choice([*stack.samplers])
            if number % 2:
                await kill_while_loading(stack, port, tmp_path, choose)
            else:
                await kill_while_sampling(stack, port, choose)
        enough.set()
        await working
    prompts = load_prompts(stack.job, Settings())
    said: list[str] = []
    seconds: list[float] = []
    for record, events in ended:
        assert (record.status, record.error, record.recoveries) == ("succeeded", None, 0)
        said += [event.message for event in events if event.message.startswith("sampler ")]
        warned = {event.message for event in events if event.level != "info"}
        assert not warned - {*said}, "only of samplers that come and go"
        times = [event.time for event in events if event.type == "step"]
        seconds += [after - before for before, after in itertools.pairwise(times)]
        folder = RunFolder(Path(record.run_dir))
        assert folder.batch_steps() == [*range(1, record.steps + 1)]
        assert [row.step for row in folder.metrics()] == [*range(record.steps + 1)]
        for step in folder.batch_steps():
            batch = folder.batch(step)
            assert batch.prompts == prompts.for_step(step)
            assert [len(group.rollouts) for group in batch.groups] == [8] * 8
            assert not [r for g in batch.groups for r in g.rollouts if r.went_wrong]
    print(f"{len(ended)} jobs, {NUM_KILLS} kills", *said, sep="\n  ")
    seconds.sort()
    longest = [f"{each:.1f}" for each in seconds[-NUM_KILLS:]]
    print(f"a step takes {seconds[len(seconds) // 2]:.1f} s, the longest {' '.join(longest)} s")
    assert sum(" is out: " in sentence for sentence in said) >= 1
