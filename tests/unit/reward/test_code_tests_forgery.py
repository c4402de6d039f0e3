"""Programs that solve nothing and want the reward: against each way of testing, in the real
sandbox. None gets it.

The task is `add(a, b)`. R-numbers are those under which these tricks beat public graders that
compare inside the sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from services.reward.grading import registry
from services.reward.grading.registry import GradingFailed
from services.reward.sandbox.local import LocalSandbox
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem
from tests.support.reward_helpers import running_sandbox, tools_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = "def add(a, b):\n    return a + b"

HACKS: dict[str, str] = {
    "R1 sys.exit at import": "import sys\nsys.exit(0)",
    "R2 SystemExit at import": "raise SystemExit",
    "R3 os._exit at import": "import os\nos._exit(0)",
    "R4 posix._exit in disguise": "import posix\nposix._exit(int())",
    "R5 SystemExit in the function": "def add(a, b):\n    raise SystemExit(0)",
    "os._exit in the function": "import os\ndef add(a, b):\n    os._exit(0)",
    "R6 an object that equals all": "class E:\n    def __eq__(self, other): return True\n"
    "def add(a, b):\n"
    "    return E()",
    "R7 an int that equals all": "class E(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\n"
    "def add(a, b):\n    return E(0)",
    "a str that equals all": "class E(str):\n    def __eq__(self, other): return True\n"
    "    __hash__ = str.__hash__\n"
    "def add(a, b):\n    return E('x')",
    "a class that claims to be int": "class E:\n    __class__ = int\n"
    "    def __eq__(self, other): return True\n"
    "    def __int__(self): return 3\ndef add(a, b):\n    return E()",
    "R8 the answer from a frame": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name in ('expected', 'gt_out', 'wanted', 'answer', 'test'):
            if name in frame.f_locals:
                return frame.f_locals[name]
        frame = frame.f_back
""",
    "R9 the verdict written into frames": """
import sys, os
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, list):
                value.append('passed')
        frame = frame.f_back
    os._exit(0)
""",
    "the answer from gc": """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if type(thing) is dict and 'expected' in thing:
            return thing['expected']
""",
    "the tests from __main__": """
def add(a, b):
    import __main__
    return [value for value in vars(__main__).values() if 'assert' in str(value)][0]
""",
    "the tests from open files": """
import os
def add(a, b):
    for number in range(64):
        try:
            text = os.pread(number, 1 << 20, 0).decode(errors='replace')
        except OSError:
            continue
        if '==' in text:
            return eval(text.split('==')[1].split()[0])
""",
    "R11 atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "R12 excepthook": "import sys, posix\nsys.excepthook = lambda *a: posix._exit(0)\n"
    "def add(a, b):\n    raise ValueError",
    "R14 exec of true": "import posix\nposix.execv('/bin/true', ['true'])",
    "R15 settrace": "import sys, os\nsys.settrace(lambda *a: os._exit(0))\ndef add(a, b):\n"
    "    return 0",
    "R17 results on every descriptor": """
import os, json
forged = json.dumps({'end': 'ok', 'value': [['value', 'true']] * 3}).encode()
for number in range(64):
    try: os.write(number, forged)
    except OSError: pass
os._exit(0)
""",
    "results of the wrong shape": """
import os, json
os.ftruncate(3, 0)
value = {'passed': True, 'how': 'passed', 'calls': []}
os.pwrite(3, json.dumps({'end': 'ok', 'value': value}).encode(), 0)
os._exit(0)
""",
    "fewer results than tests": """
import os, json
os.pwrite(3, json.dumps({'end': 'ok', 'value': [['value', '3']]}).encode(), 0)
os._exit(0)
""",
    "other results each time": "import time\ndef add(a, b):\n"
    "    return time.time_ns() % 1000 + 100",
    "R19 a list of itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "R19 a giant number": "def add(a, b):\n    return 10 ** 100000",
    "R19 NaN": "def add(a, b):\n    return float('nan')",
    "NaN written by hand": """
import services.reward.graders.code_tests.codec as codec, sys
def add(a, b):
    for module in list(sys.modules.values()):
        if hasattr(module, 'encode') and hasattr(module, 'NotPlain'):
            module.encode = lambda value: 'NaN'
    return 0
""",
    "R20 json patched": "import json\njson.dumps = lambda *a, **k: '[true]'\n"
    "json.JSONEncoder.encode = lambda *a: '3'\n"
    "def add(a, b):\n    return 0",
    "R24 printing PASSED": "print('PASSED\\n3 passed in 0.01s\\nOK')\ndef add(a, b):\n    return 0",
    "assert compiled away": "import sys, builtins\nsys.flags = None\n"
    "builtins.AssertionError = type('A', (BaseException,), {})\n"
    "def add(a, b):\n    return 0",
    "builtins patched": "import builtins\n"
    "builtins.all = builtins.any = builtins.isinstance = lambda *a, **k: True\n"
    "builtins.abs = lambda x: 0\nabs = lambda x: 0\ndef add(a, b):\n    return 0",
    "the runner patched": """
import sys
for module in list(sys.modules.values()):
    if getattr(module, '__name__', '').endswith(('inside_candidate', 'program')):
        for name in ('run', '_outcome', '_made', '_described', '_execute'):
            if hasattr(module, name):
                setattr(module, name, lambda *a, **k: ['value', 'true'])
def add(a, b):
    return 0
""",
    "R27 arguments changed": "def add(a, b):\n    return [a, b].clear()",
    "R29 a str whose split lies": "class S(str):\n    def split(self, *a): return ['3']\n"
    "    def strip(self): return '3'\n"
    "def add(a, b):\n    return S('0')",
    "R30 everything swallowed": "def add(a, b):\n    try:\n        return 1 / 0\n"
    "    except BaseException:\n"
    "        pass",
    "a destructor": "import os\nclass D:\n    def __del__(self): os._exit(0)\nd = D()\n"
    "def add(a, b):\n    global d\n    d = None",
    "a thread that writes later": """
import threading, os, time
def forge():
    time.sleep(0.05)
    os._exit(0)
threading.Thread(target=forge, daemon=True).start()
def add(a, b):
    time.sleep(0.2)
    return 0
""",
    "a thread left behind": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,)).start()\n" + RIGHT,
    "a child that answers": "import os\nif os.fork():\n    os.wait()\n"
    "    os._exit(0)\ndef add(a, b):\n"
    "    return 0",
    "recursion": "def add(a, b):\n    return add(a, b)",
    "a giant output": "def add(a, b):\n    return 'x' * 10_000_000",
    "a giant print": "def add(a, b):\n    print('3' * 10_000_000)\n    return a + b",
    "an error that ends loops": "def add(a, b):\n    raise StopIteration",
    "a generator": "def add(a, b):\n    yield a + b",
    "a spinning loop": "def add(a, b):\n    while True: pass",
    "a spinning loop that will not stop": "def add(a, b):\n    while True:\n        try:\n"
    "            while True: pass\n"
    "        except BaseException: pass",
    "a constant": "def add(a, b):\n    return 3",
    "True for 1": "def add(a, b):\n    return {1: True}.get(a + b, a + b)",
    "nothing at all": "",
    "not a program": "I think the answer is 3.",
    "a NUL byte": "def add(a, b):\n    return a + b\n\0",
    "a lone surrogate": "def add(a, b):\n    return '\\ud800'",
}

