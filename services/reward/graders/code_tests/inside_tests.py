"""In the tests' sandbox: judges results of the candidate (`judged`), or runs test code in which its
functions are proxies (`run`). Standard library only.

No candidate code runs here: what it returned is made anew of exact built-in types, so no equality
is the program's.

A proxy answers a call from `known`, the results of calls made so far,
which are plain data. It notes a call that is not known, and answers with a `Guess`, which agrees
with everything, so that one run finds all calls of a loop. How a run with guesses ends does not
count.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from services.reward.grading.codec import (
    AwaitedResult,
    NotPlain,
    WrongType,
    decode,
    encode,
    same,
)

MAX_GUESSED_CALLS = 500
MAX_NEW_CHARS = 60_000
"""Most characters of new calls in a run with guesses, because its result is bounded."""

MAX_MESSAGE_CHARS = 200


class Stop(BaseException):
    """The run ends here. Tests may swallow it: what counts is `Proxies.end`."""


class Guess:
    """What a call might have returned. It agrees with everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())

    __hash__ = object.__hash__


def _agree() -> None:
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains"):
        setattr(Guess, f"__{name}__", lambda self, other: True)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
        setattr(Guess, f"__{name}__", lambda self, other: self)
        setattr(Guess, f"__r{name}__", lambda self, other: self)
    for name in ("neg", "pos", "abs", "invert", "round"):
        setattr(Guess, f"__{name}__", lambda self, *digits: self)
    for name, value in {"bool": True, "len": 0, "int": 0, "index": 0, "float": 0.0}.items():
        setattr(Guess, f"__{name}__", lambda self, value=value: value)
    Guess.__await__ = lambda self: iter(())  # pyright: ignore[reportAttributeAccessIssue]
    Guess.__getitem__ = lambda self, key: self  # pyright: ignore[reportAttributeAccessIssue]


class _Lenient(ast.NodeTransformer):
    """Asserts that never fail, for runs that guess."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)


class Proxies:
    """Stands for the candidate's functions. `end` is how a call ended the run, and why: "unknown"
    (its result is not known yet), "opaque" (its result is not plain data) or "unfit" (its arguments
    are not). From then on no call is noted and none returns, whatever the tests do."""

    def __init__(self, known: list[list[str]], special: frozenset[str], guess: bool) -> None:
        """`known`: one `[name, encoded arguments, how, text]` per call made so far, in order.
        `special`: the floats of `SPECIAL` that a result may be."""
        self._known = known
        self._special = special
        self._outcomes: dict[tuple[str, str], list[list[str]]] = {}
        for name, given, how, text in known:
            self._outcomes.setdefault((name, given), []).append([how, text])
        self._last: dict[tuple[str, str], list[str]] = {}
        self._guess = guess
        self._made: list[list[str]] = []
        self._new_chars = 0
        self.unknown = 0
        self.end: tuple[str, str] | None = None

    def of(self, name: str) -> Any:
        return lambda *arguments, **keywords: self._answer(name, arguments, keywords)

    def calls(self) -> dict[str, Any]:
        """Returns all calls made: how many of the known calls, from the first on, and the calls
        after these."""
        again = 0
        for made, known in zip(self._made, self._known, strict=False):
            if made != known[:2]:
                break
            again += 1
        return {"again": again, "new": self._made[again:]}

    def _answer(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self.end is not None:
            raise Stop
        how, text = self._looked_up(name, arguments, keywords) or ("guess", "")
        if how == "guess":
            return Guess()
        if how == "raised":
            raise _error(text)
        if how != "value":
            self._stop("opaque", text)
        try:
            value = decode(text, special=self._special)
        except NotPlain as error:
            self._stop("opaque", f"returned {error}")
        except BaseException as error:  # this process is out of something
            self._stop("opaque", f"more than the tests can hold ({type(error).__name__})")
        return _coroutine(value.value) if isinstance(value, AwaitedResult) else value

    def _looked_up(
        self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> list[str] | None:
        """Returns `[how, text]` of this call, or of the last equal call if this one was not made
        yet; None to guess."""
        given = self._encoded(name, (arguments, keywords))
        if given is None:
            return self._unknown()
        self._made.append([name, given])
        outcomes = self._outcomes.get((name, given))
        if outcomes:
            self._last[name, given] = outcomes.pop(0)
        else:
            self._new_chars += len(given)
            self._unknown()
        return self._last.get((name, given))

    def _encoded(self, name: str, given: Any) -> str | None:
        """Returns a call's arguments as text; None where they are guesses."""
        try:
            return encode(given)
        except WrongType as error:
            if error.kind is Guess:
                return None
            self._stop("unfit", f"{name} is called with {error}")
        except BaseException as error:  # too deep, too large, out of memory
            why = str(error) if isinstance(error, NotPlain) else type(error).__name__
            self._stop("unfit", f"{name} is called with {why}")

    def _unknown(self) -> None:
        self.unknown += 1
        if not self._guess or self.unknown >= MAX_GUESSED_CALLS or self._new_chars >= MAX_NEW_CHARS:
            self._stop("unknown")

    def _stop(self, how: str, text: str = "") -> NoReturn:
        self.end = how, text[:MAX_MESSAGE_CHARS]
        raise Stop


