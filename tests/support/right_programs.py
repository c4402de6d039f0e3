"""200 right programs, as people and models write them: 20 tasks, each written in 10 ways, each way
with another way to read its input and another way to put a program into a completion.

`COMPLETIONS` are what tests of functions grade, `WHOLE` the same programs as whole ones, which read
a line of numbers and print the answer. `rows` has the tests of each task in every style.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INPUTS = ([3, 1, 2], [5], [4, 4, -7, 0, 12, 4], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1])


@dataclass(frozen=True)
class Task:
    """A function of a list of numbers: how it is written, and what it is."""

    body: str
    right: Callable[[list[int]], Any]


def _inversions(a: list[int]) -> int:
    return sum(a[i] > a[j] for i in range(len(a)) for j in range(i + 1, len(a)))


def _rising(a: list[int]) -> int:
    best = [1] * len(a)
    for i in range(len(a)):
        best[i] = 1 + max((best[j] for j in range(i) if a[j] < a[i]), default=0)
    return max(best)


TASKS: dict[str, Task] = {
    "squares": Task("return sum(x * x for x in a)", lambda a: sum(x**2 for x in a)),
    "best_run": Task(
        "best = now = a[0]\nfor x in a[1:]:\n    now = max(x, now + x)\n    best = max(best, now)\n"
        "return best",
        lambda a: max(sum(a[i:j]) for i in range(len(a)) for j in range(i + 1, len(a) + 1)),
    ),
    "rising": Task(
        "tails = []\nfor x in a:\n    at = bisect.bisect_left(tails, x)\n"
        "    tails[at:at + 1] = [x]\nreturn len(tails)",
        _rising,
    ),
    "inversions": Task(
        "count = 0\nfor i, x in enumerate(a):\n    for y in a[i + 1:]:\n        count += x > y\n"
        "return count",
        _inversions,
    ),
    "common": Task(
        "return reduce(gcd, a)", lambda a: max(d for d in range(1, 13) if not any(x % d for x in a))
    ),
    "unique": Task("return sorted(set(a))", lambda a: sorted({*a})),
    "running": Task(
        "return list(accumulate(a))", lambda a: [sum(a[: i + 1]) for i in range(len(a))]
    ),
    "backwards": Task("return a[::-1]", lambda a: [*reversed(a)]),
    "middle": Task(
        "b = sorted(a)\nreturn b[(len(b) - 1) // 2]", lambda a: sorted(a)[(len(a) - 1) // 2]
    ),
    "frequent": Task(
        "counts = Counter(a)\nreturn min(counts, key=lambda x: (-counts[x], x))",
        lambda a: min(a, key=lambda x: (-a.count(x), x)),
    ),
    "product": Task(
        "result = 1\nfor x in a:\n    result = result * x % 1000000007\nreturn result",
        lambda a: __import__("math").prod(a) % 1_000_000_007,
    ),
    "evens": Task("return len([x for x in a if x % 2 == 0])", lambda a: sum(x % 2 == 0 for x in a)),
    "rotated": Task("d = deque(a)\nd.rotate(1)\nreturn list(d)", lambda a: [a[-1], *a[:-1]]),
    "second": Task(
        "h = []\nfor x in set(a):\n    heappush(h, -x)\nfirst = heappop(h)\n"
        "return -heappop(h) if h else -first",
        lambda a: sorted({*a})[-2] if len({*a}) > 1 else a[0],
    ),
    "bubbled": Task(
        "b = list(a)\nfor i in range(len(b)):\n    for j in range(len(b) - 1 - i):\n"
        "        if b[j] > b[j + 1]:\n            b[j], b[j + 1] = b[j + 1], b[j]\nreturn b",
        sorted,
    ),
    "primes": Task(
        "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))\n"
        "return [x for x in a if is_prime(x)]",
        lambda a: [x for x in a if x in (2, 3, 5, 7, 11)],
    ),
    "steps": Task(
        "n, count = abs(sum(a)) + 1, 0\nwhile n != 1:\n    n = 3 * n + 1 if n % 2 else n // 2\n"
        "    count += 1\nreturn count",
        lambda a: {6: 16, 5: 8, 17: 20, 55: 19}[abs(sum(a))],
    ),
    "fibonacci": Task(
        "x, y = 0, 1\nfor _ in range(2000 * len(a)):\n    x, y = y, x + y\nreturn x",
        lambda a: _fibonacci(2000 * len(a)),
    ),
    "spread": Task(
        "low, high = inf, -inf\nfor x in a:\n    low, high = min(low, x), max(high, x)\n"
        "return high - low",
        lambda a: max(a) - min(a),
    ),
    "pairs": Task(
        "return sum(1 for x, y in combinations(a, 2) if x + y > 5)",
        lambda a: sum(x + y > 5 for i, x in enumerate(a) for y in a[i + 1 :]),
    ),
}


def _fibonacci(n: int) -> int:
    x, y = 0, 1
    for _ in range(n):
        x, y = y, x + y
    return x


_IMPORTS = """\
import bisect
from collections import Counter, deque
from functools import reduce
from heapq import heappop, heappush
from itertools import accumulate, combinations
from math import gcd, inf, isqrt
"""
_CORE = "def core(a):\n{body}\n"
WAYS: dict[str, str] = {
    "plain": _IMPORTS + "\n\ndef {name}(a):\n{body}\n",
    "typed, nothing imported": "def {name}(a: List[int]) -> Optional[Union[int, List[int]]]:\n{body}\n",
    "class Solution": _IMPORTS
    + "from typing import *\n\nclass Solution:\n    def {name}(self, nums: List[int]):\n"
    "        return self._solve(nums)\n\n    def _solve(self, a):\n{body2}\n\n\n"
    "def {name}(a):\n    return Solution().{name}(a)\n",
    "lambda": _IMPORTS + _CORE + "{name} = lambda *args: core(*args)\n",
    "generator": _IMPORTS
    + _CORE
    + "def found(a):\n    yield core(a)\n\ndef {name}(a):\n    for one in found(a):\n        return one\n",
    "recursion": "import sys\nsys.setrecursionlimit(10**6)\n"
    + _IMPORTS
    + _CORE
    + "def {name}(a, depth=2000):\n    return core(a) if depth == 0 else {name}(a, depth - 1)\n",
    "cached": _IMPORTS
    + "from functools import lru_cache\n\n@lru_cache(maxsize=None)\ndef kept(given):\n"
    "    a = list(given)\n{body}\n\ndef {name}(a):\n    return kept(tuple(a))\n",
    "prints": "from __future__ import annotations\nimport sys\n"
    + _IMPORTS
    + _CORE
    + "def {name}(a):\n    for _ in range(3000):\n"
    "        print('debug: this is what came in', a, file=sys.stderr)\n    return core(a)\n",
    "dataclass": _IMPORTS + "from dataclasses import dataclass, field\n\n@dataclass\nclass Work:\n"
    "    a: list = field(default_factory=list)\n\n    def __call__(self):\n        a = self.a\n{body2}\n\n"
    "def {name}(a):\n    return Work(a)()\n",
    "stars": "from math import *\nfrom collections import *\nfrom itertools import *\nfrom heapq import *\n"
    "from functools import *\nimport bisect, functools, os\nHERE = os.path.dirname(__file__)\n\n"
    "def logged(function):\n    @functools.wraps(function)\n    def wrapper(*args, **kwargs):\n"
    "        try:\n            return function(*args, **kwargs)\n        finally:\n"
    "            wrapper.calls += 1\n    wrapper.calls = 0\n    return wrapper\n\n"
    "@logged\ndef {name}(a):\n{body}\n",
}
"""The function, by the way it is written."""

READS: dict[str, str] = {
    "input": "show({name}(list(map(int, input().split()))))",
    "readline": "import sys\ninput = sys.stdin.readline\n"
    "show({name}([int(x) for x in input().strip().split()]))\nexit()",
    "read": "import sys\ndata = sys.stdin.read().split()\nshow({name}(list(map(int, data))))\nquit()",
    "open(0)": "show({name}([*map(int, open(0).read().split())]))\nexit(0)",
    "lines": "import sys\nfor line in sys.stdin:\n    if line.strip():\n"
    "        show({name}([int(x) for x in line.split()]))\nsys.exit(0)",
    "/dev/stdin": "with open('/dev/stdin') as file:\n"
    "    show({name}(list(map(int, file.readline().split()))))",
    "buffer": "import sys\nread = sys.stdin.buffer.read\nshow({name}([int(x) for x in read().split()]))\n"
    "raise SystemExit",
    "os.read": "import os, io\nfile = io.BytesIO(os.read(0, 65536))\n"
    "show({name}([int(x) for x in file.readline().decode().split()]))",
    "thread": "import threading, sys\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
    "def run():\n    show({name}(list(map(int, input().split()))))\n"
    "thread = threading.Thread(target=run)\nthread.start()\nthread.join()",
    "def solve": "def solve():\n    a = list(map(int, input().split()))\n    print()\n    show({name}(a))\n"
    "\nt = 1\nfor _ in range(t):\n    solve()",
}
"""How a whole program reads and prints."""

_SHOWS = (
    "def show(x):\n    print(*x) if isinstance(x, list) else print(x)\n",
    "def show(x):\n    import sys\n"
    "    sys.stdout.write((' '.join(map(str, x)) if isinstance(x, list) else str(x)) + '\\n')\n",
)
FENCES: dict[str, str] = {
    "bare": "{program}",
    "python": "Here it is.\n\n```python\n{program}\n```\nIt is linear.",
    "py": "```py\n{program}\n```",
    "tildes": "~~~python3\n{program}\n~~~",
    "not closed": "Let me think.\n```python\n{program}",
    "draft before": "A draft:\n```python\ndef draft():\n    pass\n```\nBetter:\n```python\n{program}\n```",
    "usage after": "```python\n{program}\n```\nUsage:\n```python\nprint('as above')\n```\nIt prints 3.",
    "byte order mark": "\ufeff```python\n\ufeff{program}\n```",
    "no-break spaces": "\u00a0\u00a0```\u00a0python\n{program}\n```",
    "no mark": "<think>So be it.</think>\n```\n{program}\n```\n```text\n3\n```",
}
"""How a program stands in a completion."""


def _of(number: int) -> tuple[str, str, str]:
    """Returns a program's name, its completion for tests of functions, and the one of a whole
    program."""
    (name, task), way = list(TASKS.items())[number // 10], list(WAYS)[number % 10]
    read = list(READS)[(number + number // 10) % 10]
    fence = list(FENCES)[(number + number // 5) % 10]
    body, body2 = (textwrap.indent(task.body, " " * size) for size in (4, 8))
    function = WAYS[way].format(name=name, body=body, body2=body2)
    driver = _SHOWS[number % 2] + READS[read].format(name=name)
    begin = "" if way != "typed, nothing imported" else _IMPORTS + "from typing import *\n"
    guarded = f"{function}\n\nif __name__ == '__main__':\n{textwrap.indent(driver, '    ')}"
    if fence == "no-break spaces":
        guarded, driver = (
            guarded.replace("    ", "\u00a0\u00a0  "),
            driver.replace("    ", "\u00a0   "),
        )
        function_of_whole = function.replace("    ", "\u00a0   ")
    else:
        function_of_whole = function
    return (
        f"{name}, {way}, {read}, {fence}",
        FENCES[fence].replace("{program}", guarded),
        FENCES[fence].replace("{program}", f"{begin}{function_of_whole}\n{driver}"),
    )


_PROGRAMS = [_of(number) for number in range(10 * len(TASKS))]
COMPLETIONS = {name: function for name, function, _ in _PROGRAMS}
WHOLE = {name: whole for name, _, whole in _PROGRAMS}


def rows(task: str) -> dict[str, dict[str, Any]]:
    """Returns a row of each style of tests, and how it is graded (params), for one task."""
    wanted = [(given, TASKS[task].right(list(given))) for given in INPUTS]
    short = [(given, result) for given, result in wanted if len(str(result)) < 4000]
    asserts = [f"assert {task}({given}) == {result}" for given, result in short]
    loop = f"for given, wanted in {short}:\n    assert {task}(given) == wanted"
    check = "def check(candidate):\n" + "\n".join(
        f"    assert candidate({given}) == {result}" for given, result in short
    )
    functions = f"from solution import {task}\n" + "\n".join(
        f"def test_{number}():\n    result = {task}({given})\n    assert result == {result}"
        for number, (given, result) in enumerate(short)
    )
    calls = {"fn_name": task, "inputs": [[given] for given, _ in short]}
    return {
        "asserts": {"tests": asserts},
        "loop": {"tests": loop},
        "check": {"tests": check, "entry": task},
        "pytest": {"tests": functions},
        "calls": {"tests": json.dumps({**calls, "outputs": [result for _, result in short]})},
        "stdio": {
            "tests": [
                {"input": " ".join(map(str, given)) + "\n", "output": _shown(result)}
                for given, result in wanted
            ]
        },
    }


def _shown(result: Any) -> str:
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return " ".join(map(str, result)) if isinstance(result, list) else str(result)
    finally:
        sys.set_int_max_str_digits(before)
