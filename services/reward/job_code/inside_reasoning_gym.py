"""Scores answers to problems of the package reasoning-gym, in a worker without network. The
standard library and that package only: the worker gets the text of this file.

The package reads answers with `eval` and with sympy's `parse_expr`, which evaluate Python. Here
both refuse all but numbers, texts, lists, arithmetic and functions of sympy, so that an answer
cannot run a program that gives itself a reward.
"""

# Packages of extras may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

MAX_CHARS = 100_000
"""Of an answer. A longer one earns 0."""

_PLAIN = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
)


def score(completions: list[str], entry: list[str]) -> list[tuple[float, str]]:
    """Returns what the tasks' own `score_answer` gives each answer, and why not where it fails."""
    return [_score(*each) for each in zip(completions, entry, strict=True)]


def _score(completion: str, text: str) -> tuple[float, str]:
    entry = ast.literal_eval(text)
    dataset = _dataset(entry["task"], repr(entry["config"]))
    answer = answer_in(completion)
    if len(answer) > MAX_CHARS:
        return 0.0, f"an answer of {len(answer)} characters"
    try:
        value = float(dataset.score_answer(answer, entry))
    except Exception as error:  # the package's parsers raise any class for what they cannot read
        return 0.0, f"read {answer!r:.80}: {type(error).__name__}: {str(error)[:200]}"
    return value, f"read {answer!r:.80}"


def answer_in(completion: str) -> str:
    """Returns the text of the last `<answer>`; of a completion without one, all of it."""
    found = ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


@functools.lru_cache(maxsize=32)
def _dataset(task: str, config: str) -> Any:
    import reasoning_gym  # noqa: F401  (registers the tasks)
    from pydantic import TypeAdapter
    from reasoning_gym.factory import DATASETS

    _disarm()
    kind, config_type = DATASETS[task]
    given = ast.literal_eval(config) | {"seed": 0, "size": 1}
    return kind(config=TypeAdapter(config_type).validate_python(given))


@functools.cache
def _disarm() -> None:
    """Gives the package an `eval` of plain data, and sympy one of its own functions."""
    import reasoning_gym
    from sympy.parsing import sympy_parser

    for name, module in [*sys.modules.items()]:
        if name.startswith(reasoning_gym.__name__):
            module.eval = _plain_eval  # pyright: ignore[reportAttributeAccessIssue]
    sympy_parser.eval_expr = _sympy_eval


def _plain_eval(text: str, *_: Any) -> Any:
    """As `eval`, of numbers, texts, lists and their arithmetic alone."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _PLAIN) or isinstance(node, ast.Pow):
            raise ValueError(f"{ast.unparse(node)!r:.80} is no plain data")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})


def _sympy_eval(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
    """As sympy's own, of symbols, numbers and sympy's functions alone."""
    from sympy import Basic
    from sympy.core.function import UndefinedFunction

    tree = ast.parse(code.strip(), mode="eval")
    known = {
        **global_dict,
        **{key: value for key, value in local_dict.items() if value is not None},
    }
    named: set[int] = set()  # texts that name a symbol or write a number
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            kind = known.get(node.func.id) if isinstance(node.func, ast.Name) else None
            is_own = inspect.isclass(kind) and issubclass(kind, Basic)
            if not (is_own or isinstance(kind, UndefinedFunction) or kind in _functions()):
                raise ValueError(f"{ast.unparse(node.func)!r:.80} is no function of an expression")
            if is_own and getattr(kind, "__name__", "") in (
                "Symbol",
                "Integer",
                "Float",
                "Rational",
            ):
                named |= {id(given) for given in node.args}
        elif isinstance(node, ast.Name):
            value = known.get(node.id)
            if not isinstance(value, Basic) and not callable(value):
                raise ValueError(f"{node.id!r:.80} is no name of an expression")
        elif isinstance(node, ast.Constant):
            if not isinstance(node.value, int | float | complex) and id(node) not in named:
                raise ValueError(f"{node.value!r:.80} is text in an expression")
        elif not isinstance(node, (*_PLAIN, ast.keyword)):
            raise ValueError(f"{ast.unparse(node)!r:.80} is no expression")
    return eval(compile(tree, "answer", "eval"), global_dict, local_dict)


@functools.cache
def _functions() -> frozenset[Any]:
    """Returns sympy's functions of numbers that are no classes."""
    import sympy

    names = ("sqrt", "cbrt", "root", "real_root", "Abs", "Max", "Min", "ln", "factorial")
    return frozenset(getattr(sympy, name) for name in names)