async def _coroutine(value: Any) -> Any:
    return value


def _error(text: str) -> Exception:
    """Returns the error that a call raised, of its own class if that is one of Python's.
    StopIteration is not raised as such: it would end a test's loop over `map` early, and the test
    would pass."""
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None)
    known = (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)
    )
    try:
        return kind(message) if known else RuntimeError(text)  # pyright: ignore[reportOptionalCall]
    except TypeError:  # its class takes other arguments, as does UnicodeDecodeError
        return RuntimeError(text)


def _unittest_failures() -> list[str]:
    """Returns a list that will have the name of each failing test of `unittest`, because its
    runners raise nothing and the tests may ignore what they return."""
    import unittest

    failed: list[str] = []

    def noting(method: Any, is_subtest: bool) -> Any:
        def noted(self: Any, test: Any, *rest: Any) -> Any:
            if not is_subtest or rest[-1] is not None:
                failed.append(str(test))
            return method(self, test, *rest)

        return noted

    for name in ("addError", "addFailure", "addUnexpectedSuccess", "addSubTest"):
        method = getattr(unittest.TestResult, name)
        setattr(unittest.TestResult, name, noting(method, name == "addSubTest"))
    return failed


def _failure(error: BaseException, tests: str) -> str:
    """Returns the error that the tests raised, with the last of their own lines in its
    traceback."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")[:MAX_MESSAGE_CHARS]
    number, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = tests.splitlines()[number - 1 : number] if number else []
    return f"{text} (line {number}: {lines[0].strip():.100})" if lines else text


def run(
    setup: str,
    tests: str,
    names: list[str],
    entry: str | None,
    known: list[list[str]],
    special: list[str],
    guess: bool,
) -> dict[str, Any]:
    """Returns the calls made (`Proxies.calls`), `how` the tests ended ("passed", "failed", or as
    `Proxies.end`) and `text`, why. `entry` is given to the tests' `check` if there is one. "passed"
    means that all was run to its end, and no call stopped it."""
    _agree()
    proxies = Proxies(known, frozenset(special), guess)
    module = types.ModuleType("__main__")  # for tests that run under `if __name__ == "__main__"`
    sys.modules[module.__name__] = module
    failed = _unittest_failures() if "unittest" in tests else []
    how, text = "passed", ""
    try:
        exec(compile(setup, "setup.py", "exec", dont_inherit=True), module.__dict__)
        module.__dict__.update({name: proxies.of(name) for name in names})
        tree = ast.parse(tests)
        exec(
            compile(
                _Lenient().visit(tree) if guess else tree, "tests.py", "exec", dont_inherit=True
            ),
            module.__dict__,
        )
        if entry is not None and "check" in module.__dict__:
            module.__dict__["check"](proxies.of(entry))
    except BaseException as error:  # whatever the tests raise is how they ended
        if not (isinstance(error, SystemExit) and not error.code):  # no proxy raises that
            how, text = "failed", _failure(error, tests)
    if failed and how == "passed":
        how, text = "failed", f"{failed[0]} failed"[:MAX_MESSAGE_CHARS]
    if proxies.end is not None:
        how, text = proxies.end
    elif proxies.unknown:
        how, text = "unknown", ""
    return {**proxies.calls(), "how": how, "text": text}


MAX_TEXT_DIGITS = 30_000
"""Most digits of a number as text: writing or reading it takes time that grows with their
square."""

AGREES = "_agrees_with_one_of"
"""The function of tests that are given as data. Its arguments: a result, the results that are
right, and a tolerance."""


def judged(
    imports: str, cases: list[list[Any]], special: list[str], is_strict: bool
) -> list[list[str]]:
    """Returns verdict ("ok" or "wrong") and reason of each case: its source to show, the test, and
    the encoded results `_0`, `_1`, ... `special` are the special floats that results may have. To a
    strict judge True is not 1; else equality is Python's own, as where others run these tests."""
    sys.set_int_max_str_digits(MAX_TEXT_DIGITS)
    names: dict[str, Any] = {AGREES: _agrees, **_BY_SAME}
    for part in ast.parse(imports).body:
        with contextlib.suppress(Exception):  # of a package that calls need, and tests do not
            exec(compile(ast.Module([part], []), "tests.py", "exec"), names)
    return [
        _verdict(shown, test, results, names, frozenset(special), is_strict)
        for shown, test, results in cases
    ]


