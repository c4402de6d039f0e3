"""Task folders of Harbor: reading them, and the calls of Docker, by a stand-in for its command that
runs what belongs into the container in a folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from hone.agents import harbor
from hone.agents.results import AgentFailed
from shared.errors import BadRequest

DOCKER = """#!/bin/sh
echo "$*" >>$INSIDE/calls
inside() { printf %s "$1" | sed "s#/tests#$INSIDE/tests#g; s#/logs#$INSIDE/logs#g"; }
case $1 in
    build) echo sha256:made ;;
    restart) [ ! -f "$INSIDE/left" ] || kill -9 $(cat "$INSIDE/left") ;;
    cp) cp -r "$2" "$INSIDE/tests"; sed -i "s#/logs#$INSIDE/logs#g" "$INSIDE/tests/test.sh" ;;
    exec)
        shift; [ "$1" != --interactive ] || shift; shift
        if [ "$1" = sh ]; then cd $INSIDE; exec sh -c "$(inside "$3")"; fi
        command=$1; shift; words=
        for word in "$@"; do words="$words $(inside "$word")"; done
        exec $command $words ;;
esac
"""


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The container's folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("INSIDE", str(tmp_path / "inside"))
    (tmp_path / "inside").mkdir()
    return tmp_path / "inside"


def task(folder: Path, test: str, config: str = 'schema_version = "1.4"\n') -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "environment/Dockerfile").write_text("FROM debian\n")
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text("Write 42 into answer.")
    (folder / "tests/test.sh").write_text(f"#!/bin/sh\n{test}\n")
    return folder


def played(command: str, folder: Path) -> Any:
    agent = harbor.tasks(command, root=folder.parent)
    return asyncio.run(agent({"task": str(folder)}, "http://h:1/v1", "sk-hone-1"))


def test_a_task_gives_the_reward_that_its_tests_wrote(inside: Path, tmp_path: Path) -> None:
    graded = "grep -q 42 answer && echo 1 >/logs/verifier/reward.txt"
    folder = task(tmp_path / "one", f"{graded} || echo 0 >/logs/verifier/reward.txt; exit 1")
    (row,) = harbor.rows([folder])
    assert row == {"prompt": "Write 42 into answer.", "task": str(folder)}
    said = 'tr -dc 0-9 >answer; echo $OPENAI_API_KEY >key; mkdir tests; echo "echo" >tests/test.sh'
    assert played(said, folder) == 1
    assert (inside / "key").read_text() == "sk-hone-1\n"
    calls = (inside / "calls").read_text()
    name = calls.partition("--name ")[2].split()[0]
    assert "--network host --env OPENAI_BASE_URL" in calls and "sk-hone" not in calls
    assert calls.endswith(f"rm --force {name}\n")


def test_a_container_ends_by_itself_if_its_worker_is_killed(inside: Path, tmp_path: Path) -> None:
    config = "[agent]\ntimeout_sec = 0.5\n[verifier]\ntimeout_sec = 30\n"
    written = "echo 1 >/logs/verifier/reward.txt"
    assert played("true", task(tmp_path / "one", written, config)) == 1
    (run,) = [call for call in (inside / "calls").read_text().splitlines() if "--name" in call]
    assert run.startswith("run --detach --rm ") and " --label hone.agent=harbor " in run
    assert run.endswith(" sha256:made sleep 1231"), "0.5 + 30 seconds, and 1200 for Docker"


def test_what_the_agent_left_running_cannot_write_the_reward(inside: Path, tmp_path: Path) -> None:
    folder = task(tmp_path / "one", "echo 0 >/logs/verifier/reward.txt; sleep 0.5")
    cheats = "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; sleep 0.02"
    goes_on = f"echo \\$\\$ >left; for _ in \\$(seq 100); do {cheats}; done"
    begun = f'setsid sh -c "{goes_on}" >/dev/null 2>&1 </dev/null &'
    assert played(f"{begun} while [ ! -s left ]; do sleep 0.02; done", folder) == 0


def test_a_late_agent_is_graded_and_a_failed_one_is_not(inside: Path, tmp_path: Path) -> None:
    config = '[agent]\ntimeout_sec = 0.5\n[environment]\ndocker_image = "debian:12"\n'
    written = """echo '{"reward": 0.25, "other": 1}' >/logs/verifier/reward.json"""
    folder = task(tmp_path / "one", written, config)
    assert played("sleep 30", folder) == 0.25
    assert "build" not in (inside / "calls").read_text()
    with pytest.raises(AgentFailed, match="docker exec exited with 1: no model"):
        played("echo no model >&2; exit 3", folder)
    silent = task(tmp_path / "two", "true")
    with pytest.raises(AgentFailed, match=r"docker exec exited with 1: .*reward\.txt"):
        played("true", silent)


def test_a_row_names_only_tasks_below_the_workers_root(inside: Path, tmp_path: Path) -> None:
    written = "echo 1 >/logs/verifier/reward.txt"
    task(tmp_path / "tasks/one", written)
    elsewhere = task(tmp_path / "elsewhere", written)
    (tmp_path / "tasks/link").symlink_to(elsewhere)
    agent = harbor.tasks("true", root=tmp_path / "tasks")

    def earned(named: str) -> Any:
        return asyncio.run(agent({"task": named}, "http://h:1/v1", "sk-hone-1"))

    assert earned("one") == earned(str(tmp_path / "tasks/one")) == 1
    begun = (inside / "calls").read_text()
    for named in (str(elsewhere), "../elsewhere", "link", "."):
        with pytest.raises(BadRequest, match=rf"'task' is '{named}'; expected a folder below '.*"):
            earned(named)
    assert (inside / "calls").read_text() == begun, "Docker builds nothing of them"
    with pytest.raises(BadRequest, match=r"'root' is 'no/tasks'; expected the folder that has"):
        harbor.tasks("true", root="no/tasks")


def test_what_is_no_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = task(tmp_path / "one", "true")
    (folder / "environment/Dockerfile").unlink()
    with pytest.raises(BadRequest, match=r"has no environment/Dockerfile and names no"):
        harbor.read(folder)
    (folder / "instruction.md").unlink()
    with pytest.raises(BadRequest, match=r"is no task of Harbor: instruction\.md is missing"):
        harbor.read(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadRequest, match=r"^'docker info' says .*docker.*, and Harbor's tasks run"):
        harbor.tasks("agent", root=tmp_path)
