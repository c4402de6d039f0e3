"""In the tests' sandbox: runs test code, in which the candidate's functions are proxies. Standard
library only.

No candidate code runs here. A proxy answers a call from `known`, the results of calls made so far,
which are plain data. At the first call that is not known it notes that call and guesses on: its
answer is then a `Guess`, of which everything is true, so that the further calls of a loop are found
in one go. What a run with guesses says of the tests does not count.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from typing import Any

from services.reward.graders.code_tests.codec import NotPlain, decode, encode

MAX_GUESSED_CALLS = 500
MAX_MESSAGE_CHARS = 200


class Stop(BaseException):
    """The run ends here: `how` is "unknown" (going on is useless), "opaque" (of a result), or
    "unfit" (of arguments)."""

    def __init__(self, how: str, text: str = "") -> None:
        super().__init__(text)
        self.how = how
        self.text = text


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
    Guess.__getitem__ = lambda self, key: self  # pyright: ignore[reportAttributeAccessIssue]


class _Lenient(ast.NodeTransformer):
    """Asserts that never fail, for runs that guess."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)


class Proxies:
    def __init__(self, known: list[list[str]], guess: bool) -> None:
        """`known`: one `[name, encoded arguments, how, text]` per call made so far, in order."""
        self._outcomes: dict[tuple[str, str], list[list[str]]] = {}
        for name, given, how, text in known:
            self._outcomes.setdefault((name, given), []).append([how, text])
        self._last: dict[tuple[str, str], list[str]] = {}
        self._guess = guess
        self.made: list[list[str]] = []
        self.unknown = 0

    def of(self, name: str) -> Any:
        return lambda *arguments, **keywords: self._answer(name, arguments, keywords)

    def _answer(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            given = encode((arguments, keywords))
        except NotPlain as error:
            if self.unknown:
                return self._guessed()  # its arguments are guesses
            raise Stop("unfit", f"{name} is called with {error}") from None
        self.made.append([name, given])
        outcomes = self._outcomes.get((name, given))
        if outcomes:
            self._last[name, given] = outcomes.pop(0)
        else:
            guess = self._guessed()
            if (name, given) not in self._last:
                return guess
        how, text = self._last[name, given]  # of the same call before, if this one was not made yet
        if how == "value":
            return decode(text)
        if how == "raised":
            raise _error(text)
        raise Stop(how, text)

    def _guessed(self) -> Guess:
        self.unknown += 1
        if self._guess and self.unknown < MAX_GUESSED_CALLS:
            return Guess()
        raise Stop("unknown")


def _error(text: str) -> Exception:
    """Returns the error that a call raised, of its own class if that is one of Python's. But those
    that end loops: a test that loops with `map` would end early, and pass."""
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None)
    known = (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)
    )
    try:
        return kind(message) if known else RuntimeError(text)  # pyright: ignore[reportOptionalCall]
    except TypeError:  # one that takes other arguments, such as UnicodeDecodeError
        return RuntimeError(text)


def run(
    setup: str, tests: str, names: list[str], entry: str | None, known: list[list[str]], guess: bool
) -> dict[str, Any]:
    """Returns `calls` (all made, as `[name, encoded arguments]`), `how` the tests ended ("passed",
    "failed", or as `Stop`) and `text`, why. `entry` is given to the tests' `check` if there is one.
    "unknown" in `how`: some calls were not known yet."""
    _agree()
    proxies = Proxies(known, guess)
    module = types.ModuleType("tests")
    sys.modules[module.__name__] = module
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
    except Stop as stop:
        how, text = stop.how, stop.text
    except BaseException as error:  # whatever the tests raise is how they ended
        how, text = "failed", f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
    return {"calls": proxies.made, "how": "unknown" if proxies.unknown else how, "text": text}
