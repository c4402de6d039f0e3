"""Jobs' own classes in the real sandbox: what they are called with, what they may return, and their
tools."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from services.reward.grading.failures import GradingFailed
from services.reward.job_code.functions import FunctionWorkers, function_file, programs
from services.reward.sandbox.local import LocalSandbox
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.rewards import Reward
from shared.wire import ExecuteRequest, Part
from tests.support.reward_helpers import processes_of

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncGenerator[FunctionWorkers]:
    sandbox = LocalSandbox(isolated=True, num_slots=2)
    await sandbox.start()
    workers = FunctionWorkers(sandbox)
    yield workers
    await workers.close()
    await sandbox.close()
    assert processes_of(os.getpid()) == []


async def processes_while_idle() -> int:
    """Returns how many there are once what was ended is gone, and each slot that lives has forked
    its next child."""
    seen = [-1, 0]
    async with asyncio.timeout(90):
        while len(set(seen[-8:])) > 1:
            await asyncio.sleep(0.05)
            seen.append(len(processes_of(os.getpid())))
    return seen[-1]


def own(source: str) -> RewardSpec:
    return RewardSpec(source=textwrap.dedent(source), function="Own", file="mine.py")


async def grade(
    workers: FunctionWorkers,
    source: str,
    *completions: str,
    timeout_s: float = 20.0,
    **columns: list[object],
) -> list[Part]:
    arguments = {"prompts": ["?"] * len(completions), "completions": list(completions), **columns}
    return await workers.call(
        function_file(own(source), "job"), arguments, len(completions), timeout_s
    )


async def test_score_gets_one_completion_and_its_columns_by_name(workers: FunctionWorkers) -> None:
    source = """
        import hone
        class Own(hone.Reward):
            def __init__(self):
                self.calls = 0
            def score(self, prompt, completion, answer, **columns):
                self.calls += 1
                value = len(prompt) + 10 * answer + 100 * sorted(columns)[0].count("e")
                return value, f"call {self.calls} for {completion}"
    """
    parts = await grade(workers, source, "a", "b", answer=[1, 2], extra=[None, None])
    assert [(part.value, part.detail) for part in parts] == [
        (111.0, "call 1 for a"),
        (121.0, "call 2 for b"),
    ]


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_score_batch_gets_all_at_once(workers: FunctionWorkers, kind: str) -> None:
    source = f"""
        from hone import Reward
        class Own(Reward):
            {kind} score_batch(self, prompts, completions, answer):
                return [float(c == a) + len(prompts) for c, a in zip(completions, answer)]
    """
    assert [
        part.value for part in await grade(workers, source, "a", "b", "c", answer=["a", "x", "c"])
    ] == [4.0, 3.0, 4.0]


async def test_a_class_needs_no_base_to_be_called(workers: FunctionWorkers) -> None:
    source = """
        class Own:
            def score(self, completion):
                return len(completion)
    """
    assert [part.value for part in await grade(workers, source, "a", "bcd")] == [1.0, 3.0]


async def test_an_async_score_waits_for_all_completions_at_once(workers: FunctionWorkers) -> None:
    source = """
        import asyncio
        class Own:
            async def score(self, completion):
                await asyncio.sleep(0.4)
                return 1 / len(completion)
    """
    await grade(workers, source, "a")
    start = time.monotonic()
    parts = await grade(workers, source, *("a" * 10), "")
    assert time.monotonic() - start < 10 * 0.4
    assert [part.value for part in parts] == [1.0] * 10 + [None]
    assert "mine.py line 6: ZeroDivisionError" in parts[10].detail


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_completion_that_raises_or_hangs_fails_alone(
    workers: FunctionWorkers, kind: str
) -> None:
    source = f"""
        import asyncio, time
        class Own:
            {kind} score(self, completion):
                if completion == "hang":
                    {"await asyncio.sleep(60)" if "async" in kind else "time.sleep(60)"}
                return float(completion)
    """
    parts = await grade(workers, source, "1", "x", "hang", "2", timeout_s=0.5)
    assert [part.value for part in parts] == [1.0, None, None, 2.0]
    assert parts[1].errors == ("python_grader_runtime_error",)
    assert "ValueError: could not convert string to float: 'x'" in parts[1].detail
    assert parts[2].errors == ("unresponsive_reward_error",)
    assert "did not return within 0.5 s" in parts[2].detail


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "class Own:\n    def score(self, completion): return 1\n"
            "    def score_batch(self, completions): return [1]",
            "class 'Own' in mine.py has both score and score_batch, and only one would be called",
        ),
        (
            "class Own: ...",
            "class 'Own' in mine.py has neither score(prompt, completion, ...) nor score_batch(",
        ),
        (
            "class Own:\n    def __init__(self, x): ...",
            "missing 1 required positional argument: 'x'",
        ),
        ("import hone\nhone.Client()", "AttributeError: module 'hone' has no attribute 'Client'"),
    ],
)
async def test_a_class_that_cannot_be_used_is_refused(
    workers: FunctionWorkers, source: str, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await workers.signature(function_file(own(source), "job"))
    assert message in caught.value.detail


async def test_what_it_prints_is_kept_with_the_completion(workers: FunctionWorkers) -> None:
    source = """
        import sys
        class Own:
            def score(self, completion):
                print("saw", completion, file=sys.stderr if completion == "b" else sys.stdout)
                if completion == "c":
                    print("x" * 100_000)
                    raise RuntimeError("no")
                return 1
    """
    parts = await grade(workers, source, "a", "b", "c")
    assert [part.stdout for part in parts[:2]] == ["saw a\n", "saw b\n"]
    assert parts[2].stdout == "x" * 1999 + "\n"


SANDBOXED = """
    import hone
    class Own(hone.Reward):
        def score_batch(self, prompts, completions, wanted):
            programs = [{"code": c, "expression": "f(3)", "timeout_s": 0.5} for c in completions]
            runs = self.execute_batch_in_sandbox(programs)
            return [(float(run.ok and run.value == w), run.verdict) for run, w in zip(runs, wanted)]
