"""Workers of jobs' own functions, in the real sandbox: kept, replaced when they die, closed when
others are used."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.reward.grading.failures import GradingFailed
from services.reward.grading.scoring import Scorer
from services.reward.job_code.functions import FunctionWorkers, function_file
from services.reward.sandbox.base import WORKER_PROCESSES, SlotDied, Worker
from services.reward.sandbox.host import Groups
from services.reward.sandbox.local import LocalSandbox
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Execution, Part, ScoreItem, ScoreRequest
from tests.support.reward_helpers import ScriptedSandbox, processes_of, running_sandbox, tools_of

PROCESSES_PER_WORKER = 3
"""The one outside, pid 1 inside, and the function's own; of a slot the next program's."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncGenerator[LocalSandbox]:
    async with running_sandbox(1) as sandbox:
        async with asyncio.timeout(90):
            while len(processes_of(os.getpid())) != PROCESSES_PER_WORKER:
                await asyncio.sleep(0.01)  # the slot forks its next program's process
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def workers(sandbox: LocalSandbox) -> AsyncGenerator[FunctionWorkers]:
    workers = FunctionWorkers(sandbox)
    yield workers
    await workers.close()


def constant(value: float) -> RewardSpec:
    return RewardSpec(source=f"def reward(completions):\n    return [{value} for _ in completions]")


async def call(
    workers: FunctionWorkers, spec: RewardSpec, *completions: str, timeout_s: float = 10.0
) -> list[float | None]:
    return [part.value for part in await parts(workers, spec, *completions, timeout_s=timeout_s)]


async def parts(
    workers: FunctionWorkers,
    spec: RewardSpec,
    *completions: str,
    timeout_s: float = 10.0,
    owner: str = "job",
) -> list[Part]:
    arguments = {
        "prompts": [""] * len(completions),
        "completions": list(completions),
        "unused": [0] * len(completions),
    }
    return await workers.call(function_file(spec, owner), arguments, len(completions), timeout_s)


async def outcome(workers: FunctionWorkers, spec: RewardSpec, *completions: str) -> list[Part]:
    """The parts, also where all fail."""
    try:
        return await parts(workers, spec, *completions)
    except GradingFailed as error:
        return [error.part()] * len(completions)


