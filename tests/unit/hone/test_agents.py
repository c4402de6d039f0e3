"""Agents of workers: files, commands, and what they return."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hone.agents.loading import Command, agent_of
from hone.agents.working import Agent, AgentFailed, Worker, call_agent, failure, result_of
from hone.client import Background
from shared.errors import BadRequest, Failed, Forbidden, HoneError, NotFound
from shared.job import EnvironmentSpec
from shared.wire import EpisodeResult, JobRecord, LeasedEpisode, LeasesRenewed, ResultTaken
from tests.support.job_records import JOB, record

ROOT = Path(__file__).parents[3]
ROW = {"secret": 7, "prompt": "Guess."}


def shell(script: str) -> Command:
    return Command(["sh", "-c", script])


def played(agent: Any, row: dict[str, Any] = ROW) -> Any:
    return asyncio.run(call_agent(agent, row, "http://h:1/v1", "sk-hone-1"))


def test_a_command_finds_the_model_and_the_row_and_says_its_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HONE_TOKEN", "secret")
    said = 'echo {\\"reward\\": $(echo "$HONE_ROW" | tr -dc 0-9), \\"metrics\\": {}}'
    assert played(shell(f"cat >/dev/null; {said}")) == {"reward": 7, "metrics": {}}
    assert played(shell('read row; echo "$row" | tr -dc 0-9')) == 7
    assert played(shell("echo nothing; echo 0.5 >$HONE_REWARD_FILE")) == 0.5
    load = "from shared.settings import load_settings; load_settings(); print(7)"
    assert played(shell(f"cd {ROOT} && {sys.executable} -c '{load}'")) == 7, "they are no settings"
    names = "$OPENAI_BASE_URL $OPENAI_API_KEY $ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY [$HONE_TOKEN]"
    with pytest.raises(
        AgentFailed, match=r"is 'http://h:1/v1 sk-hone-1 http://h:1 sk-hone-1 \[\]'"
    ):
        played(shell(f"echo {names}"))


def test_a_command_gets_no_secret_of_hone_and_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = (
        *("HONE_TOKEN", "HONE_REDIS_URL", "HONE_JUDGE_API_KEY", "HONE_TEACHER_API_KEY"),
        *("HONE_MODAL_KEY", "HONE_MODAL_SECRET", "HONE_TOKEN_FILE", "HONE_REDIS_URL_FILE"),
        *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        *("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    )
    for name in (*hidden, "HF_TOKEN", "SEARCH_API_KEY", "HONE_REWARD_URL"):
        monkeypatch.setenv(name, "value-of-it")
    script = "echo $(env | grep =value-of-it | cut -d= -f1 | sort)"
    with pytest.raises(AgentFailed, match="is 'HF_TOKEN HONE_REWARD_URL SEARCH_API_KEY'"):
        played(shell(script))


HARBOR = """#!/bin/sh
while [ "$1" != --trials-dir ]; do shift; done
mkdir "$2/hello__1"
echo "$OPENAI_BASE_URL is called"
echo "$HARBOR_RESULT" >"$2/hello__1/result.json"
"""


def test_the_example_of_harbor_reports_what_its_command_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harbor").write_text(HARBOR)
    (tmp_path / "harbor").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    example = Command([sys.executable, str(ROOT / "examples/harbor.py"), str(tmp_path)])
    graded = {"verifier_result": {"rewards": {"reward": 0.5, "tests": 2}}}
    monkeypatch.setenv("HARBOR_RESULT", json.dumps(graded))
    assert played(example, {"task": "hello"}) == {"reward": 0.5, "metrics": {"tests": 2}}
    with pytest.raises(AgentFailed, match="expected a folder below"):
        played(example, {"task": "../hello"})
    failed = {"verifier_result": None, "exception_info": {"exception_message": "no daemon"}}
    monkeypatch.setenv("HARBOR_RESULT", json.dumps(failed))
    with pytest.raises(AgentFailed, match="hello was not graded: no daemon"):
        played(example, {"task": "hello"})


def test_an_agent_that_exits_has_failed() -> None:
    async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
        sys.exit("no browser")

    with pytest.raises(AgentFailed, match="the agent exited: no browser"):
        played(run)
    with pytest.raises(AgentFailed, match="the agent exited: 3"):
        played(lambda row, base_url, api_key: sys.exit(3))


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(AgentFailed, match=r"^'sh' exited with 3: no browser$"):
        played(shell("echo no browser >&2; exit 3"))
    with pytest.raises(AgentFailed, match="last line of 'sh' is ''; expected a reward: a number"):
        played(shell("true"))
    with pytest.raises(AgentFailed, match=r"command './none' cannot be started: .*No such file"):
        played(Command(["./none"]))


def test_a_row_too_long_for_a_variable_is_on_stdin_alone() -> None:
    counted = played(shell('[ -z "$HONE_ROW" ] && wc -c'), {"text": "x" * 200_000})
    assert counted > 200_000


def test_a_cancelled_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def cancelled() -> None:
        agent = shell(f"trap '' TERM; sleep 60 & echo $! >{pid}; wait; wait")
        task = asyncio.create_task(agent(ROW, "u", "k"))
        while not pid.exists() or not pid.read_text().strip():
            await asyncio.sleep(0.01)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 5

    asyncio.run(cancelled())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(pid.read_text()), 0)
            if Path(f"/proc/{pid.read_text().strip()}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.02)


def test_a_file_names_its_agent(tmp_path: Path) -> None:
    (tmp_path / "scale.py").write_text("SCALE = 2\n")
    file = tmp_path / "agent.py"
    file.write_text(
        "from scale import SCALE\n"
        "async def run(row, base_url, api_key):\n    return SCALE * row['secret']\n"
        "def plain(row, base_url, api_key):\n    return api_key\n"
    )
    assert played(agent_of([str(file)])) == 14
    assert played(agent_of([f"{file}:plain"])) == "sk-hone-1"
    assert isinstance(agent_of(["python", str(file)]), Command)
    with pytest.raises(BadRequest, match="has no function 'play'; expected `async def play"):
        agent_of([f"{file}:play"])
    with pytest.raises(BadRequest, match=r"there is no file 'gone.py'; expected one with an agent"):
        agent_of(["gone.py"])
    with pytest.raises(BadRequest, match=r"there is no command 'gone\.py'; expected a program"):
        agent_of(["gone.py", "--fast"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\nimport gone_package", "line 2 of .* cannot be loaded: ModuleNotFoundError: No module"),
        ("def run(row) return 1", "line 1 of .* cannot be loaded: SyntaxError: expected ':'"),
        ("def run(row): ...", r"'run' of .* takes \(row\); expected \(row, base_url, api_key\)"),
    ],
)
def test_a_file_that_is_no_agent_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    with pytest.raises(BadRequest, match=why):
        agent_of([str(file)])


def test_what_an_agent_returns_is_its_result() -> None:
    assert result_of(True).reward == 1.0 and result_of(None).reward is None
    assert result_of([1, None]).reward == (1.0, None)
    assert result_of({"chatcmpl-1": 1}).reward == {"chatcmpl-1": 1.0}
    told = result_of({"reward": 0.5, "metrics": {"turns": 3}})
    assert told.reward == 0.5 and told.metrics == {"turns": 3.0}
    for value, why in (
        ("0.5", "the agent's reward is '0.5'; expected a finite number"),
        (float("inf"), "the agent's reward is inf; expected a finite number"),
        ([0, "x"], "the agent's reward of answer 1 is 'x'; expected a finite number"),
        ({"reward": 1, "rest": 2}, "the agent returned .*; expected a number"),
    ):
        with pytest.raises(AgentFailed, match=why):
            result_of(value)
    assert failure(ValueError("no such page")).error == "ValueError: no such page"


class Offering:
    """A client whose orchestrator has one episode, and refuses the first results with `errors`."""

    url = "http://h:1"

    def __init__(self, *errors: HoneError) -> None:
        self.errors = [*errors]
        self.offered = [
            LeasedEpisode(
                id="e1", job_id="j", row={}, prompt="?", api_key="k", deadline_s=60.0, lease_s=60.0
            )
        ]
        self.results: list[EpisodeResult] = []
        self.returned: list[str] = []

    async def lease_episodes(self, *_: Any, **__: Any) -> tuple[LeasedEpisode, ...]:
        found, self.offered = tuple(self.offered), []
        if not found:
            await asyncio.sleep(0.01)
        return found

    async def end_episode(self, id: str, result: EpisodeResult) -> ResultTaken:
        if self.errors:
            raise self.errors.pop(0)
        self.results.append(result)
        return ResultTaken(id=id, taken=True)

    async def renew_leases(self, *_: Any, returned: tuple[str, ...] = ()) -> LeasesRenewed:
        self.returned += returned
        return LeasesRenewed()


def worked(agent: Agent, client: Any) -> tuple[Worker, list[str]]:
    """Returns a worker that has played the client's episode, and what it told."""
    told: list[str] = []
    playing = Background()
    worker = Worker(agent, client, playing, 1, told.append, lambda _: None)

    async def until_ended() -> None:
        working = asyncio.create_task(worker.run(None))
        async with asyncio.timeout(20):
            while not worker.progress.done + worker.progress.lost:
                await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.wait({working})

    try:
        asyncio.run(until_ended())
    finally:
        playing.close()
    return worker, told


