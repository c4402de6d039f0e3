"""The online client of the package `areal` drives the orchestrator's routes: its retries, its
headers and its bodies, in an environment without torch."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import SecretStr

import hone
from services.orchestrator.runs.folder import RunFolder
from tests.compat.packages import ROOT, python_with
from tests.contract.test_pushed import pushed_job
from tests.support.served_stack import served_stack

pytestmark = [pytest.mark.compat, pytest.mark.timeout(600)]

STEPS = 2
TOKEN = "the-token-of-the-stack"


def wait_until_open(url: str) -> None:
    """Waits until sessions can be started, and leaves none open."""
    until = time.monotonic() + 120
    with httpx.Client(base_url=f"{url}/v1/rl/") as http:
        while True:
            own = {"authorization": f"Bearer {TOKEN}"}
            answer = http.post("start_session", json={"task_id": "none"}, headers=own)
            if answer.status_code == 200:
                break
            assert answer.status_code == 409 and time.monotonic() < until, answer.text
            time.sleep(0.2)
        key = answer.json()["api_key"]
        http.post("end_session", json={}, headers={"authorization": f"Bearer {key}"})


def test_sessions_of_its_client_are_trained_on(tmp_path: Path) -> None:
    python = python_with("areal", alone=True)
    sampling = {"prompts_per_step": 1, "group_size": 2, "max_tokens": 8}
    job = pushed_job(tmp_path, sampling=sampling, steps=STEPS, max_staleness=1)
    with (
        served_stack(tmp_path, token=SecretStr(TOKEN)) as stack,
        hone.Client(stack.url, token=TOKEN) as client,
    ):
        record = client.submit(job)
        wait_until_open(stack.url)
        words = [f"{stack.url}/v1", TOKEN, str(2 * STEPS)]
        played = subprocess.run(
            [str(python), str(ROOT / "tests/compat/areal_sessions.py"), *words],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert played.returncode == 0, played.stderr[-3000:]
        assert client.wait(record.id, timeout_s=120).status == "succeeded"
        folder = RunFolder(Path(record.run_dir))
        for step in (1, STEPS):
            assert [score.value for score in folder.batch(step).scores[0]] == [0.75, -0.75]