PARAMS = {"timeout_s": 3.0, "cpu_s": 0.25, "memory_mib": 256}
HASTY = {"timeout_s": 1.5, "cpu_s": 0.1}
"""For tricks: some wait for as long as they may."""
ASSERTS = [
    "assert add(1, 2) == 3",
    "assert add(-2, 3) == 1",
    "assert not abs(add(2.5, 4.5) - 7) > 1e-6",
]
LOOP = (
    "def check(candidate):\n    assert candidate(1, 0) == 1 and candidate(1, 0) is not True\n    "
    "for x in range(5):\n" + ("        assert candidate(x, 2) == x + 2, 'wrong sum'\n")
)
MAPPED = (
    "def check(candidate):\n"
    "    assert all(map(lambda x: candidate(x, 2) == x + 2 and candidate(1, 0) is "
    "not True, range(5)))\n"
)
NEAR = (
    "def check(candidate):\n    assert candidate(1, 0) is not True\n    for x in range(5):\n"
    "        assert not abs(candidate(x + 3.5, 2) - x - 5.5) > 1e-6\n"
)
NESTED = (
    "def check(candidate):\n    assert candidate(1, 0) is not True\n    x = 0\n"
    "    for _ in range(8):\n"
)
NESTED += "        x = candidate(x, candidate(x, 1))\n    assert x == 255\n"
STYLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "asserts": ({"style": "asserts"}, {"tests": ASSERTS}),
    "proxied in a map": (
        {"style": "check", "entry_point": "name"},
        {"tests": MAPPED, "name": "add"},
    ),
    "proxied one in another": (
        {"style": "check", "entry_point": "name"},
        {"tests": NESTED, "name": "add"},
    ),
    "proxied with a tolerance": (
        {"style": "check", "entry_point": "name"},
        {"tests": NEAR, "name": "add"},
    ),
    "proxied": ({"style": "check", "entry_point": "name"}, {"tests": LOOP, "name": "add"}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncGenerator[LocalSandbox]:
    async with running_sandbox(4) as sandbox:
        yield sandbox


async def grade(sandbox: LocalSandbox, completion: str, row: dict[str, Any], **params: Any) -> Part:
    bound = registry.bind(
        RewardSpec(grader="code_tests", params=PARAMS | params), tools_of(sandbox)
    )
    (part,) = await bound.grade([ScoreItem(prompt="", completion=completion, row=row)])
    return part


@pytest.mark.parametrize("style", STYLES)
async def test_the_right_program_earns_the_reward(sandbox: LocalSandbox, style: str) -> None:
    params, row = STYLES[style]
    assert (await grade(sandbox, f"Here:\n```python\n{RIGHT}\n```", row, **params)).value == 1.0


@pytest.mark.parametrize("style", STYLES)
async def test_no_trick_earns_a_reward_and_the_next_program_is_judged_right(
    sandbox: LocalSandbox, style: str
) -> None:
    params, row = STYLES[style]

    async def of(program: str, **limits: float) -> Part:
        return await grade(sandbox, program, row, **params, **limits)

    graded = await asyncio.gather(*(of(program, **HASTY) for program in HACKS.values()))
    parts = dict(zip(HACKS, graded, strict=True))
    assert {
        name: part
        for name, part in parts.items()
        if part.value != 0.0 or part.verdict in ("ok", "error")
    } == {}
    assert (await of(RIGHT)).value == 1.0


@pytest.mark.parametrize("style", STYLES)
async def test_partial_credit_counts_no_trick_as_a_passed_test_but_for_constants(
    sandbox: LocalSandbox, style: str
) -> None:
    params, row = STYLES[style]
    for name in (
        "R3 os._exit at import",
        "R6 an object that equals all",
        "R17 results on every descriptor",
    ):
        assert (await grade(sandbox, HACKS[name], row, credit="partial", **params)).value == 0.0, (
            name
        )
    wanted = 1 / 3 if style == "asserts" else 0.0
    assert (
        await grade(sandbox, HACKS["a constant"], row, credit="partial", **params)
    ).value == wanted


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print(int(input()) + 1)", "ok"),
        ("import sys\nprint(int(sys.stdin.read()) + 1)\nsys.exit(0)", "ok"),
        ("print(3)", "wrong"),
        ("print('PASSED')", "wrong"),
        ("import sys\nsys.exit(0)", "wrong"),
        ("import os\nos.write(1, b'3\\n4\\n3')\nos._exit(0)", "wrong"),
        ("print(int(input()) + 1)\nraise ValueError", "runtime_error"),
        ("print(int(input()) + 1)\nwhile True: pass", "time_limit"),
        ("print('3\\n' * 100_000)", "output_limit"),
        ("x = 'x' * (1 << 30)", "memory_limit"),
    ],
)
async def test_outputs_of_programs_are_compared_outside(
    sandbox: LocalSandbox, program: str, verdict: str
) -> None:
    row = {"tests": [{"input": "2\n", "output": "3\n"}, {"input": "3", "output": "4"}]}
    part = await grade(sandbox, program, row, style="stdio")
    assert (part.value, part.verdict) == (float(verdict == "ok"), verdict)


