"""OpenEnv servers in containers of an image: the orchestrator's side, against a `docker` of the
test and servers of frames. The real daemon is in tests/compat."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import ValidationError

from services.orchestrator.api import jobs
from services.orchestrator.api.checking import Checks
from services.orchestrator.api.looking import Looked
from services.orchestrator.environments import images
from services.orchestrator.environments.environment import Lost, Unreachable
from services.orchestrator.environments.images import (
    Containers,
    check_image_allowed,
    keep_swept,
    sweep,
)
from services.orchestrator.environments.openenv import OpenEnv
from services.orchestrator.pool.services import Services
from services.orchestrator.tasks import stop
from shared.errors import BadRequest
from shared.http.gate import caller
from shared.job import EnvironmentSpec, Job
from shared.job.file import make_job
from shared.settings import Settings
from shared.wire import ApiKey, Fenced, Prompt
from tests.support.fake_docker import FakeDocker
from tests.support.openenv_server import GuessServer

ROW = {"secret": 7, "prompt": "Guess."}


@pytest.fixture
async def servers() -> AsyncGenerator[list[GuessServer]]:
    async with GuessServer().running() as one, GuessServer().running() as two:
        yield [one, two]


@pytest.fixture
def docker(
    tmp_path: Path, servers: list[GuessServer], monkeypatch: pytest.MonkeyPatch
) -> FakeDocker:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return FakeDocker(tmp_path, *(int(server.url.rpartition(":")[2]) for server in servers))


@contextlib.asynccontextmanager
async def environment(
    attempt: int = 1, identity: str | None = "redis", allowed: str = "game:*", **spec: Any
) -> AsyncGenerator[OpenEnv]:
    given = EnvironmentSpec(kind="openenv", **{"image": "game:1", "replicas": 2, **spec})
    settings = Settings(allowed_environment_images=allowed)  # pyright: ignore[reportArgumentType]
    containers = Containers(given, settings, Fenced(job_id="j", attempt=attempt), identity)
    made = OpenEnv(given, settings, containers)
    try:
        yield made
    finally:
        await made.shut()


async def test_a_jobs_containers_begin_and_end_with_it(
    docker: FakeDocker, servers: list[GuessServer]
) -> None:
    async with environment(variables={"LEVEL": "2"}) as made:
        await asyncio.gather(made.open("a", ROW), made.open("b", ROW))
        assert [len(server.resets) for server in servers] == [1, 1]
        assert docker.names == ["hone-j-1-0", "hone-j-1-1"]
        words = " ".join(docker.calls("run")[0])
        assert words.endswith("--env LEVEL=2 game:1")
        for part in (
            "--publish 127.0.0.1::8000",
            "--cap-drop ALL --security-opt no-new-privileges",
            "--memory 2048m --memory-swap 2048m --cpus 1 --pids-limit 512",
            "--pull never --network hone-environments",
        ):
            assert part in words
    assert docker.names == []


async def test_the_next_attempt_takes_the_containers_over(docker: FakeDocker) -> None:
    async with environment(1) as killed:
        await killed.validate(ROW)
        async with environment(2) as made:
            await made.validate(ROW)
            assert docker.names == ["hone-j-2-0", "hone-j-2-1"]
            await killed.shut()
            assert docker.names == ["hone-j-2-0", "hone-j-2-1"], "they are not its own any more"
        assert docker.names == [] and len(docker.calls("run")) == 2


async def test_a_superseded_attempt_takes_no_container_back(docker: FakeDocker) -> None:
    async with environment(1, replicas=1) as killed:
        await killed.validate(ROW)
        async with environment(2, replicas=1) as made:
            await made.validate(ROW)
            containers = killed._containers
            assert containers
            with pytest.raises(Unreachable, match="a newer attempt than 1 has the job's container"):
                await containers.up(0, killed._client)
            await killed.shut()
            assert docker.names == ["hone-j-2-0"] and len(docker.calls("run")) == 1


@pytest.mark.parametrize("command", ["rename", "start"])
async def test_a_container_that_cannot_be_taken_over_is_made_anew(
    docker: FakeDocker, command: str
) -> None:
    async with environment(1, replicas=1) as killed:
        await killed.validate(ROW)
        with docker.state() as state:
            state["fails"] = [command]
        async with environment(2, replicas=1) as made:
            await made.validate(ROW)
            assert docker.names == ["hone-j-2-0"] and len(docker.calls("run")) == 2


async def test_containers_of_another_image_are_not_taken_over(docker: FakeDocker) -> None:
    async with environment(1) as killed:
        await killed.validate(ROW)
        with docker.state() as state:
            state["images"].append("game:2")
        async with environment(2, image="game:2") as made:
            await made.validate(ROW)
            assert [call[-1] for call in docker.calls("run")] == ["game:1"] * 2 + ["game:2"] * 2
            assert docker.names == ["hone-j-2-0", "hone-j-2-1"]


async def test_a_container_that_ended_is_started_again(
    docker: FakeDocker, servers: list[GuessServer]
) -> None:
    async with environment(replicas=1) as made:
        await made.validate(ROW)
        with docker.state() as state:  # as if it had another port after it was started
            state["all"]["hone-j-1-0"]["port"] = int(servers[1].url.rpartition(":")[2])
        (replica,) = made._replicas.all
        replica.url = "http://127.0.0.1:9"
        await asyncio.wait_for(made.open("a", ROW), 60)
        assert servers[1].resets == [ROW] and len(docker.calls("start")) == 1


async def test_a_container_that_stays_full_without_an_episode_is_restarted(
    docker: FakeDocker, servers: list[GuessServer]
) -> None:
    servers[0].capacity = 0
    async with environment(replicas=1) as made:
        await made.validate(ROW)
        made._spec = made._spec.model_copy(update={"boot_s": 0.5})
        with pytest.raises(Lost, match=r"no room: full; this has lasted 0.5 s \(boot_s\)"):
            await asyncio.wait_for(made.open("a", ROW), 60)
        made._spec = made._spec.model_copy(update={"boot_s": 60.0})
        servers[0].capacity = 1  # as if the restarted one had let its episodes go
        await asyncio.wait_for(made.open("b", ROW), 60)
        assert servers[0].resets == [ROW] and docker.calls("restart")


async def test_a_container_that_somebody_removed_is_made_again(docker: FakeDocker) -> None:
    async with environment(replicas=1) as made:
        await made.validate(ROW)
        await images.docker("rm", "hone-j-1-0")
        (replica,) = made._replicas.all
        replica.url = "http://127.0.0.1:9"
        await asyncio.wait_for(made.open("a", ROW), 60)
        assert docker.names == ["hone-j-1-0"] and len(docker.calls("run")) == 2


async def test_docker_is_asked_seldom_while_a_few_containers_start(
    docker: FakeDocker, servers: list[GuessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_STARTING", 1)
    monkeypatch.setattr(images, "LOOK_S", 0.01)
    for server in servers:
        server.unhealthy = 20
    async with environment() as made:
        await made.validate(ROW)
        assert [server.unhealthy for server in servers] == [0, 0]
        with docker.state() as state:
            kinds = [call[0] for call in state["calls"]]
    assert kinds.count("port") == 2 and kinds.count("inspect") <= 4
    begun = [kind for kind in kinds if kind in ("run", "port")]
    assert begun == ["run", "port", "run", "port"], "the second one waits for the first"


def job_of_an_image(**environment: Any) -> Job:
    given = {"kind": "openenv", "image": "game:1", **environment}
    table = {"name": "game", "model": "m", "steps": 1, "data": {"train": "rows"}}
    return make_job({**table, "environment": given}, (), "test")


async def test_an_image_that_is_slow_is_tried_for_a_while_and_not_refused(
    docker: FakeDocker, servers: list[GuessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "TRIAL_S", 5.0)
    for server in servers:
        server.unhealthy = 10_000
    job = job_of_an_image(boot_s=3600)
    settings = Settings(allowed_environment_images="game:*")  # pyright: ignore[reportArgumentType]
    looked = Looked((), 1, 0, {}, (Prompt(index=0, content="?", row=ROW),), ())
    services = Services(job, settings)
    try:
        found = await asyncio.wait_for(jobs._with_environment(job, looked, services), 60)
    finally:
        await services.close()
    assert found.warnings == (
        "environment.image 'game:1' was not tried to the end: it was not reset within 5 s; what is "
        "wrong with it shows only when the job begins",
    )
    assert docker.names == []
    (run,) = docker.calls("run")
    (until,) = (int(word.partition("=")[2]) for word in run if word.startswith("hone.until="))
    assert until - time.time() <= 240, "no one needs it longer, whatever boot_s is"


async def test_a_key_that_tries_slow_images_delays_no_other(settings: Settings) -> None:
    checks, order = Checks(settings), list[str]()

    async def tried(key: str) -> None:
        caller.set(ApiKey(name=key, access="full", created_at=0))
        async with checks.turn_to_try(job_of_an_image()):
            order.append(key)
            await asyncio.sleep(60)

    trying = [asyncio.create_task(tried(key)) for key in ("slow", "slow", "quick")]
    await asyncio.wait(trying, timeout=0.2)
    assert order == ["slow", "quick"]
    await stop(*trying)
    async with checks.turn_to_try(job_of_an_image()):
        pass


async def test_submitting_tries_one_container_and_removes_it(docker: FakeDocker) -> None:
    async with environment(identity=None) as made:
        found = await made.validate(ROW)
        assert found.tools and found.has_reward
        (name,) = docker.names
        assert name.startswith("hone-trial-")
    assert docker.names == []


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        (
            {"away": True},
            Unreachable,
            r"environment.image is 'game:1', and no Docker daemon answers the orchestrator: "
            r"'docker version' says 'Cannot connect to the Docker daemon at .*'; expected one on "
            r"its machine, or environment.url",
        ),
        (
            {"images": []},
            BadRequest,
            r"which Docker does not have here; expected one of `docker images`: `docker pull game:",
        ),
        (
            {"ends": "false 3", "log": "starting\nno such module"},
            Unreachable,
            r"'game:1' ended with code 3 before it answered GET /health on port 8000; its log ends "
            r"with 'starting \| no such module'",
        ),
        ({"ends": "true 137"}, Unreachable, "was killed for more than 2048 MiB of memory before"),
        (
            {"ports": []},
            Unreachable,
            r"did not answer GET /health on port 8000 within 1.5 s \(boot_s\)",
        ),
        (
            {"refuses": "network hone-environments not found"},
            Unreachable,
            r"^'docker run' says 'docker: Error response from daemon: network hone-environments "
            r"not found\.'$",
        ),
    ],
    ids=["no daemon", "no image", "it ends", "out of memory", "it never answers", "refused"],
)
async def test_what_keeps_containers_from_starting_is_said(
    docker: FakeDocker, fault: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with docker.state() as state:
        state |= fault
        state["ports"] = [9] if not state["ports"] or "ends" in fault else state["ports"]
    async with environment(boot_s=1.5 if "ports" in fault else 60) as made:
        with pytest.raises(error, match=reason):
            await made.validate(ROW)
        assert "away" in fault or len(docker.names) < 2, "one that failed is made anew next time"


async def test_a_machine_without_docker_says_so(
    servers: list[GuessServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with environment() as made:
        with pytest.raises(Unreachable, match="No such file or directory: 'docker'"):
            await made.validate(ROW)


async def test_a_daemon_that_is_away_loses_episodes_and_comes_back(
    docker: FakeDocker, servers: list[GuessServer]
) -> None:
    async with environment(replicas=1, boot_s=60) as made:
        await made.validate(ROW)
        (replica,) = made._replicas.all
        replica.url, url = "http://127.0.0.1:9", replica.url
        made._spec = made._spec.model_copy(update={"boot_s": 1.0})
        with docker.state() as state:
            state["away"] = True
        with pytest.raises(Lost, match="cannot be reached"):
            await made.open("a", ROW)
        with docker.state() as state:
            state["away"] = False
        made._spec = made._spec.model_copy(update={"boot_s": 60.0})
        await made.open("b", ROW)
        assert replica.url == url


def statuses(**known: str | None) -> Callable[[str], Awaitable[str | None]]:
    async def status(job: str) -> str | None:
        return known.get(job)

    return status


async def test_a_sweep_removes_what_no_running_or_waiting_job_has(docker: FakeDocker) -> None:
    later = f"{time.time() + 60:.0f}"
    every = {
        "hone-runs-1-0": ("redis", "runs", ""),
        "hone-waits-1-0": ("redis", "waits", ""),
        "hone-paused-1-0": ("redis", "paused", ""),
        "hone-ended-1-0": ("redis", "ended", ""),
        "hone-forgotten-1-0": ("redis", "forgotten", ""),
        "hone-theirs-1-0": ("another", "theirs", ""),
        "hone-trial-a": ("", "trial-a", "100"),
        "hone-trial-b": ("", "trial-b", later),
        "someone-elses": ("redis", "ended", ""),
    }
    with docker.state() as state:
        for name, (owner, job, until) in every.items():
            labels = {"hone.owner": owner, "hone.job": job, "hone.until": until}
            state["all"][name] = {"id": f"id-{name}", "labels": labels, "port": 1, "ends": None}
    known = statuses(runs="running", waits="queued", paused="paused", ended="succeeded")
    await sweep("redis", known)
    left = ["hone-runs-1-0", "hone-theirs-1-0", "hone-trial-b", "hone-waits-1-0", "someone-elses"]
    assert docker.names == left


def left_behind(docker: FakeDocker, *names: str) -> None:
    """Makes containers of a job that ended."""
    labels = {"hone.owner": "redis", "hone.job": "ended", "hone.until": ""}
    with docker.state() as state:
        for name in names:
            state["all"][name] = {"id": f"id-{name}", "labels": labels, "port": 1, "ends": None}


async def test_a_container_that_stays_does_not_end_the_sweep(
    docker: FakeDocker,
) -> None:
    left_behind(docker, "hone-ended-1-0", "hone-ended-1-1")
    with docker.state() as state:
        state["stuck"] = ["id-hone-ended-1-0"]
    with structlog.testing.capture_logs() as logged:
        await sweep("redis", statuses(ended="succeeded"))
    assert docker.names == ["hone-ended-1-0"]
    said = [(each["event"], each["container"]) for each in logged]
    assert said == [
        ("container not swept", "hone-ended-1-0"),
        ("container swept", "hone-ended-1-1"),
    ]
    assert "removal of container id-hone-ended-1-0 failed" in logged[0]["reason"]


async def test_sweeping_goes_on_after_any_error(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "SWEEP_S", 0.02)
    left_behind(docker, "hone-ended-1-0")
    asked: list[str] = []

    async def status(job: str) -> str | None:
        asked.append(job)
        if len(asked) == 1:
            raise RuntimeError("a fault")
        return "succeeded"

    settings = Settings(allowed_environment_images="game:*")  # pyright: ignore[reportArgumentType]
    sweeping = asyncio.create_task(keep_swept(lambda: "redis", status, settings))
    async with asyncio.timeout(30):
        while docker.names:
            await asyncio.sleep(0.02)
    assert not sweeping.done()
    sweeping.cancel()


async def test_containers_are_swept_after_the_setting_was_emptied(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(images, "SWEEP_S", 0.02)
    left_behind(docker, "hone-ended-1-0", "hone-ended-1-1")
    with docker.state() as state:
        state["away"] = True
    sweeping = asyncio.create_task(keep_swept(lambda: "redis", statuses(), Settings()))
    async with asyncio.timeout(60):
        while not docker.calls("ps"):
            await asyncio.sleep(0.02)
        with docker.state() as state:
            state["away"] = False
        await sweeping
    assert docker.names == []
    (tmp_path / "docker").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    await asyncio.wait_for(keep_swept(lambda: "redis", statuses(), Settings()), 10)


async def test_a_command_that_hangs_is_killed(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(images, "COMMAND_S", 0.3)
    with pytest.raises(images.DockerFailed, match=r"'docker version' says 'nothing within 0\.3 s'"):
        await images.docker("version")


@pytest.mark.parametrize(
    ("image", "patterns", "allowed"),
    [
        ("game:1", "", False),
        ("game:1", "game:1", True),
        ("game:2", "game:1", False),
        ("hub.example.org/envs/game:1", "x, hub.example.org/envs/*", True),
        ("hub.example.org.evil/envs/game:1", "hub.example.org/envs/*", False),
    ],
)
def test_jobs_name_only_images_of_the_setting(image: str, patterns: Any, allowed: bool) -> None:
    settings = Settings(allowed_environment_images=patterns)
    if allowed:
        check_image_allowed(image, settings)
        return
    with pytest.raises(BadRequest, match=rf"image is '{image}'.*HONE_ALLOWED_ENVIRONMENT_IMAGES"):
        check_image_allowed(image, settings)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"image": "game"}, r"got 'game'; expected a name with a tag, as in echo-env:1.0"),
        ({"image": "--privileged:1"}, "expected a name with a tag"),
        ({"image": "game:1 --privileged"}, "expected a name with a tag"),
        ({"image": "game:1", "url": "http://127.0.0.1:1"}, "got url and image; expected one"),
        ({"url": "http://127.0.0.1:1", "replicas": 2}, "are of the containers of image"),
        ({"image": "game:1", "replicas": 0}, "greater than or equal to 1"),
        ({"image": "game:1", "variables": {"A=B": "c"}}, "got 'A=B'; expected a name of letters"),
        ({"image": "game:1", "tools": ["a"]}, "got tools too"),
        ({}, 'kind "openenv" needs url, or image; url is missing'),
    ],
)
def test_images_that_cannot_be_meant_are_refused(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EnvironmentSpec(kind="openenv", **spec)
    digest = f"hub:5000/envs/game@sha256:{'0' * 64}"
    assert EnvironmentSpec(kind="openenv", image=digest).image == digest
