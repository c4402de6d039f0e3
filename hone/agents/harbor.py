"""Task folders of Harbor as episodes, as they are published: a description, an instruction, a
Dockerfile and a test script. The agent is a command in the task's container.

    run = tasks("my-agent --say-nothing", root="tasks")   # in agent.py, for `hone work agent.py`

    python -m hone.agents.harbor FOLDER... > rows.jsonl         # the rows of the job

The command finds the model as any command of `hone work` does, and the instruction on its stdin.
Then the container is restarted, so that nothing which the agent began still runs, and the tests
run, and write the reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shlex
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hone.agents import commands
from hone.agents.commands import reward_in
from hone.agents.results import AgentFailed
from shared.errors import BadRequest

TASK = "task"
"""The column of a row that has the path of the folder, absolute or from the root on."""

VERIFIER = "/logs/verifier"
WHOLE = ("task.toml", "instruction.md", "tests/test.sh")
AGENT_S, BUILD_S, TESTS_S = 900.0, 600.0, 600.0
"""Seconds that a task has that sets no limits of its own."""

DOCKER_S = 120.0
"""Seconds that Docker has for anything else."""

SLACK_S = 10 * DOCKER_S
"""Seconds that a container has beside its agent and tests: more than all other commands have."""

LABEL = "hone.agent=harbor"
"""The label of the containers, by which people find them."""

TIMED_OUT = 124
"""The exit code of `timeout`."""

GIVEN = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")


@dataclass(frozen=True)
class Task:
    folder: Path
    instruction: str
    config: dict[str, Any]

    def seconds(self, part: str, key: str, default: float) -> float:
        """Returns a limit of the task."""
        return float(self.config.get(part, {}).get(key, default))

    @property
    def image(self) -> str | None:
        """The image that the task names; None: it is built."""
        return self.config.get("environment", {}).get("docker_image")


def read(folder: Path) -> Task:
    """Returns the task of a folder. Raises BadRequest where it is none."""
    missing = [name for name in WHOLE if not (folder / name).is_file()]
    if missing:
        raise BadRequest(
            f"{str(folder)!r} is no task of Harbor: {missing[0]} is missing; expected "
            f"{', '.join(WHOLE)} and environment/Dockerfile"
        )
    try:
        config = tomllib.loads((folder / "task.toml").read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{str(folder / 'task.toml')!r} is no TOML: {error}") from error
    task = Task(folder.resolve(), (folder / "instruction.md").read_text(), config)
    if task.image is None and not (folder / "environment/Dockerfile").is_file():
        raise BadRequest(
            f"{str(folder)!r} has no environment/Dockerfile and names no environment.docker_image; "
            "expected one of them"
        )
    return task


class Tasks:
    """An agent that runs `command` in a container of each episode's task, which is below `root`.
    `network` is Docker's, by which the container reaches the orchestrator."""

    def __init__(self, command: str, root: Path, network: str) -> None:
        self._command = command
        self._root = root
        self._network = network

    async def __call__(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        """Returns the reward that the tests wrote. Raises AgentFailed where Docker, the command or
        the tests failed."""
        task, name = read(self._folder(str(row.get(TASK)))), f"hone-{uuid.uuid4().hex}"
        env = commands.environment("", base_url, api_key)
        image = task.image or await self._built(task, env)
        given = [word for key in GIVEN for word in ("--env", key)]
        run = ["run", "--detach", "--rm", "--name", name, "--label", LABEL]
        limit_s = task.seconds("agent", "timeout_sec", AGENT_S)
        life_s = limit_s + task.seconds("verifier", "timeout_sec", TESTS_S) + SLACK_S
        try:
            where = ("--network", self._network, *given, image)
            await docker(env, *run, *where, "sleep", str(math.ceil(life_s)))
            limited = f"timeout {limit_s:g} sh -c {shlex.quote(self._command)}"
            ended = f"{limited} || test $? = {TIMED_OUT}"  # the tests grade what there is by then
            agent = ("exec", "--interactive", name, "sh", "-c", ended)
            await docker(env, *agent, stdin=task.instruction, limit_s=limit_s + DOCKER_S)
            return await self._earned(task, name, env)
        finally:
            with contextlib.suppress(AgentFailed):  # it may not have been made
                await docker(env, "rm", "--force", name)

    def _folder(self, named: str) -> Path:
        """Returns the folder that a row names. Raises BadRequest for one that is not the worker's
        own: the job's author writes its rows, and the folder's Dockerfile runs here."""
        folder = (self._root / named).resolve()
        if self._root not in folder.parents:
            raise BadRequest(
                f"the row's {TASK!r} is {named!r}; expected a folder below {str(self._root)!r}, "
                "the root that the worker's `tasks` names"
            )
        return folder

    async def _built(self, task: Task, env: dict[str, str]) -> str:
        """Returns the image of the task's Dockerfile; Docker's cache builds it once."""
        limit_s = task.seconds("environment", "build_timeout_sec", BUILD_S)
        build = ("build", "--quiet", "--force-rm", str(task.folder / "environment"))
        return (await docker(env, *build, limit_s=limit_s)).split()[-1]

    async def _earned(self, task: Task, name: str, env: dict[str, str]) -> Any:
        """Runs the tests. The agent's processes end first, so that none of them changes the tests
        or the reward; then what the agent put into their place is removed."""
        await docker(env, "restart", "-t", "0", name)
        await docker(env, "exec", name, "rm", "-rf", "/tests", VERIFIER)
        await docker(env, "exec", name, "mkdir", "-p", VERIFIER)
        await docker(env, "cp", str(task.folder / "tests"), f"{name}:/tests")
        limit_s = task.seconds("verifier", "timeout_sec", TESTS_S)
        test = ("exec", name, "sh", "-c", "chmod +x /tests/test.sh; /tests/test.sh >&2 || true")
        await docker(env, *test, limit_s=limit_s)
        found = f"cat {VERIFIER}/reward.json 2>/dev/null || cat {VERIFIER}/reward.txt"
        return reward_of(await docker(env, "exec", name, "sh", "-c", found))


def reward_of(text: str) -> Any:
    """Returns the reward in the text of `reward.txt` or `reward.json`: a number, or a table whose
    `reward` it is, or that has one number."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        return reward_in(text, "reward.txt")
    if not isinstance(found, dict):
        return found
    table = cast(dict[str, Any], found)
    if "reward" in table:
        return table["reward"]
    if len(table) != 1:
        raise AgentFailed(
            f"reward.json has the keys {', '.join(sorted(table))}; expected 'reward', or one"
        )
    return next(iter(table.values()))


async def docker(
    env: dict[str, str], *words: str, stdin: str = "", limit_s: float = DOCKER_S
) -> str:
    """Returns the end of what `docker` printed. Raises AgentFailed if it failed or was late."""
    try:
        async with asyncio.timeout(limit_s):
            out, err, code = await commands.run(["docker", *words], env, stdin.encode())
    except TimeoutError:
        raise AgentFailed(f"docker {words[0]} was not done after {limit_s:g} s") from None
    if code != 0:
        raise AgentFailed(f"docker {words[0]} exited with {code}: {err or out or 'silent'}")
    return out


def tasks(command: str, *, root: str | Path, network: str = "host") -> Tasks:
    """Returns the agent that runs a shell command in the container of each task. Rows name folders
    below `root`, the worker's own tasks. Raises BadRequest where it is no folder, and on a machine
    without Docker."""
    found_root = Path(root).resolve()
    if not found_root.is_dir():
        raise BadRequest(f"'root' is {str(root)!r}; expected the folder that has the tasks")
    try:
        found = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=DOCKER_S)
        why = "" if found.returncode == 0 else found.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        raise BadRequest(
            f"'docker info' says {why!r}, and Harbor's tasks run in containers; expected a worker "
            "on a machine whose Docker daemon answers"
        )
    return Tasks(command, found_root, network)


def rows(folders: Sequence[Path]) -> Generator[dict[str, Any]]:
    """Yields a row of a job's data for each task. Raises BadRequest where one is none."""
    for folder in folders:
        task = read(folder)
        yield {"prompt": task.instruction, TASK: str(task.folder)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hone.agents.harbor", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="a task's folder")
    for row in rows(parser.parse_args().folders):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