"""


async def test_model_written_code_runs_in_the_services_sandbox(workers: FunctionWorkers) -> None:
    codes = [
        "def f(x): return x * x",
        "def f(x): return x",
        "def f(x):\n  while True: pass",
        "import os; os._exit(0)",
        "def f(x): 1/0",
    ]
    parts = await grade(workers, SANDBOXED, *codes, wanted=[9] * len(codes))
    assert [part.value for part in parts] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [part.detail for part in parts] == [
        "ok",
        "ok",
        "time_limit",
        "runtime_error",
        "runtime_error",
    ]


async def test_model_written_code_sees_nothing_of_the_worker(workers: FunctionWorkers) -> None:
    source = """
        import hone, os
        secret = open("/tmp/secret", "w").write("42")
        class Own(hone.Reward):
            def score(self, completion):
                run = self.execute_in_sandbox(
                    completion, expression="seen", stdin="in", inputs={"given": 7}
                )
                return run.value + os.path.exists("/tmp/secret"), run.stdout
    """
    code = "import os\nprint(input())\nseen = given + 10 * os.path.exists('/tmp/secret')"
    (part,) = await grade(workers, source, code)
    assert (part.value, part.detail) == (8.0, "in\n")


async def test_programs_of_many_threads_run_beside_each_other(workers: FunctionWorkers) -> None:
    source = """
        import asyncio, hone
        class Own(hone.Reward):
            async def score(self, completion):
                code = "import time; time.sleep(0.5)"
                run = await asyncio.to_thread(
                    self.execute_in_sandbox, code, expression=completion
                )
                return run.value
    """
    await grade(workers, source, "0")
    start = time.monotonic()
    parts = await grade(workers, source, *(str(number) for number in range(12)))
    assert [part.value for part in parts] == [float(number) for number in range(12)]
    assert time.monotonic() - start < 12 * 0.5, "two slots halve the time"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "self.execute_in_sandbox('1', timeout=3)",
            "unknown key 'timeout'; did you mean 'timeout_s'?",
        ),
        ("self.execute_in_sandbox('1', timeout_s=1e9)", "'timeout_s'"),
        (
            "self.execute_in_sandbox('1', inputs={'x': object()})",
            "TypeError: Object of type object is not JSON serializable",
        ),
        (
            "self.execute_in_sandbox('1', inputs={'x': float('inf')})",
            "ValueError: Out of range float values are not JSON compliant",
        ),
        (
            "self.execute_batch_in_sandbox([{}] * 5000)",
            "5000 programs at once; at most 4096 are taken",
        ),
        (
            "self.execute_in_function(lambda: 1, isolated=False)",
            "is not defined at the top of your file",
        ),
    ],
)
async def test_a_tool_asked_wrongly_says_how(
    workers: FunctionWorkers, call: str, message: str
) -> None:
    source = f"""
        import hone
        class Own(hone.Reward):
            def score(self, completion):
                return len({call}.value)
    """
    (part,) = await grade(workers, source, "")
    assert message in part.detail
    assert (await grade(workers, SANDBOXED, "def f(x): return x", wanted=[3]))[0].value == 1.0


async def test_more_programs_than_can_be_answered_fail_the_call() -> None:
    with pytest.raises(
        GradingFailed,
        match="own asked for 69649 programs at once from all its threads; at most 65536 are run",
    ):
        programs([[{}] * 4096] * 17, "own")
    assert programs([[{"code": "1"}], 7], "own") == [
        [ExecuteRequest(code="1")],
        "no programs at once; at most 4096 are taken",
    ]


async def test_programs_count_in_the_functions_own_time_limit(workers: FunctionWorkers) -> None:
    source = """
        import hone
        class Own(hone.Reward):
            def score_batch(self, completions):
                return [self.execute_in_sandbox(c).wall_s for c in completions]
    """
    with pytest.raises(GradingFailed, match=r"did not return within 0\.5 s for 1 completions"):
        await grade(workers, source, "while True: pass", timeout_s=0.5)
    assert (await grade(workers, source, "1"))[0].value is not None


IN_FUNCTION = """
    import hone, os, time
    seen = []
    def work(how, number=0):
        seen.append(how)
        print("in", how)
        if how == "hang": time.sleep(60)
        if how == "raise": raise KeyError("no")
        if how == "exit": os._exit(3)
        if how == "fork": os.fork() or time.sleep(60)
        return [len(seen), number, os.getpid()]
    class Own(hone.Reward):
        def score_batch(self, completions):
            ran = self.execute_batch_in_function(
                work, [(c, n) for n, c in enumerate(completions)], isolated=ISOLATED, timeout_s=0.5)
            return [((run.value or [0])[0], self.told(run)) for run in ran]
        def told(self, run):
            return f"{run.verdict} {run.stdout.strip()}|{run.stderr.strip().splitlines()[-1:]}"
