"""The sandbox side by side with other ways to run a short program and its tests, in one run.

    python -m bench.reward [--quick] [--repeats 9]

    sandbox       `LocalSandbox.execute`, as the service has it
    fork alone    the same warm parent, driven by the same code, that only forks and runs the
                  program: no isolation at all
    bare          a `python -I -S` process, started for each program, that gives its values back as
                  JSON: no isolation either
    bare, print   the same, which only prints them: without the import of `json`, about half of a
                  bare process's time; no goal
    bubblewrap    `bwrap --unshare-all` around that process, the isolation that one would otherwise
                  use

Each way runs the same program with the same tests and gives the same values back, at 1, 2 and 8
programs at once. Rates are medians over the rounds, and a ratio is the median of the rounds' own
ratios: a busy machine slows both sides. The CPU time of a program is the sum over all processes,
this one included, and depends less than a rate on what else runs. `imports` is a program with the
twenty imports that solutions of programming problems begin with, which the sandbox has made
already. `/score` is 512 completions over HTTP to a service of its own, against the same programs
given to a sandbox here. The pairs of `tests/data/answer_pairs.jsonl` are right or wrong by
construction; the two error rates say how many `math` takes for the other. The last figures are the
effect of hostile completions on others: a group of 16 hostile completions, which return what costs
most to judge or are fences and nothing else, and 4 honest ones is graded over HTTP while `/healthz`
is requested repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import psutil
import structlog

from bench.report import Figure, finish, options, ratios, repeated
from services.reward import graders
from services.reward.grading import registry
from services.reward.grading.limited.pool import LimitedPool
from services.reward.grading.registry import GraderTools
from services.reward.job_code.functions import FunctionWorkers
from services.reward.sandbox import host
from services.reward.sandbox.local import LocalSandbox
from services.reward.sandbox.slots import Slot
from shared.host.processes import free_port
from shared.http.client import Client
from shared.job import RewardSpec
from shared.settings import Settings
from shared.wire import ExecuteRequest, ScoreItem, ScoreRequest, ScoreResult

AT_ONCE = (1, 2, 8)
GOALS = {"bare": 3.0, "bubblewrap": 5.0, "fork alone": 0.75}
IMPORTS_GOAL, SCORE_GOAL = 10.0, 0.8
IMPORTS = """
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json, typing, decimal, fractions, dataclasses
"""
CODE = """
def longest(words):
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best
"""
TESTS = (
    "[longest(['a', 'bcd', 'ef']), longest([]), longest(['same', 'size']), "
    "len(longest(['x' * 40]))]"
)
VALUES = ["bcd", "", "same", 40]
NUM_ITEMS = 512
ANSWER_PAIRS = Path(__file__).parents[1] / "tests" / "data" / "answer_pairs.jsonl"

STALL_GOAL_S = 0.5
HONEST_GOAL_S = 30.0
NUM_HOSTILE, NUM_HONEST = 16, 4
HOSTILE = {
    "a power of a fraction": (
        "assert 2 ** f(8) == 8",
        "from fractions import Fraction\nf = lambda x: Fraction(10**10)",
    ),
    "a long number": ("assert int(str(f(7)) * 5) == 1", "f = lambda x: 7**230000"),
    "a long list": ("assert sorted(f(7)) == 1", "f = lambda x: [[i] for i in range(15000)]"),
    "260 kB of fences": ("assert f(7) == 1", "```\n" * 65_000),
}

Run = Callable[[], Awaitable[None]]
"""Runs the program once, and raises AssertionError if it returned other values."""


@dataclass(frozen=True)
class Measurement:
    per_s: float
    latencies_s: list[float]
    cpu_s: float
    """The CPU seconds of one program, in all processes."""


class ForkAlone(Slot):
    module = "bench.reward_fork"


async def main() -> int:
    args = options(__doc__, repeats=9, quick="three short rounds: half a minute").parse_args()
    rounds, seconds = (3, 0.4) if args.quick else (args.repeats, 1.0)
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    sandbox = LocalSandbox(isolated=True, num_slots=max(AT_ONCE))
    await sandbox.start()
    if problem := sandbox.problem():
        raise SystemExit(problem)
    forks = await started_forks()
    try:
        figures = await short_program(sandbox, forks, rounds, seconds)
        figures += await with_imports(sandbox, rounds, seconds)
        figures += await score_end_to_end(sandbox, rounds)
        figures += await answer_errors(sandbox)
        figures += await stalls()
    finally:
        await asyncio.gather(
            sandbox.close(), *(forks.get_nowait().close() for _ in range(forks.qsize()))
        )
    return finish(
        "reward",
        figures,
        rounds=rounds,
        limits=sandbox.report()["limits"],
        bubblewrap=shutil.which("bwrap") is not None,
    )


async def short_program(
    sandbox: LocalSandbox, forks: asyncio.Queue[ForkAlone], rounds: int, seconds: float
) -> list[Figure]:
    """Returns rates, latencies and ratios of every way, for each number of programs at once."""
    ways: dict[str, Run] = {
        "sandbox": in_sandbox(sandbox, CODE),
        "fork alone": in_fork(forks),
        "bare": in_process(bare(CODE)),
    }
    ways["bare, print"] = in_process([*bare("")[:-1], f"{CODE}\nprint({TESTS})"], repr(VALUES))
    if shutil.which("bwrap"):
        ways["bubblewrap"] = in_process(bubblewrap(CODE))
    figures: list[Figure] = []
    for at_once in AT_ONCE:
        measured = await in_turn(ways, at_once, rounds, seconds)
        for way, runs in measured.items():
            rate = median(run.per_s for run in runs)
            latencies = [latency for run in runs for latency in run.latencies_s]
            p50, p99 = (1000 * quantile(latencies, share) for share in (0.5, 0.99))
            cpu = 1000 * median(run.cpu_s for run in runs)
            figures += [
                Figure(f"{way}, {at_once} at once", rate, "1/s"),
                Figure(f"{way}, {at_once} at once, p50", p50, "ms"),
                Figure(f"{way}, {at_once} at once, p99", p99, "ms"),
                Figure(f"{way}, {at_once} at once, CPU", cpu, "ms"),
            ]
        for way in [*measured][1:]:
            name = f"sandbox / {way}, {at_once} at once"
            figures.append(repeated(name, rate_ratios(measured, way), "x", GOALS.get(way)))
        cpu = [[run.cpu_s for run in measured[way]] for way in ("fork alone", "sandbox")]
        figures.append(
            repeated(f"sandbox / fork alone, {at_once} at once, by CPU", ratios(*cpu), "x")
        )
    return figures


async def with_imports(sandbox: LocalSandbox, rounds: int, seconds: float) -> list[Figure]:
    """Returns a comparison of a program that uses twenty modules with itself in bubblewrap."""
    if not shutil.which("bwrap"):
        print("no bwrap here (apt-get install bubblewrap): bubblewrap's columns are left out\n")
        return []
    code = f"{IMPORTS}\n{CODE}"
    ways = {"sandbox": in_sandbox(sandbox, code), "bubblewrap": in_process(bubblewrap(code))}
    measured = await in_turn(ways, 2, rounds, seconds)
    rates = {way: median(run.per_s for run in runs) for way, runs in measured.items()}
    return [
        *(Figure(f"{way}, twenty imports, 2 at once", rate, "1/s") for way, rate in rates.items()),
        repeated(
            "sandbox / bubblewrap, twenty imports",
            rate_ratios(measured, "bubblewrap"),
            "x",
            IMPORTS_GOAL,
        ),
    ]


async def score_end_to_end(sandbox: LocalSandbox, rounds: int) -> list[Figure]:
    """Returns how 512 completions over HTTP compare to their programs given to a sandbox of as many
    slots."""
    scored: list[float] = []
    ran: list[float] = []
    async with running_service(max(AT_ONCE)) as (client, _):
        for number in range(rounds + 1):  # the first warms up
            scored.append(await score_once(client, number))
            ran.append(await run_once(sandbox, number))
    return [
        Figure("/score, 512 items", median(scored[1:]), "1/s"),
        Figure("the same programs in the sandbox", median(ran[1:]), "1/s"),
        repeated("/score / sandbox", ratios(scored[1:], ran[1:]), "x", SCORE_GOAL),
    ]


async def answer_errors(sandbox: LocalSandbox) -> list[Figure]:
    """Returns how many wrong answers `math` accepts, and how many right ones it rejects."""
    settings = Settings()
    tools = GraderTools(settings, sandbox, FunctionWorkers(sandbox), LimitedPool())
    graders.load()
    math_grader = registry.bind(RewardSpec(grader="math"), tools)
    given = {True: 0, False: 0}
    mistaken = {True: 0, False: 0}
    for pair in map(json.loads, ANSWER_PAIRS.read_text("utf-8").splitlines()):
        item = ScoreItem(prompt="", completion=pair["given"], row={"answer": pair["wanted"]})
        (part,) = await math_grader.grade([item])
        given[pair["right"]] += 1
        mistaken[pair["right"]] += part.value != float(pair["right"])
    await tools.limited.close()
    return [
        Figure("wrong answers that earn 1", 100 * mistaken[False] / given[False], "%", 0.0, "max"),
        Figure("right answers that earn 0", 100 * mistaken[True] / given[True], "%", 0.0, "max"),
    ]


@contextlib.asynccontextmanager
async def running_service(num_slots: int) -> AsyncGenerator[tuple[Client, str]]:
    """Yields a client of a reward service of its own, and its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    environment = {
        "PATH": os.environ["PATH"],
        "HONE_REWARD_PORT": url.rpartition(":")[2],
        "HONE_SANDBOX_SLOTS": str(num_slots),
    }
    service = subprocess.Popen(
        [sys.executable, "-m", "services.reward"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        async with Client("reward", url, patience_s=600.0) as client:  # the service starts
            yield client, url
    finally:
        service.terminate()
        service.wait()


async def stalls() -> list[Figure]:
    """Returns the longest answer time of `/healthz`, and the longest wait of honest completions."""
    answers_s: list[float] = []
    waits_s: list[float] = []
    async with running_service(num_slots=4) as (client, url):
        await grade(client, "code_tests", ["f = int"], [{"tests": "assert f(1) == 1"}], 1.0)
        for tests, program in HOSTILE.values():
            asking = asyncio.create_task(_ask(url, answers_s))
            programs = [f"{program}\n# {number}" for number in range(NUM_HOSTILE)]
            rows = [{"tests": tests}] * NUM_HOSTILE
            hostile = asyncio.create_task(grade(client, "code_tests", programs, rows, 0.0))
            await asyncio.sleep(0.1)
            right = [f"f = lambda x: x\n# {number}, {tests}" for number in range(NUM_HONEST)]
            rows = [{"tests": "assert f(7) == 7"}] * NUM_HONEST
            waits_s.append(await grade(client, "code_tests", right, rows, 1.0))
            await hostile
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    honest = f"{NUM_HONEST} honest completions beside {NUM_HOSTILE} hostile ones, longest"
    return [
        Figure("/healthz beside these, longest", max(answers_s), "s", STALL_GOAL_S, "max"),
        Figure(honest, max(waits_s), "s", HONEST_GOAL_S, "max"),
    ]


async def _ask(url: str, answers_s: list[float]) -> None:
    """Adds how long each answer of `/healthz` took, until it is cancelled."""
    async with httpx.AsyncClient(timeout=600) as client:
        while True:
            start = time.perf_counter()
            (await client.get(f"{url}/healthz")).raise_for_status()
            answers_s.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)


async def grade(
    client: Client, grader: str, programs: list[str], rows: list[dict[str, Any]], wanted: float
) -> float:
    """Returns the seconds that grading takes. Raises AssertionError for another reward."""
    items = tuple(
        ScoreItem(prompt="", completion=text, row=row)
        for text, row in zip(programs, rows, strict=True)
    )
    request = ScoreRequest(items=items, rewards=(RewardSpec(grader=grader),))
    start = time.perf_counter()
    result = await client.call("POST", "/score", request, ScoreResult, deadline_s=600)
    seconds = time.perf_counter() - start
    assert all(score.value == wanted for score in result.scores), result.scores[0]
    return seconds


async def score_once(client: Client, number: int) -> float:
    """Returns how many completions per second the service grades."""
    programs = [program(number, index) for index in range(NUM_ITEMS)]
    rows = [{"target": [*VALUES, index]} for index in range(NUM_ITEMS)]
    return NUM_ITEMS / await grade(client, "python_value", programs, rows, 1.0)


async def run_once(sandbox: LocalSandbox, number: int) -> float:
    from services.reward.graders.python_value import LAST_VALUE  # as the grader itself

    last = 'eval(compile(_last, "program.py", "eval"))'
    requests = [
        ExecuteRequest(code=LAST_VALUE, expression=last, inputs={"_source": program(number, index)})
        for index in range(NUM_ITEMS)
    ]
    start = time.perf_counter()
    executions = await sandbox.run(requests)
    seconds = time.perf_counter() - start
    assert all(execution.verdict == "ok" for execution in executions), executions[0]
    return NUM_ITEMS / seconds


def program(number: int, index: int) -> str:
    """Returns a program unlike all others: equal completions of a request are graded once."""
    return f"# round {number}\n{CODE}\n{TESTS} + [{index}]"


async def in_turn(
    ways: dict[str, Run], at_once: int, rounds: int, seconds: float
) -> dict[str, list[Measurement]]:
    measured: dict[str, list[Measurement]] = {way: [] for way in ways}
    for number in range(rounds + 1):  # the first warms up
        for way, run in ways.items():
            result = await measure(run, at_once, seconds if number else 0.2)
            measured[way] += [result] if number else []
    return measured


async def measure(run: Run, at_once: int, seconds: float) -> Measurement:
    latencies: list[float] = []
    cpu_before_s, start = cpu_s(), time.perf_counter()

    async def client() -> None:
        while (before := time.perf_counter()) < start + seconds:
            await run()
            latencies.append(time.perf_counter() - before)

    await asyncio.gather(*(client() for _ in range(at_once)))
    seconds = time.perf_counter() - start
    return Measurement(
        len(latencies) / seconds, latencies, (cpu_s() - cpu_before_s) / len(latencies)
    )


def cpu_s() -> float:
    """Returns the CPU time of this process and of all that it started, ended ones included."""
    own, found = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            used = process.cpu_times()
            found += used.user + used.system + used.children_user + used.children_system
    return found


def rate_ratios(measured: dict[str, list[Measurement]], other: str) -> list[float]:
    own, others = ([run.per_s for run in measured[way]] for way in ("sandbox", other))
    return ratios(own, others)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def in_sandbox(sandbox: LocalSandbox, code: str) -> Run:
    request = ExecuteRequest(code=code, expression=TESTS)

    async def run() -> None:
        ended = await sandbox.execute(request)
        assert ended.value == VALUES, ended

    return run


def in_fork(forks: asyncio.Queue[ForkAlone]) -> Run:
    from services.reward.sandbox import verdicts

    request = ExecuteRequest(code=CODE, expression=TESTS)

    async def run() -> None:
        fork = await forks.get()
        ended = verdicts.execution(await fork.run(request, 30.0), request)
        forks.put_nowait(fork)
        assert ended.value == VALUES, ended

    return run


async def started_forks() -> asyncio.Queue[ForkAlone]:
    forks: asyncio.Queue[ForkAlone] = asyncio.Queue()
    for number in range(max(AT_ONCE)):
        fork = ForkAlone(number, isolated=False)
        await fork.start()
        forks.put_nowait(fork)
    return forks


def in_process(command: list[str], expected: str = json.dumps(VALUES)) -> Run:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={}
        )
        said, _ = await process.communicate()
        assert said.decode().strip() == expected, said

    return run


def bare(code: str) -> list[str]:
    return [
        host.interpreter(),
        "-I",
        "-S",
        "-c",
        f"{code}\nimport json\nprint(json.dumps({TESTS}))",
    ]


def bubblewrap(code: str) -> list[str]:
    shown = [
        part
        for path in host.binds(packages=False)
        if not path.startswith("/dev")
        for part in ("--ro-bind", path, path)
    ]
    links = [part for path, target in host.links().items() for part in ("--symlink", target, path)]
    mounts = [*shown, *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--new-session",
        "--die-with-parent",
        *mounts,
        *bare(code),
    ]


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