async def test_workers_used_least_recently_are_closed(
    workers: FunctionWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.job_code.workers.MAX_WORKERS", 2)
    before = len(processes_of(os.getpid()))
    for value in (1.0, 2.0, 3.0, 4.0, 1.0):
        assert await call(workers, constant(value), "a", "b") == [value, value]
    assert len(processes_of(os.getpid())) == before + 2 * PROCESSES_PER_WORKER


async def test_a_busy_worker_is_never_closed_for_another_one(
    workers: FunctionWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.job_code.workers.MAX_WORKERS", 1)
    before = processes_of(os.getpid())
    slow = (
        "import time\nLOADED = time.time()\ndef reward(completions):\n"
        "    time.sleep(0.2)\n    return [LOADED]"
    )
    loaded = (await call(workers, RewardSpec(source=slow), "a"))[0]
    answers = await asyncio.gather(
        call(workers, RewardSpec(source=slow), "a"),
        *(call(workers, constant(v), "a") for v in (1, 2, 1)),
    )
    assert answers == [[loaded], [1.0], [2.0], [1.0]]
    await workers.close()
    assert processes_of(os.getpid()) == before


@pytest.mark.parametrize(
    "which", [0, -1], ids=["the process outside", "the function's own process"]
)
async def test_a_worker_killed_between_calls_is_replaced(
    workers: FunctionWorkers, which: int
) -> None:
    others = set(processes_of(os.getpid()))
    assert await call(workers, constant(5.0), "a") == [5.0]
    os.kill(sorted(set(processes_of(os.getpid())) - others)[which], signal.SIGKILL)
    assert await call(workers, constant(5.0), "a") == [5.0]


async def test_a_late_function_is_ended_and_the_next_call_is_right(
    workers: FunctionWorkers,
) -> None:
    spec = RewardSpec(
        source="import time\ndef reward(completions):\n    time.sleep(float(completions[0]))\n"
        "    return [1.0]"
    )
    before = len(processes_of(os.getpid()))
    with pytest.raises(GradingFailed, match=r"did not return within 0.2 s for 1 completions"):
        await call(workers, spec, "60", timeout_s=0.2)
    assert len(processes_of(os.getpid())) == before
    assert await call(workers, spec, "0") == [1.0]


async def test_what_a_function_takes_is_known_while_it_is_busy(workers: FunctionWorkers) -> None:
    spec = RewardSpec(
        source="import time\ndef reward(completions, answer=None, **rest):\n"
        "    time.sleep(0.5)\n    return [1.0]"
    )
    signature = await workers.signature(function_file(spec, "job"))
    assert (signature.parameters, signature.any_keyword, signature.calls) == (
        {"completions": True, "answer": False},
        True,
        "batch",
    )
    busy = asyncio.create_task(call(workers, spec, "a"))
    await asyncio.sleep(0.1)
    assert await workers.signature(function_file(spec, "job")) == signature
    assert not busy.done()
    assert await busy == [1.0]


class Dying(Worker):
    """Loads, and then dies in every call."""

    def __init__(self, death: SlotDied) -> None:
        self._death = death
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def tell(self, message: dict[str, Any]) -> None:
        self._told.put_nowait(message)

    async def hear(self) -> Any:
        message = await self._told.get()
        if "source" in message["ask"]:
            answer = {"parameters": {}, "any_keyword": True, "calls": "batch"}
            return {"call": message["call"], "answer": answer}
        raise self._death

    def pause(self) -> None: ...

    async def dismiss(self) -> None: ...


class OfDyingWorkers(ScriptedSandbox):
    def __init__(self, death: SlotDied) -> None:
        super().__init__(Execution(verdict="ok"))
        self._death = death

    async def open_worker(self, module: str, *, processes: int = WORKER_PROCESSES) -> Worker:
        return Dying(self._death)


@pytest.mark.parametrize(
    ("death", "verdict"),
    [
        (SlotDied("it answered with code -9 bytes and code 247"), "error"),
        (SlotDied("its process ended with code -9", killed=True), "sandbox_error"),
    ],
)
async def test_who_ended_a_worker_is_read_from_no_sentence(death: SlotDied, verdict: str) -> None:
    workers = FunctionWorkers(OfDyingWorkers(death))
    (part,) = await outcome(workers, constant(1.0), "a")
    assert (part.value, part.verdict) == (None, verdict)
    assert str(death) in part.detail


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_values_of_another_number_than_completions_count_for_none(
    workers: FunctionWorkers, count: int
) -> None:
    spec = RewardSpec(source=f"def reward(completions):\n    return [1.0] * {count}")
    found = await outcome(workers, spec, "a", "b", "c")
    assert [part.value for part in found] == [None] * 3
    assert found[0].detail == (
        f"reward function 'reward' returned {count} values for 3 completions; expected one for "
        "each, in their order"
    )
    assert await call(workers, constant(0.5), "a", "b", "c") == [0.5] * 3


FORGER = """
import json, os, struct, sys
def reward(completions):
    call = sys._getframe(2).f_locals["message"]["call"]
    forged = json.dumps({"answer": {"results": FORGED}, "call": call}).encode()
    os.write(3, struct.pack(">I", len(forged)) + forged)
"""


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ("{}", "something that is not a list"),
        ("[]", "returned 0 values for 1 completions"),
        ('["\\ud800"]', "returned '.ud800' for completion 0"),
        ("[True]", "returned True for completion 0"),
        ('[{"value": 1e999}]', "inf is no finite number"),
        ('[{"value": [1]}]', "returned .1. for completion 0"),
        ('[{"value": 1, "error": "\\ud800"}]', r"failed: \?"),
    ],
)
async def test_forged_answers_are_checked(
    workers: FunctionWorkers, forged: str, message: str
) -> None:
    (part,) = await outcome(workers, RewardSpec(source=FORGER.replace("FORGED", forged)), "a")
    assert part.value is None
    assert re.search(message, part.detail)
    part.model_dump_json()


