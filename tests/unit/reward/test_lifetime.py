"""The reward service as a process: how it starts, how it refuses to, that nothing of it is left
after any kind of end, and that a batch in which it was killed is graded once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shared.http.client import Client
from shared.job import RewardSpec
from shared.wire import ScoreItem, ScoreRequest, ScoreResult
from tests.support.reward_helpers import processes_in, processes_of, user_namespaces_of
from tests.support.reward_service import ROOT, RunningService, free_port, running_service

pytestmark = pytest.mark.slow

SYSTEM_PYTHON = Path("/usr/bin/python3.11")


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_service_ends_with_programs_running(end: signal.Signals) -> None:
    with running_service(HONE_SANDBOX_SLOTS="2") as running:
        source = (
            "import time\ndef reward(completions):\n"
            "    if completions[0] == 'wait': time.sleep(60)\n    return [1.0]"
        )
        scored = {"items": [{"prompt": "", "completion": "a"}], "rewards": [{"source": source}]}
        assert running.post("/score", scored)["scores"][0]["value"] == 1.0
        waits = {"items": [{"prompt": "", "completion": "wait"}], "rewards": [{"source": source}]}
        spins = {"code": "import os\nos.fork()\nwhile True: pass", "timeout_s": 30}
        for path, body in (("/score", waits), ("/execute", spins)):
            threading.Thread(
                target=lambda path=path, body=body: _quietly(running, path, body), daemon=True
            ).start()
        # three processes of the idle slot and of the worker; of the busy slot as many, and what its
        # program forked
        assert eventually(lambda: len(processes_of(running.process.pid)) == 10, 60)
        namespaces = user_namespaces_of(processes_of(running.process.pid)) - user_namespaces_of(
            [os.getpid()]
        )
        running.process.send_signal(end)
        running.process.wait(20)
        assert eventually(lambda: processes_in(namespaces) == [])
        assert processes_of(running.process.pid) == []


def _quietly(running: RunningService, path: str, body: dict[str, Any]) -> None:
    with suppress(OSError, ValueError):
        running.post(path, body)


def refused(**settings: str) -> str:
    """Returns what the service says on stderr that does not start with these settings."""
    ended = subprocess.run(
        [sys.executable, "-m", "services.reward"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    return ended.stderr


def test_a_port_in_use_and_a_misspelt_setting_are_one_sentence_and_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(HONE_REWARD_PORT=str(port))
    assert said.startswith(
        f"the reward service cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    assert len(said.splitlines()) == 1
    assert refused(HONE_SANDBOX_SLOT="2") == (
        "unknown setting 'HONE_SANDBOX_SLOT' in the environment; did you mean "
        "'HONE_SANDBOX_SLOTS'? `hone explain settings` lists all\n"
    )


AS_NOBODY = """
import asyncio, json, os, sys
sys.path[:0] = [{root!r}, {packages!r}]
from services.reward.sandbox.local import LocalSandbox
from shared.wire import ExecuteRequest

async def main():
    sandbox = LocalSandbox(isolated=True, num_slots=1)
    await sandbox.start()
    bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass"
    ended = [await sandbox.execute(ExecuteRequest(code=code, expression="6 * 7", timeout_s=0.5))
             for code in (bomb, "import os; os.kill(0, 9)")] if not sandbox.problem() else []
    verdicts = [[e.verdict, e.value] for e in ended]
    print(json.dumps([sandbox.problem(), sandbox.report()["tier"], os.getuid(), verdicts]))
    await sandbox.close()

asyncio.run(main())
"""


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can become an ordinary user; as one, every other test here is this test",
)
@pytest.mark.skipif(
    not SYSTEM_PYTHON.exists(), reason="needs an interpreter that an ordinary user can run"
)
@pytest.mark.skipif(
    not all(folder.stat().st_mode & 0o001 for folder in (ROOT, *ROOT.parents)),
    reason="this checkout lies in a folder that an ordinary user cannot enter",
)
def test_an_ordinary_user_gets_the_same_isolation() -> None:
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    script = AS_NOBODY.format(root=str(ROOT), packages=packages)
    command = [str(SYSTEM_PYTHON), "-B", "-c", script]
    ended = subprocess.run(
        command,
        cwd="/",
        env={},
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report == [None, "local", 65534, [["time_limit", None], ["ok", 42]]]


KILLED_WHILE_STARTING = """
import os, signal, sys
from services.reward.sandbox.inside import isolation, kernel

kernel.unshare = lambda flags, names: os.kill(os.getpid(), signal.SIGKILL)
isolation._unshare_mapped(60_000)
"""


def test_a_slot_killed_before_it_has_its_namespaces_leaves_no_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_STARTING],
        cwd=ROOT,
        stdout=subprocess.PIPE,  # its end comes once no process has it any more
        timeout=30,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL


NUM_ITEMS = 24

OWN = """
import hone
class Runs(hone.Reward):
    def score_batch(self, prompts, completions, target):
        programs = [{"code": c, "expression": c.splitlines()[-1]} for c in completions]
        runs = self.execute_batch_in_sandbox(programs)
        return [float(run.value == t) for run, t in zip(runs, target)]
"""


async def test_a_batch_is_graded_once_although_the_service_is_killed_in_it(tmp_path: Path) -> None:
    port = free_port()
    programs = RewardSpec(grader="python_value", params={"timeout_s": 10.0})
    items = tuple(
        ScoreItem(
            prompt="", completion=f"import time\ntime.sleep(0.05)\n{number}", row={"target": number}
        )
        for number in range(NUM_ITEMS)
    )
    request = ScoreRequest(
        items=items, rewards=(programs, RewardSpec(file="own.py", function="Runs", source=OWN))
    )
    async with Client("reward", f"http://127.0.0.1:{port}") as client:
        with running_service(port, HONE_SANDBOX_SLOTS="2", TMPDIR=str(tmp_path)) as first:
            asked = asyncio.create_task(
                client.call("POST", "/score", request, ScoreResult, deadline_s=200, key="batch")
            )
            await asyncio.sleep(0.5)
            assert not asked.done(), "the batch is under way"
            namespaces = (
                user_namespaces_of(processes_of(first.process.pid))
                - user_namespaces_of([os.getpid()])
                - {None}
            )
            first.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.process.wait)
            for _ in range(100):
                await asyncio.sleep(0.1 if processes_in(namespaces) else 0)
            assert processes_in(namespaces) == []
        with running_service(port, HONE_SANDBOX_SLOTS="2", TMPDIR=str(tmp_path)) as second:
            result = await asked
            metrics = second.get("/metrics")
    assert [score.value for score in result.scores] == [2.0] * NUM_ITEMS
    assert f"hone_reward_completions {NUM_ITEMS}.0" in metrics
    assert list(tmp_path.iterdir()) == []
