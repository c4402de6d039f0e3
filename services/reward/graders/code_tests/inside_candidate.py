"""In the candidate's sandbox: runs the program, makes the calls, returns what came out. Standard
library only.

Its source is sent with each job; from `exec` on everything here belongs to the program. No expected
value is anywhere near.
"""

from __future__ import annotations

import importlib
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from services.reward.grading.codec import (
    AwaitedResult,
    NotPlain,
    ValueTooLong,
    decode,
    encode,
)

MAX_MESSAGE_CHARS = 200

GIVEN = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "dataclasses": "dataclass field",
    "datetime": "date timedelta",
    "decimal": "Decimal",
    "enum": "Enum",
    "fractions": "Fraction",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle "
    "dropwhile groupby islice pairwise permutations product repeat starmap takewhile zip_longest",
    "math": "acos asin atan atan2 ceil comb cos degrees dist exp fabs factorial floor fmod gcd "
    "hypot inf isclose isqrt lcm log log10 log2 nan perm pi prod radians sin sqrt tan trunc",
    "operator": "attrgetter itemgetter mul or_ xor",
    "queue": "PriorityQueue Queue",
    "random": "choice randint shuffle",
    "statistics": "mean median",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List "
    "Literal NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
}
MODULES = """
bisect collections copy datetime functools heapq itertools json math operator os random re
statistics string sys time typing
"""
"""`GIVEN` and `MODULES` are the names and modules that a program of functions may use without an
import, as on the sites for which such programs are written."""


class TimeLimit(BaseException):
    """One call used up its CPU time."""


class FunctionMissing(BaseException):
    """The program does not define the function `name`."""

    def __init__(self, name: str) -> None:
        self.name = name


def run(
    setup: str,
    program: str,
    calls: list[list[str]],
    cpu_s: float,
    last: list[str],
    names: list[str],
) -> list[list[str]]:
    """Returns one `[how, text]` per call: "value" with the encoded value; else "raised", "absent",
    "opaque", "large", "late" or "memory" with why.

    A call is `["expression", source]`, or `["call", name, encoded (arguments, keywords)]`. The
    first call that ends as one of `last` is the last call made. If the program fails before any
    call, all calls are "absent", as is a call of a function that it does not define. `names` are
    the tested functions: they are not given to the program.
    """
    module = types.ModuleType("program")
    module.__file__ = "program.py"
    module.__dict__.update({name: value for name, value in _given().items() if name not in names})
    sys.modules[module.__name__] = module
    _ = signal.signal(signal.SIGPROF, _late)
    outcomes: list[list[str]] = []
    beginning = _outcome(lambda: _execute(setup, program, module.__dict__), cpu_s)
    if beginning[0] == "raised":
        beginning[0] = "absent"
    for call in calls:
        how = (
            beginning
            if beginning[0] != "value"
            else _outcome(lambda call=call: _made(call, module.__dict__), cpu_s)
        )
        outcomes.append(how)
        if how[0] in last:
            break
    return outcomes


def _given() -> dict[str, Any]:
    of_modules = {
        name: getattr(importlib.import_module(module), name)
        for module, names in GIVEN.items()
        for name in names.split()
    }
    return of_modules | {name: importlib.import_module(name) for name in MODULES.split()}


def _outcome(step: Callable[[], Any], cpu_s: float) -> list[str]:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        return ["value", encode(step())]
    except TimeLimit:
        return ["late", f"more than {cpu_s:g} s of CPU time"]
    except NotPlain as error:
        return ["opaque", str(error)[:MAX_MESSAGE_CHARS]]
    except ValueTooLong as error:
        return ["large", str(error)[:MAX_MESSAGE_CHARS]]
    except FunctionMissing as error:
        return ["absent", f"NameError: name {error.name!r} is not defined"]
    except MemoryError:
        return ["memory", "MemoryError"]
    except BaseException as error:  # whatever the program raises is data about it
        return ["raised", _described(error)]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _execute(setup: str, program: str, names: dict[str, Any]) -> None:
    for source in (setup, program):
        try:
            exec(compile(source, "program.py", "exec", dont_inherit=True), names)
        except SystemExit as error:  # what it defined before it ended as it should stands
            if error.code not in (None, 0):
                raise


def _made(call: list[str], names: dict[str, Any]) -> Any:
    if call[0] == "expression":
        return eval(compile(call[1], "call", "eval", dont_inherit=True), names)
    arguments, keywords = decode(call[2])
    name, _, method = call[1].partition("().")
    if name not in names:
        raise FunctionMissing(name)
    function = getattr(names[name](), method) if method else names[name]
    value = function(*arguments, **keywords)
    if isinstance(value, types.CoroutineType):
        import asyncio

        return AwaitedResult(asyncio.run(value))
    return value


def _described(error: BaseException) -> str:
    """Returns an error as text: the name of its nearest class that is Python's own, because tests
    may expect that one, and its message."""
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        text = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else error
        return f"{name}: {text}"[:MAX_MESSAGE_CHARS]
    except BaseException:  # the program's own `__str__`
        return name


def _late(number: int, frame: Any) -> None:
    raise TimeLimit
