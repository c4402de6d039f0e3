"""Harbor's task folders on a real Docker daemon: the agent is a command in the task's container,
which asks the model by the host's network."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hone.agents.harbor import rows, tasks
from hone.agents.results import AgentFailed
from tests.support.docker_image import base_image, skip_without_docker

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]

DOCKERFILE = """
FROM {base}
RUN mkdir -p /app && echo "a note" > /app/note.txt
COPY agent.py /app/
WORKDIR /app
"""

AGENT = """
import json, os, sys, urllib.request

asked = [{"role": "user", "content": sys.stdin.read()}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": asked}).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("/app/answer.txt", "w").write(said)
"""

TESTS = """#!/bin/sh
test -f /app/note.txt || exit 1
if grep -q "^{answer}$" /app/answer.txt; then reward=1; else reward=0; fi
{wrote}
exit $((1 - reward))
"""

TEXT = "echo $reward > /logs/verifier/reward.txt"
TABLE = """echo "{\\"reward\\": $reward, \\"speed\\": 0.5}" > /logs/verifier/reward.json"""

CONFIG = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = {agent_s}
[environment]
build_timeout_sec = 300.0
cpus = 1
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    skip_without_docker()
    return base_image(tmp_path_factory.mktemp("base"))


@pytest.fixture
def model() -> Iterator[tuple[str, list[Any]]]:
    """A model that says 4 to everything: its URL, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked.append((self.headers["authorization"], json.loads(body)))
            said = {"choices": [{"message": {"content": "4"}}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def write_task(
    folder: Path, base: str, question: str, answer: str, *, wrote: str = TEXT, agent_s: int = 60
) -> Path:
    for part in ("environment", "tests"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(CONFIG.format(agent_s=agent_s))
    (folder / "instruction.md").write_text(question)
    (folder / "environment/Dockerfile").write_text(DOCKERFILE.format(base=base))
    (folder / "environment/agent.py").write_text(AGENT)
    (folder / "tests/test.sh").write_text(TESTS.format(answer=answer, wrote=wrote))
    return folder


def hones_containers() -> str:
    """Returns the containers of tasks, and those that a build left."""
    words = ["docker", "ps", "--all", "--format", "{{.Names}}"]
    names = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    begun = re.compile(r"hone-[0-9a-f]{32}|[a-z]+_[a-z]+")
    return " ".join(name for name in names if begun.fullmatch(name))


async def test_an_agent_in_its_container_solves_one_of_two_tasks(
    base: str, model: tuple[str, list[Any]], tmp_path: Path
) -> None:
    url, asked = model
    folders = [
        write_task(tmp_path / "sum", base, "What is 2 + 2?", "4"),
        write_task(tmp_path / "product", base, "What is 2 * 3?", "6", wrote=TABLE),
    ]
    run = tasks("python3 /app/agent.py", root=tmp_path)
    every = [*rows(folders)]
    assert [row["prompt"] for row in every] == ["What is 2 + 2?", "What is 2 * 3?"]
    earned = await asyncio.gather(*(run(row, url, "a key") for row in every))
    assert earned == [1.0, 0]
    questions = sorted(body["messages"][0]["content"] for _, body in asked)
    assert questions == ["What is 2 * 3?", "What is 2 + 2?"]
    assert {key for key, _ in asked} == {"Bearer a key"}
    assert hones_containers() == ""


async def test_what_a_late_agent_did_is_graded(
    base: str, model: tuple[str, list[Any]], tmp_path: Path
) -> None:
    url, _ = model
    folder = write_task(tmp_path / "sum", base, "What is 2 + 2?", "4", agent_s=2)
    (row,) = rows([folder])
    run = tasks("echo 4 > answer.txt; sleep 600", root=tmp_path)
    assert await run(row, url, "a key") == 1.0
    assert hones_containers() == ""


async def test_an_agent_that_fails_is_no_reward(
    base: str, model: tuple[str, list[Any]], tmp_path: Path
) -> None:
    (row,) = rows([write_task(tmp_path / "sum", base, "What is 2 + 2?", "4")])
    with pytest.raises(AgentFailed, match=r"docker exec exited with 1: .*it gives up"):
        await tasks("echo it gives up >&2; exit 3", root=tmp_path)(row, model[0], "a key")
    (tmp_path / "sum/environment/Dockerfile").write_text(f"FROM {base}\nRUN exit 7\n")
    with pytest.raises(AgentFailed, match=r"(?s)docker build exited with 7: .*returned a non-zero"):
        await tasks("true", root=tmp_path)(row, model[0], "a key")
    assert hones_containers() == ""


async def test_an_agent_that_writes_the_reward_itself_earns_nothing(
    base: str, model: tuple[str, list[Any]], tmp_path: Path
) -> None:
    (row,) = rows([write_task(tmp_path / "sum", base, "What is 2 + 2?", "4")])
    cheats = (
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; echo 5 > answer.txt"
    )
    assert await tasks(cheats, root=tmp_path)(row, model[0], "a key") == 0.0
    assert hones_containers() == ""