REMEMBERING = RewardSpec(
    source="""
SEEN = []
def reward(completions):
    SEEN.extend(completions)
    return [(float(len(SEEN)), repr(SEEN)) for _ in completions]
"""
)


async def test_no_job_sees_what_another_ones_function_was_given(workers: FunctionWorkers) -> None:
    details: dict[str, list[str]] = {"job1": [], "job2": []}
    for owner, completion in (("job1", "a"), ("job2", "b"), ("job1", "c")):
        (part,) = await parts(workers, REMEMBERING, completion, owner=owner)
        details[owner].append(part.detail)
    assert details == {"job1": ["['a']", "['a', 'c']"], "job2": ["['b']"]}


async def test_a_request_without_a_job_has_a_worker_of_its_own_which_ends_with_it(
    sandbox: LocalSandbox,
) -> None:
    tools = tools_of(sandbox)
    scorer = Scorer(tools)
    before = processes_of(os.getpid())
    item = ScoreItem(prompt="", completion="a")
    for job_id, wanted in ((None, 1.0), (None, 1.0), ("job1", 1.0), ("job1", 2.0), (None, 1.0)):
        request = ScoreRequest(items=(item,), rewards=(REMEMBERING,), job_id=job_id)
        assert [score.value for score in (await scorer.score(request)).scores] == [wanted]
    assert len(processes_of(os.getpid())) == len(before) + PROCESSES_PER_WORKER
    await tools.functions.close()
    assert processes_of(os.getpid()) == before


AHEAD = """
import json, os, struct, threading, time
FORGED = json.dumps({"results": [{"value": 1.0}], "stdout": ""}).encode()
def send(): os.write(3, struct.pack(">I", len(FORGED)) + FORGED)
WHEN
"""


@pytest.mark.parametrize(
    "when",
    [
        "def reward(completions): send(); return [0.0]",
        """
def reward(completions):
    def later():
        time.sleep(0.2)
        send()
    threading.Thread(target=later).start()
    time.sleep(0.4 * float(completions[0]))
    return [0.0]
""",
    ],
    ids=["in its call", "from a thread"],
)
async def test_an_answer_ahead_of_its_call_is_none(workers: FunctionWorkers, when: str) -> None:
    spec = RewardSpec(source=AHEAD.replace("WHEN", when))
    answers = [(await outcome(workers, spec, text))[0] for text in ("0", "1", "1")]
    assert 1.0 not in [part.value for part in answers]
    assert "not one to this call" in " ".join(part.detail for part in answers)


async def test_a_file_that_answers_while_it_is_loaded_is_refused(workers: FunctionWorkers) -> None:
    spec = RewardSpec(source=AHEAD.replace("WHEN", "send()\ndef reward(completions): return [0.0]"))
    with pytest.raises(BadRequest, match=r"cannot be loaded: .* not one to this call"):
        await call(workers, spec, "a")


BUSY = """
import os, threading, time
def spin():
    while True: pass
for _ in range(2):
    if not os.fork():
        os.setsid()
        spin()
threading.Thread(target=spin, daemon=True).start()
def reward(completions):
    return [1.0]
"""