async def test_no_job_of_the_candidate_holds_an_expected_answer(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[str] = []
    execute = sandbox.execute

    async def watched(request: Any) -> Any:
        programs.append(request.model_dump_json())
        return await execute(request)

    monkeypatch.setattr(sandbox, "execute", watched)
    tests = (
        "def check(candidate):\n    for x in [1, 2]:\n"
        "        assert candidate(x, 2) == x + 2, 987654321\n"
    )
    await grade(
        sandbox,
        RIGHT,
        {"tests": ["assert add(1, 2) == 987654321", "assert abs(add(1, 2) - 987654321) < 1"]},
        credit="partial",
    )
    await grade(sandbox, RIGHT, {"tests": tests, "name": "add"}, style="check", entry_point="name")
    await grade(
        sandbox, RIGHT, {"tests": '{"inputs": ["1"], "outputs": ["987654321"]}'}, style="stdio"
    )
    with_program = [program for program in programs if "return a + b" in program]
    assert len(with_program) == 3
    assert not any("987654321" in program for program in with_program)
    assert not any("return a + b" in program for program in programs if "987654321" in program)


async def test_rows_without_usable_tests_have_no_reward_and_say_so(sandbox: LocalSandbox) -> None:
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"tests": []}, {}, "the row has no tests"),
        ({"tests": ["assert add(1, 2 =="]}, {}, "the tests are not Python"),
        ({"tests": 5}, {}, "the tests are 5; expected Python source"),
        ({"tests": "x = 1"}, {"style": "stdio"}, "expected JSON"),
        ({"tests": [{"input": 1, "output": "1"}]}, {"style": "stdio"}, "expected a list of"),
        (
            {"tests": LOOP, "name": "a b"},
            {"style": "check", "entry_point": "name"},
            "expected a function's name",
        ),
        (
            {"tests": "def check(candidate):\n    candidate(open)", "name": "add"},
            {"style": "check", "entry_point": "name"},
            "plain data",
        ),
    ]
    for row, params, message in bad:
        with pytest.raises(GradingFailed, match=message):
            await grade(
                sandbox,
                RIGHT + "\nclass Solution:\n    def f(self, x):\n        return x",
                row,
                **params,
            )