def _verdict(
    shown: str,
    test: str,
    results: list[str],
    names: dict[str, Any],
    special: frozenset[str],
    is_strict: bool,
) -> list[str]:
    try:
        values = [decode(text, special=special) for text in results]
    except NotPlain as error:
        return ["wrong", f"returned {error} in {shown}"]
    tree = ast.parse(test, mode="eval")
    if is_strict:
        tree = ast.fix_missing_locations(_Strict().visit(tree))
    given = {f"_{number}": value for number, value in enumerate(values)}
    try:
        if eval(compile(tree, "test", "eval", dont_inherit=True), {**names, **given}):
            return ["ok", ""]
    except BaseException as error:  # whatever the test raises over what the program returned
        got, why = _shown(values), f"{type(error).__name__}: {error}"
        return ["wrong", f"{shown} cannot hold for {got} ({why:.80})"]
    return ["wrong", f"{shown} does not hold: it got {_shown(values)}"]


def _shown(values: list[Any]) -> str:
    try:
        return ", ".join(f"{value!r:.80}" for value in values)
    except ValueError:
        return f"a number of more than {MAX_TEXT_DIGITS} digits"


class _Strict(ast.NodeTransformer):
    """Comparisons of equality by the functions of `_BY_SAME`."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        operands: list[Any] = [self.visit(part) for part in (node.left, *node.comparators)]
        parts: list[ast.expr] = []
        for left, kind, right in zip(operands, node.ops, operands[1:], strict=False):
            name = f"_{type(kind).__name__}"
            parts.append(
                ast.Call(ast.Name(name, ast.Load()), [left, right], [])
                if name in _BY_SAME
                else ast.Compare(left, [kind], [right])
            )
        return ast.BoolOp(ast.And(), parts) if len(parts) > 1 else parts[0]


def _is_in(value: Any, values: Any) -> bool:
    is_text = isinstance(values, str | bytes)
    return value in values if is_text else any(same(value, part) for part in values)


_BY_SAME: dict[str, Callable[[Any, Any], bool]] = {
    "_Eq": same,
    "_NotEq": lambda left, right: not same(left, right),
    "_In": _is_in,
    "_NotIn": lambda left, right: not _is_in(left, right),
}


def _agrees(value: Any, wanted: list[Any], tolerance: float) -> bool:
    return any(same(_as_json(value), _as_json(one), tolerance) for one in wanted)


def _as_json(value: Any) -> Any:
    """Returns a value as it would be once written as JSON and read again."""
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {_key(key): _as_json(part) for key, part in value.items()}
    return value


def _key(key: Any) -> Any:
    return json.dumps(key) if isinstance(key, int | float | None) else key