async def cancels_itself(row: dict[str, Any], base_url: str, api_key: str) -> float:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(60)
    return 1.0


async def raises_cancelled(row: dict[str, Any], base_url: str, api_key: str) -> float:
    raise asyncio.CancelledError


@pytest.mark.parametrize("agent", [cancels_itself, raises_cancelled])
def test_an_agent_that_cancels_itself_has_failed(agent: Agent) -> None:
    client = Offering()
    worker, _ = worked(agent, client)
    (result,) = client.results
    assert result.error == "the agent ended with CancelledError of its own"
    assert (worker.progress.failed, worker.progress.lost) == (1, 0)


def test_a_result_that_is_refused_is_a_failure_and_never_lost_silently() -> None:
    client = Offering(Failed("no such column"))
    worker, _ = worked(lambda row, base_url, api_key: 1.0, client)
    assert [result.error for result in client.results] == ["no such column"]
    assert worker.progress.failed == 1 and client.returned == []
    for errors in ([Failed("a"), Failed("it broke")], [Forbidden("it broke")]):
        client = Offering(*errors)
        worker, told = worked(lambda row, base_url, api_key: 1.0, client)
        assert told == [
            "the orchestrator did not take the result of episode 'e1': it broke; its lease is "
            "returned, and another try may succeed"
        ]
        assert worker.progress.lost == 1 and worker.progress.done == 0
        assert client.returned == ["e1"] and client.results == []


