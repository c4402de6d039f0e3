"""A reward's source with what it closes over: run alone, it does what the object does here."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import linecache
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest

from hone.trainer.rewards import rewards_of
from hone.trainer.source import callable_source, instance_source, source_of
from shared.errors import BadRequest

SCRIPT = '''
import functools
import logging
import math
import re
from collections import Counter as Bag
from statistics import mean
import threading

import helpers
from helpers import halved

DIGITS = re.compile(r"\\d+", re.I)
WEIGHTS = {"a": [1, 2.5, None], "b": (True, float("inf")), "c": {1}}
log = logging.getLogger("rewards")
lock = threading.Lock()


def uses_all(completions, **columns):
    """Two lines
of text."""
    log.info("called")
    found = [len(DIGITS.findall(text)) for text in completions]
    total = Bag("aab")["a"] + WEIGHTS["a"][1] + math.floor(mean([1, 4])) + halved(4)
    return [number + total for number in found]


def doubled(function):
    @functools.wraps(function)
    def call(*args, **columns):
        return [2 * value for value in function(*args, **columns)]
    return call


@doubled
def decorated(completions, **columns):
    return [1.0 for _ in completions]


def made(bonus):
    title = """first
  second"""

    def closes_over(completions, **columns):
        text = """a
  b"""
        return [bonus + len(title) + len(text) for _ in completions]
    return closes_over


CLOSED = made(3)
FIRST, SECOND = (lambda completions, **_: [1 for _ in completions]), (lambda completions, **_: [2])
PARTIAL = functools.partial(decorated, extra=1)


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


async def asynchronous(completions, **columns):
    return [even(len(text) // 2) for text in completions]


class Base:
    offset = 10


class Scorer(Base):
    def __init__(self):
        self.bonus = 5

    def score(self, prompt, completion, **columns):
        return self.offset + self.bonus + len(DIGITS.findall(completion))


def locks(completions, **columns):
    with lock:
        return [0.0 for _ in completions]


def modules(completions, **columns):
    return helpers.halved(completions)


def undefined(completions, **columns):
    return [not_there for _ in completions]


def shadowed(bonus):
    def halved(completions):
        return [bonus]
    return lambda completions, **columns: halved(completions) + uses_all(completions)


OTHER = shadowed(1)
'''

HELPERS = "SHARE = 0.5\n\n\ndef halved(value):\n    return value * SHARE\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "my_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("helpers", "my_script"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("my_script")
    for name in ("helpers", "my_script"):
        sys.modules.pop(name, None)


def alone(text: str) -> dict[str, Any]:
    module = types.ModuleType("reward_functions")
    sys.modules[module.__name__] = module  # as in the sandbox
    exec(compile(text, "rewards.py", "exec", dont_inherit=True), vars(module))
    return vars(module)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uses_all", [2 + 2 + 2.5 + 2 + 2.0, 0 + 2 + 2.5 + 2 + 2.0]),
        ("decorated", [2.0, 2.0]),
        ("CLOSED", [3 + 14 + 5, 3 + 14 + 5]),
        ("FIRST", [1, 1]),
        ("SECOND", [2]),
        ("PARTIAL", [2.0, 2.0]),
        ("asynchronous", [True, False]),
    ],
)
def test_the_text_alone_does_what_the_function_does(
    script: Any, name: str, expected: list[Any]
) -> None:
    function = alone(source_of(getattr(script, name), "reward"))["reward"]
    value = function(["1 23", "ab"])
    assert (asyncio.run(value) if inspect.isawaitable(value) else value) == expected


def test_a_class_comes_with_its_bases_and_an_instance_with_its_attributes(script: Any) -> None:
    scorer = script.Scorer()
    scorer.bonus = 7
    made = alone(instance_source(scorer, "Scorer"))["Scorer"]()
    assert made.score("", "1 2") == scorer.score("", "1 2") == 19


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("locks", "uses 'lock', an object of type _thread.lock, which cannot be sent"),
        ("modules", "uses the module 'helpers', a file of your own"),
        ("undefined", "'undefined' uses 'not_there', which is not defined"),
        ("OTHER", "call different objects 'halved'; expected one name for each"),
    ],
)
def test_what_the_text_cannot_have_is_refused_with_the_reason(
    script: Any, name: str, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence):
        source_of(getattr(script, name), "reward")


def test_a_function_without_source_and_an_attribute_that_is_no_data_are_refused(
    script: Any,
) -> None:
    scope: dict[str, Any] = {}
    exec("def typed(completions): return [1]", scope)
    with pytest.raises(BadRequest, match=r"the source of 'typed' of .* cannot be found"):
        source_of(scope["typed"], "typed")
    scorer = script.Scorer()
    scorer.client = object()
    with pytest.raises(BadRequest, match="its attribute 'client' is an object of type"):
        instance_source(scorer, "Scorer")


def test_a_function_of_an_installed_package_is_imported(script: Any) -> None:
    assert source_of(linecache.getline, "reward").endswith(
        "from linecache import getline as reward\n"
    )


def test_a_function_of_a_notebooks_cell_is_sent(script: Any) -> None:
    cell = "LIMIT = 3\n\ndef brief(texts):\n    return [len(text) < LIMIT for text in texts]\n"
    file = "<ipython-input-1-abc>"
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, file, "exec"), scope)
    made = alone(source_of(scope["brief"], "brief"))["brief"]
    assert made(["ab", "abcd"]) == [True, False]


FUTURES = """
import concurrent.futures