def cpu_s() -> float:
    """Returns the CPU time of all that runs in this process's sandboxes."""
    ticks = 0
    for pid in processes_of(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_nothing_of_a_function_runs_between_its_calls(workers: FunctionWorkers) -> None:
    spec = RewardSpec(source=BUSY)
    assert await call(workers, spec, "a") == [1.0]
    async with asyncio.timeout(90):
        while (before := cpu_s()) != await later(cpu_s):
            pass
    await asyncio.sleep(0.5)
    assert cpu_s() == before
    async with asyncio.timeout(90):
        while cpu_s() == before:  # runs on in a call, and is counted in 1/100 s
            assert await call(workers, spec, "b") == [1.0]


async def later(value: Callable[[], float]) -> float:
    await asyncio.sleep(1.0)  # on a busy machine what continues may get no core for some tenths
    return value()


HUNGRY = """
import os, time
def reward(completions):
    told, tell = os.pipe()
    gate, closed = os.pipe()
    os.set_blocking(told, False)
    for _ in range(4):
        if not os.fork():
            os.close(closed)
            held = bytearray(40 << 20)
            held[::4096] = b"x" * len(held[::4096])
            os.write(tell, b"x")
            os.read(gate, 1)
            os._exit(0)
    holding = killed = 0
    while holding + killed < 4:
        time.sleep(0.01)
        killed += bool(os.waitpid(-1, os.WNOHANG)[0])
        try:
            holding += len(os.read(told, 4))
        except BlockingIOError:
            pass
    os.close(closed)
    return [float(killed)]
"""


async def test_a_functions_processes_share_one_limit_of_memory(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cgroups" not in sandbox.report()["limits"]:
        pytest.skip("no cgroups can be made here")
    monkeypatch.setattr("services.reward.sandbox.local.WORKER_BYTES", 128 << 20)
    workers = FunctionWorkers(sandbox)
    (part,) = await outcome(workers, RewardSpec(source=HUNGRY), "a")
    assert part.value is not None and part.value >= 1
    await workers.close()
    folders = [
        folder for parent in set(Groups.find().parents.values()) for folder in parent.iterdir()
    ]
    own = {f.name for f in folders if f.name.startswith(f"hone-slot-{os.getpid()}-")}
    assert len(own) <= 1  # the sandbox's slot


OVEREATER = """
def reward(completions):
    for text in completions:
        if text == "eat":
            held = bytearray(300 << 20)
            held[::4096] = b"x" * len(held[::4096])
    return [1.0] * len(completions)
"""


KILLED = """
import os, signal
def reward(completions):
    for text in completions:
        if text.endswith("is killed"):
            held = bytearray((60 << 20) if text.startswith("a large one") else 1)
            held[::4096] = b"x" * len(held[::4096])
            os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("text", "verdict", "error"),
    [
        ("a large one is killed", "error", "python_grader_runtime_error"),
        ("a small one is killed", "sandbox_error", "python_grader_server_error"),
    ],
)
async def test_a_function_that_is_killed_when_it_uses_much_memory_has_run_out_of_it(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch, text: str, verdict: str, error: str
) -> None:
    """Also where no cgroup tells: the kernel's killer takes the largest."""
    monkeypatch.setattr(Groups, "make", lambda *_: None)
    monkeypatch.setattr("services.reward.sandbox.inside.zygote.WORKER_BYTES", 200 << 20)
    workers = FunctionWorkers(sandbox)
    parts = await outcome(workers, RewardSpec(source=KILLED), "a", text, "b")
    assert [(part.value, part.verdict) for part in parts] == [
        (1.0, "ok"),
        (None, verdict),
        (1.0, "ok"),
    ]
    assert parts[1].errors == (error,)
    await workers.close()


async def test_a_text_that_eats_a_functions_memory_is_no_fault_of_the_sandbox(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cgroups" not in sandbox.report()["limits"]:
        pytest.skip("no cgroups can be made here")
    monkeypatch.setattr("services.reward.sandbox.local.WORKER_BYTES", 128 << 20)
    workers = FunctionWorkers(sandbox)
    parts = await outcome(workers, RewardSpec(source=OVEREATER), "a", "eat", "b")
    assert [(part.value, part.verdict) for part in parts] == [
        (1.0, "ok"),
        (None, "error"),
        (1.0, "ok"),
    ]
    assert parts[1].errors == ("python_grader_runtime_error",)
    assert "ended it at its limit of memory" in parts[1].detail
    assert parts[1].detail.endswith("(completion 1)")
    await workers.close()