class Lasting(Offering):
    """A client whose orchestrator has no episode, and a job with these states, one a request. None:
    it was deleted."""

    def __init__(self, *states: tuple[str, str | None] | None) -> None:
        super().__init__()
        self.offered = []
        self.states = [("running", None), *states]  # the first is read for the job's id

    async def get(self, job: str) -> JobRecord:
        state = self.states.pop(0)
        if state is None:
            raise NotFound(f"there is no job {job!r}")
        played = JOB.model_copy(update={"environment": EnvironmentSpec(kind="worker")})
        return record(*state).model_copy(update={"id": "a-1", "job": played})


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (("succeeded", None), "job a-1 has ended (succeeded); there are no more episodes"),
        (("cancelled", None), "job a-1 has ended (cancelled); there are no more episodes"),
        (None, "job a-1 was deleted; there are no more episodes"),
    ],
)
def test_a_worker_says_once_that_its_job_is_paused_and_why_it_ends(
    last: tuple[str, str | None] | None, end: str
) -> None:
    paused, running = ("paused", "the disk is full"), ("running", None)
    told: list[str] = []
    client: Any = Lasting(running, paused, paused, running, paused, last)
    playing = Background()
    asyncio.run(Worker(print, client, playing, 1, told.append, lambda _: None).run("a"))
    playing.close()
    waits = (
        "job a-1 is paused: the disk is full; waiting for its next episode, after `hone resume a-1`"
    )
    assert told == [waits, waits, end]
