"""A stack of `hone up` with two trainers, each with a sampler: two jobs at once, real engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.machine import on_free_ports
from shared.http.client import Client
from shared.job.file import load_job
from shared.wire import TERMINAL, JobRecord, SubmitRequest

pytestmark = [pytest.mark.soak, pytest.mark.system, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
CHANGES = (
    "steps=6",
    "sampling.prompts_per_step=8",
    "evaluation.every=1000",
    "evaluation.num_prompts=8",
)


async def test_two_jobs_train_at_once_and_a_third_one_waits(tmp_path: Path) -> None:
    model = [sys.executable, "-m", "deploy.tiny_model", "--out", str(tmp_path / "task")]
    subprocess.run([*model, "--seed", "3"], check=True, cwd=ROOT)
    text = (ROOT / "deploy/jobs/demo_tiny.toml").read_text()
    (tmp_path / "job.toml").write_text(text.replace(".hone/demo-tiny/task", str(tmp_path / "task")))
    environment = {
        **os.environ,
        **on_free_ports(trainers=2, samplers=2),
        "HONE_TRAINERS": "2",
        "HONE_SHM_DIR": str(tmp_path / "shm"),
        "PYTHONPATH": str(ROOT),
    }
    local: dict[str, Any] = {"cwd": tmp_path, "env": environment, "check": True}
    command = [sys.executable, "-m", "deploy.local"]
    told = subprocess.run([*command, "up", "--output", "json"], stdout=subprocess.PIPE, **local)
    try:
        url = json.loads(told.stdout)["urls"]["orchestrator"]
        async with Client("orchestrator", url) as client:
            body = SubmitRequest(job=load_job(tmp_path / "job.toml", list(CHANGES)))
            ids = [
                (await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)).id
                for _ in range(3)
            ]
            records = [await get(client, job_id) for job_id in ids]
            at_once: set[str] = set()
            places: set[int | None] = set()
            while any(record.status not in (*TERMINAL, "paused") for record in records):
                await asyncio.sleep(0.5)
                records = [await get(client, job_id) for job_id in ids]
                training = [record for record in records if record.status == "running"]
                if len(training) == 2:
                    at_once |= {record.id for record in training}
                    places.add(records[2].place)
    finally:
        subprocess.run([*command, "down"], **local)
    assert [(record.status, record.error) for record in records] == [("succeeded", None)] * 3
    assert at_once >= set(ids[:2]) and places >= {1}
    assert records[0].trainer != records[1].trainer
    assert not (tmp_path / "shm").exists() or not any((tmp_path / "shm").iterdir())


async def get(client: Client, job_id: str) -> JobRecord:
    return await client.get(f"/v1/jobs/{job_id}", JobRecord)
