"""`hone work` beside the orchestrator's own application, as processes: agents train a job, and
workers and the orchestrator die meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import hone
from services.orchestrator.extensions.agents import worker_episodes as agents
from shared.host.processes import free_port
from shared.settings import Settings
from shared.wire import Event, JobRecord, Part
from tests.support import orchestrator_process
from tests.support.fake_services import FakeServices
from tests.support.served_stack import ServedStack, served_stack

AGENT = """
import asyncio, os
import httpx2 as httpx

async def run(row, base_url, api_key):
    headers = {"authorization": f"Bearer {api_key}"}
    asked = {"messages": [{"role": "user", "content": row["prompt"]}]}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        answer = await http.post(f"{base_url}/chat/completions", json=asked)
        answer.raise_for_status()
    await asyncio.sleep(float(os.environ.get("SLEEPS", "0")))
    said = answer.json()["choices"][0]["message"]["content"]
    return {"reward": said == "right", "metrics": {"answer": row["answer"]}}
"""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedStack]:
    monkeypatch.setattr(agents, "LEASE_S", 2.0)
    with served_stack(tmp_path / "stack") as stack:
        stack.fakes.grade = graded
        yield stack


def graded(item: Any) -> Part:
    value = item.info.get("reward")
    return Part(value=value, verdict="skipped" if value is None else "ok")


def job(folder: Path, **keys: Any) -> dict[str, Any]:
    (folder / "agent.py").write_text(AGENT)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(9)))
    return {
        "name": "agents",
        "model": "owner/model",
        "steps": 2,
        "data": {"train": str(rows)},
        "environment": {"kind": "worker"},
        "sampling": {"prompts_per_step": 3, "group_size": 2, "max_tokens": 4},
        **keys,
    }


@contextlib.contextmanager
def working(folder: Path, url: str, *options: str, **env: str) -> Generator[subprocess.Popen[str]]:
    """A worker with `agent.py` of the folder, or with another agent after `--`."""
    words = options if "--" in options else (*options, str(folder / "agent.py"))
    process = subprocess.Popen(
        [sys.executable, "-m", "hone.cli", "work", "-o", "json", *words],
        env={**os.environ, "HONE_ORCHESTRATOR_URL": url, **env},
        stdout=subprocess.PIPE,
        stderr=(folder / "worker.log").open("a"),
        text=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def until(true: Callable[[], Any], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def rewards(client: hone.Client, record: JobRecord) -> set[float | None]:
    return {each.reward for step in (1, 2) for each in client.rollouts(record.id, step)}


def test_agents_elsewhere_train_a_job(stack: ServedStack, tmp_path: Path) -> None:
    with hone.Client(stack.url) as client:
        record = client.submit(job(tmp_path))
        with working(tmp_path, stack.url, "--job", record.id, "-c", "4") as worker:
            assert client.wait(record.id, timeout_s=60).status == "succeeded"
            told = json.loads(worker.communicate(timeout=60)[0])
        assert worker.returncode == 0, "it ends with its job"
        assert told["done"] >= 12 and told["failed"] == told["lost"] == 0
        assert rewards(client, record) <= {0.0, 1.0}
        row = client.metrics(record.id)[-1].metrics
        assert 0 <= row["agent/mean_answer"] <= 8 and row["conversations/mean_turns"] == 1
        assert row["environment_failures"] == 0


def test_episodes_of_dead_and_frozen_workers_go_to_others(
    stack: ServedStack, tmp_path: Path
) -> None:
    with hone.Client(stack.url) as client, contextlib.ExitStack() as workers:
        record = client.submit(job(tmp_path))
        begin = workers.enter_context
        killed = begin(working(tmp_path, stack.url, "-c", "2", SLEEPS="600"))
        until(lambda: stack.fakes.calls["generate"] == 2)
        killed.kill()
        frozen = begin(working(tmp_path, stack.url, "-c", "2", SLEEPS="4"))
        until(lambda: stack.fakes.calls["generate"] == 4)
        frozen.send_signal(signal.SIGSTOP)
        stopped = begin(working(tmp_path, stack.url, "-c", "2", SLEEPS="600"))
        until(lambda: stack.fakes.calls["generate"] == 6)
        stopped.terminate()
        began = time.monotonic()
        assert json.loads(stopped.communicate(timeout=30)[0])["done"] == 0
        assert stopped.returncode == 130 and time.monotonic() - began < 15
        begin(working(tmp_path, stack.url, "--job", record.id))
        assert client.wait(record.id, timeout_s=60).status == "succeeded"
        frozen.send_signal(signal.SIGCONT)
        time.sleep(5)
        frozen.terminate()
        assert json.loads(frozen.communicate(timeout=30)[0])["done"] == 0, "its results were late"
        assert rewards(client, record) <= {0.0, 1.0}


def test_a_job_whose_agents_fail_pauses_with_their_words(
    stack: ServedStack, tmp_path: Path
) -> None:
    command = ("--", "sh", "-c", "echo no browser here >&2; exit 3")
    with hone.Client(stack.url) as client:
        record = client.submit(job(tmp_path))
        with working(tmp_path, stack.url, *command):
            assert client.wait(record.id, timeout_s=60).status == "paused"
        said = [event.message for event in events(client, record)]
        assert any(
            "the agent failed 3 times: 'sh' exited with 3: no browser" in one for one in said
        )


def events(client: hone.Client, record: JobRecord) -> list[Event]:
    return [*client.events(record.id)]


async def test_a_worker_outlives_the_orchestrator(redis_url: str, tmp_path: Path) -> None:
    own = Settings(runs_dir=tmp_path / "runs", shm_dir=tmp_path / "shm", lease_s=2)
    fakes, port = FakeServices(own), free_port()
    fakes.grade = graded
    async with fakes.running(own) as settings:
        given = {
            f"HONE_{name.upper()}": str(value)
            for name, value in settings.model_dump(exclude_unset=True).items()
        } | {"HONE_ORCHESTRATOR_PORT": str(port)}
        url = f"http://127.0.0.1:{port}"
        first = await orchestrator_process.start(redis_url, **given)
        try:
            with working(tmp_path, url, SLEEPS="1") as worker:
                async with hone.AsyncClient(url) as client:
                    record = await client.submit(job(tmp_path))
                    async with asyncio.timeout(60):
                        while not fakes.calls["generate"]:
                            await asyncio.sleep(0.05)
                    first.kill()
                    await first.wait()
                    first = await orchestrator_process.start(redis_url, **given)
                    ended = await client.wait(record.id, timeout_s=90)
                assert ended.status == "succeeded" and worker.poll() is None
        finally:
            first.kill()
            await first.wait()
    log = (tmp_path / "worker.log").read_text()
    assert "asking again until it answers" in log and "the orchestrator answers again" in log
