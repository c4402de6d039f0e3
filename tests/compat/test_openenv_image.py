"""An image of a server of the package `openenv`, unmodified, on a real Docker daemon: what its
containers may do, what becomes of them, and a model that learns in them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import hone
from services.orchestrator.environments.images import Containers
from services.orchestrator.environments.openenv import OpenEnv
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import Fenced, ToolCall
from tests.compat.game import game_stack, write_job
from tests.compat.packages import ROOT, python_with
from tests.support.docker_image import base_image, build, is_there, skip_without_docker

pytestmark = [pytest.mark.compat, pytest.mark.timeout(1800)]

ROW = {"secret": 7, "prompt": "Find the number."}
STEPS = 6
WAIT_S = 1200.0
MEND_S = 60.0

DOCKERFILE = """
FROM {base}
COPY packages /packages
COPY openenv_game.py /
ENV PYTHONPATH=/packages:/ HOME=/tmp
RUN python3 -c "import openenv_game"
CMD ["python3", "-m", "uvicorn", "--factory", "openenv_game:app", \\
     "--host", "0.0.0.0", "--port", "8000", "--log-level", "warning"]
"""

RIGHTS = """
import socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
print(int(status["CapEff"], 16), status["NoNewPrivs"].strip(), status["Seccomp"].strip())
try:
    socket.create_connection(("1.1.1.1", 53), timeout=3)
except OSError:
    print("no route")
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    skip_without_docker()
    game, pins = ROOT / "tests/compat/openenv_game.py", ROOT / "requirements/compat/openenv.txt"
    parts = "".join([game.read_text(), pins.read_text(), DOCKERFILE])
    name = f"hone-test-openenv:{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    if not is_there(name):
        folder = tmp_path_factory.mktemp("image")
        (packages,) = python_with("openenv").parents[1].glob("lib/*/site-packages")
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(packages, folder / "packages", ignore=left_out)
        shutil.copy(game, folder)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(base=base_image(folder)))
        build(name, folder)
    return name


@contextlib.asynccontextmanager
async def environment(image: str, attempt: int) -> AsyncGenerator[OpenEnv]:
    spec = EnvironmentSpec(kind="openenv", image=image, replicas=2, boot_s=600, step_s=120)
    settings = Settings(allowed_environment_images=("hone-test-*",))
    containers = Containers(spec, settings, Fenced(job_id="j", attempt=attempt), "compat-test")
    made = OpenEnv(spec, settings, containers)
    try:
        yield made
    finally:
        await made.shut()


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout


def containers_of(label: str) -> list[str]:
    """Returns the ids of all containers with a label, in order."""
    return sorted(docker("ps", "--all", "--quiet", "--filter", f"label={label}").split())


def inspected(id: str) -> dict[str, Any]:
    return json.loads(docker("inspect", id))[0]


async def play(made: OpenEnv, id: str) -> None:
    opened = await made.open(id, ROW)
    assert opened.observation == " It is from 0 to 31."
    calls = [ToolCall(name="step", arguments={"number": number}) for number in (3, 7)]
    seen = await made.step(id, 0, tuple(calls))
    assert [result.content for result in seen.results] == ["higher", "correct"]
    assert seen.done and seen.reward == 1.0
    await made.close(id, rewarded=True)


async def test_its_containers_are_confined_and_taken_over(image: str) -> None:
    mine = "hone.owner=compat-test"
    async with environment(image, 1) as killed:
        await asyncio.gather(play(killed, "a"), play(killed, "b"))
        ids = containers_of(mine)
        assert len(ids) == 2
        for id in ids:
            found = inspected(id)
            (port,) = found["NetworkSettings"]["Ports"]["8000/tcp"]
            assert port["HostIp"] == "127.0.0.1"
            host = found["HostConfig"]
            assert host["Memory"] == 2048 << 20 and host["PidsLimit"] == 512
            assert host["NanoCpus"] == 10**9 and not host["Privileged"]
            assert docker("exec", id, "python3", "-c", RIGHTS).split("\n")[:2] == [
                "0 1 2",
                "no route",
            ]
        async with environment(image, 2) as made:
            await play(made, "a")
            await killed.shut()
            assert containers_of(mine) == ids, "the second attempt has them"
            for id in ids:
                docker("kill", id)
            await play(made, "b")
            assert containers_of(mine) == ids, "they were started again"
            docker("rm", "--force", *ids)
            until = time.monotonic() + MEND_S
            while len(containers_of(mine)) < 2:  # an episode that meets it has it made again
                assert time.monotonic() < until
                await asyncio.gather(play(made, "c"), play(made, "d"))
            assert not {*containers_of(mine)} & {*ids}
    assert containers_of(mine) == []


def orchestrator_below(supervisor: int) -> int:
    """Returns the process of the orchestrator that a supervisor started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
            if parent == supervisor and "services.orchestrator" in command:
                return int(folder.name)
    raise AssertionError(f"process {supervisor} has no orchestrator")


@pytest.mark.system
def test_a_model_learns_though_the_orchestrator_is_killed(image: str, tmp_path: Path) -> None:
    environment = {"kind": "openenv", "image": image, "replicas": 2}
    write_job(tmp_path, "image", environment, tool="step", steps=STEPS)
    with game_stack(tmp_path, HONE_ALLOWED_ENVIRONMENT_IMAGES="hone-test-*") as stack:
        stack.hone("submit", "job.toml", "--dry-run")
        assert containers_of("hone.job") == [], "the container that tried the image is gone"
        with hone.Client(stack.url) as client:
            record = client.submit(hone.load_job(tmp_path / "job.toml"))
            until = time.monotonic() + WAIT_S
            while client.get(record.id).step < 1:
                assert time.monotonic() < until
                time.sleep(0.5)
            before = containers_of(f"hone.job={record.id}")
            began = [inspected(id)["State"]["StartedAt"] for id in before]
            os.kill(orchestrator_below(stack.pid), signal.SIGKILL)
            while client.get(record.id).attempts < 2 or client.get(record.id).step < 2:
                assert time.monotonic() < until
                time.sleep(0.5)
            assert containers_of(f"hone.job={record.id}") == before and len(before) == 2
            assert [inspected(id)["State"]["StartedAt"] for id in before] == began
            ended = client.wait(record.id, timeout_s=WAIT_S)
            assert ended.status == "succeeded"
            until = time.monotonic() + MEND_S
            while containers_of("hone.job"):
                assert time.monotonic() < until
                time.sleep(0.5)
        summary = stack.summary("image")
    print(f"held out {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}")
    assert summary["steps"] == STEPS
    assert summary["eval_after"] > summary["eval_before"] + 0.1, summary