def pooled(completions, **columns):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return list(pool.map(len, completions))
"""


def test_a_module_of_a_package_is_imported_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pooling.py").write_text(FUTURES)
    monkeypatch.syspath_prepend(tmp_path)
    pooled = importlib.import_module("pooling").pooled
    (tmp_path / "alone.py").write_text(source_of(pooled, "pooled") + "print(pooled(['ab']))")
    command = [sys.executable, "-S", str(tmp_path / "alone.py")]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[2]\n"


def test_a_reward_of_a_package_is_text_that_needs_no_package() -> None:
    from trl.rewards import accuracy_reward

    text = source_of(accuracy_reward, "accuracy_reward")
    assert "\nimport trl" not in text and "\nfrom trl" not in text
    assert "metadata.packages_distributions()" in text  # of the sandbox, not of this machine
    said = [[{"role": "assistant", "content": f"It is \\boxed{{{n}}}"}] for n in (3, 4)]
    assert alone(text)["accuracy_reward"](said, ["$3$", "$3$"]) == [1.0, 0.0]


def test_a_reward_whose_package_cannot_be_sent_is_imported() -> None:
    assert source_of(inspect.unwrap, "unwrap").endswith("from inspect import unwrap as unwrap\n")
    numeric = source_of(numpy.cumsum, "cumsum")
    assert numeric.endswith("from numpy import cumsum as cumsum\n")


def _asking(key: str) -> Any:
    settings = {"headers": [key]}

    def asking(completions: list[str], **_: Any) -> list[float]:
        return [float(len(settings)) for _ in completions]

    return asking


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("sk-" + "a1" * 12, "a key that begins with 'sk-'"),
        ("Bearer long-enough-value", "the value of OUR_JUDGE_TOKEN"),
    ],
)
def test_a_secret_that_a_reward_closes_over_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str, what: str
) -> None:
    monkeypatch.setenv("OUR_JUDGE_TOKEN", "long-enough-value")
    with pytest.raises(BadRequest) as error:
        rewards_of(_asking(key), None)
    assert f"'asking', with what it closes over, has {what}; expected" in error.value.detail
    assert key[-12:] not in error.value.detail
    assert rewards_of(_asking("</s>"), None)[0]["function"] == "asking"


CALLABLES = """
import asyncio
import dataclasses


@dataclasses.dataclass(frozen=True)
class Above:
    least: int

    def __call__(self, completions, answer, **columns):
        return [float(len(text) > self.least) for text in completions]


class Waits:
    async def __call__(self, completions, **columns):
        await asyncio.sleep(0)
        return [2.0 for _ in completions]


def imports_a_file(completions):
    import beside

    return [beside.ONE for _ in completions]


def uses_json(completions):
    import json

    return [float(json.loads(text)) for text in completions]
"""


@pytest.fixture
def callables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "callables.py").write_text(CALLABLES)
    (tmp_path / "beside.py").write_text("ONE = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "callables", raising=False)
    return importlib.import_module("callables")


def test_an_object_that_can_be_called_is_sent_with_its_attributes(callables: Any) -> None:
    made = alone(callable_source(callables.Above(3), "above"))["above"]
    assert made(["abc", "abcd"], answer=["", ""]) == [0.0, 1.0]
    assert [*inspect.signature(made).parameters] == ["completions", "answer", "columns"]
    waits = alone(callable_source(callables.Waits(), "waits"))["waits"]
    assert inspect.iscoroutinefunction(waits) and asyncio.run(waits(["a"])) == [2.0]
    (table,) = rewards_of(callables.Above(3), None)
    assert table["function"] == "reward_0"
    with pytest.raises(BadRequest, match="its attribute 'least' is an object of type"):
        rewards_of(callables.Above(object()), None)


def test_an_import_of_a_file_beside_the_script_is_refused_with_its_line(callables: Any) -> None:
    with pytest.raises(BadRequest, match="imports 'beside' in line 21, a file of your own"):
        rewards_of(callables.imports_a_file, None)
    (table,) = rewards_of(callables.uses_json, None)
    assert alone(table["source"])["uses_json"](["1.5"]) == [1.5]


def test_trls_soft_overlong_punishment_is_the_grader_overlong() -> None:
    trl = pytest.importorskip("trl.rewards", reason="TRL is not installed")
    from services.reward.graders.length import punishment

    given = trl.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    (table,) = rewards_of(given, [0.5])
    limits = {"max_tokens": 100, "buffer_tokens": 20}
    assert table == {"grader": "overlong", "params": limits, "weight": 0.5}
    for length in (0, 80, 81, 90, 100, 101):
        assert given([[1] * length]) == [punishment(length, **limits)]
