"""The stack of `compose.cpu.yaml` under a project name of its own, by the Compose that is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = "hone-test"
FOLDER = ROOT / ".hone/compose-test"
SERVICES = ("orchestrator", "rollout", "trainer", "reward")
IMAGES = {name: f"hone-{name}" for name in ("orchestrator", "reward")} | {
    name: f"hone-{name}-cpu" for name in ("rollout", "trainer")
}

TOKEN = "/run/hone/secrets/token"
BUILDKIT = {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}

COMMAND_S = 3600.0
"""More than a build takes."""

FIRST_CHILD = "read -r pid rest < /proc/1/task/1/children; kill -9 $pid"
"""What kills a container's service from inside. As pid 1 there is Docker's init, which then ends
too; Docker would not start again what `docker kill` ended."""


class Missing(Exception):
    """What this machine lacks, as a sentence."""


class Failed(Exception):
    """A promise that was not kept, as a sentence."""


def find_compose() -> list[str]:
    """Returns the command of Compose. Raises Missing without it, or without a daemon."""
    if shutil.which("docker") is None:
        raise Missing("there is no `docker` here: install Docker 20.10 or newer, with Compose")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        raise Missing(f"no Docker daemon answers at {where}: start one, or set DOCKER_HOST")
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    raise Missing(
        "there is neither `docker compose` nor `docker-compose` here: install one of them"
    )


class Stack:
    """Compose, and what it started. `base` and `redis` are images of this machine in the place of
    those that would be pulled; the build then uses this machine's network."""

    def __init__(self, base: str | None, redis: str | None, port: int) -> None:
        self._command = find_compose()
        self.port = port
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._files = ["compose.cpu.yaml"]
        if base or redis:
            own = FOLDER / "local.yaml"
            own.write_text(json.dumps(_overrides(base, redis)))
            self._files.append(str(own))

    def compose(
        self, *arguments: str, given: str | None = None, within_s: float = COMMAND_S
    ) -> str:
        """Returns what it printed. Raises Failed with what it said of its failure."""
        files = [part for file in self._files for part in ("-f", file)]
        variables = {"HONE_ORCHESTRATOR_PORT": str(self.port), **BUILDKIT}
        try:
            done = subprocess.run(
                [*self._command, "-p", PROJECT, *files, *arguments],
                cwd=ROOT,
                env=os.environ | variables,
                input=given,
                capture_output=True,
                text=True,
                timeout=within_s,
            )
        except subprocess.TimeoutExpired as error:
            said = f"{' '.join(arguments[:3])}: had not ended after {within_s:g} s"
            raise Failed(f"{said}; {self.unhealthy()}") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise Failed(f"{' '.join(arguments[:3])}: exit code {done.returncode}: {said}")
        return done.stdout

    def inside(self, service: str, *command: str, given: str | None = None) -> str:
        return self.compose("exec", "-T", service, *command, given=given)

    def python(self, service: str, code: str) -> str:
        return self.inside(service, "python", "-", given=code).strip()

    def token(self) -> str:
        return self.inside("orchestrator", "cat", TOKEN).strip()

    def containers(self, service: str) -> list[dict[str, object]]:
        """Returns what Docker says of each container of a service."""
        ids = self.compose("ps", "-q", service).split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def wait_healthy(self, services: Sequence[str], within_s: float) -> float:
        """Returns after how many seconds all containers of the services were healthy."""
        began = time.monotonic()
        while time.monotonic() < began + within_s:
            states = [it["State"] for name in services for it in self.containers(name)]
            health = [state.get("Health", {}).get("Status") for state in states]  # pyright: ignore
            if health and all(it == "healthy" for it in health):
                return time.monotonic() - began
            time.sleep(1)
        raise Failed(f"not all is healthy after {within_s:g} s: {self.unhealthy()}")

    def unhealthy(self) -> str:
        """Returns the containers that are not healthy, each with the last line of its log."""
        shown = docker(
            *("ps", "-a", "--filter", f"label=com.docker.compose.project={PROJECT}"),
            *("--format", "{{.Names}}\t{{.Status}}"),
        )
        said: list[str] = []
        for line in shown.splitlines():
            name, status = line.split("\t")
            if "(healthy)" not in status and "Exited (0)" not in status:
                logs = subprocess.run(
                    ["docker", "logs", "--tail", "1", name], capture_output=True, text=True
                )
                said.append(f"{name} is {status}: {(logs.stdout + logs.stderr).strip()}")
        return "; ".join(said)

    def restarts(self, service: str) -> int:
        return sum(int(str(it["RestartCount"])) for it in self.containers(service))

    def kill(self, service: str) -> None:
        """Kills the service's process in its first container."""
        (container, *_) = self.containers(service)
        docker("exec", str(container["Id"]), "sh", "-c", FIRST_CHILD)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"docker {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def _overrides(base: str | None, redis: str | None) -> dict[str, object]:
    """Returns a compose file with this machine's images."""
    services: dict[str, object] = {}
    if base:
        build = {"build": {"args": {"BASE": base}, "network": "host"}}
        services |= dict.fromkeys(("init", *SERVICES), build)
    if redis:
        services["redis"] = {"image": redis}
    return {"services": services}