"""


async def test_a_fresh_child_leaves_nothing_behind(workers: FunctionWorkers) -> None:
    parts = await grade(
        workers, IN_FUNCTION.replace("ISOLATED", "True"), "a", "hang", "raise", "exit", "b"
    )
    assert [part.value for part in parts] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [part.detail for part in parts] == [
        "ok in a|[]",
        "time_limit |['TimeLimit: stopped after 0.5 s']",
        "runtime_error in raise|[\"KeyError: 'no'\"]",
        "runtime_error |['Exited: its process ended without a result']",
        "ok in b|[]",
    ]


async def test_a_warm_process_keeps_what_it_has_seen_until_it_dies(
    workers: FunctionWorkers,
) -> None:
    source = (
        "import os\nos.sched_getaffinity = lambda pid: [0]\n"
        f"{textwrap.dedent(IN_FUNCTION).replace('ISOLATED', 'False')}"
    )
    await workers.close()
    before = await processes_while_idle()
    assert [part.value for part in await grade(workers, source, "a", "b")] == [1.0, 2.0]
    assert [part.value for part in await grade(workers, source, "c", "exit", "d", "hang", "e")] == [
        3.0,
        0.0,
        1.0,
        0.0,
        1.0,
    ]
    assert await processes_while_idle() == before + 4, "a worker's three and one warm process"


async def test_processes_that_a_function_starts_end_with_it(workers: FunctionWorkers) -> None:
    source = IN_FUNCTION.replace("ISOLATED", "True").replace("(c, n)", "('fork', n)")
    await workers.close()
    before = await processes_while_idle()
    assert [part.value for part in await grade(workers, source, "a")] == [1.0]
    assert await processes_while_idle() == before + 3


@pytest.mark.parametrize(
    "which", [0, -1], ids=["the process outside", "the function's own process"]
)
async def test_a_worker_killed_twice_from_outside_is_not_the_functions_fault(
    workers: FunctionWorkers, which: int
) -> None:
    source = (
        "import time\nclass Own:\n    def score_batch(self, completions):\n"
        "        time.sleep(3)\n        return [1]"
    )
    others = set(processes_of(os.getpid()))

    async def kill() -> None:
        end = time.monotonic() + 10
        while (
            len(mine := sorted(set(processes_of(os.getpid())) - others)) < 3
            and time.monotonic() < end
        ):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        os.kill(mine[which], signal.SIGKILL)
        others.update(mine)

    async def kill_twice() -> None:
        await kill()
        await kill()

    killer = asyncio.create_task(kill_twice())
    with pytest.raises(GradingFailed, match="was killed twice, from outside or because") as caught:
        await grade(workers, source, "a")
    await killer
    assert caught.value.part() == Part(
        value=None,
        verdict="sandbox_error",
        detail=caught.value.detail,
        errors=("python_grader_server_error",),
    )


async def test_tools_outside_the_service_say_where_they_work() -> None:
    with pytest.raises(RuntimeError, match="in the reward service only; `hone grade --file`"):
        Reward().execute_in_sandbox("1")
