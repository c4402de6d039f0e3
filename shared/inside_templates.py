"""The process that renders templates: Jinja's sandbox, with limits on CPU time and memory.

It is started as a file, with nothing of Hone in it and an empty environment. A line on its standard
input is a request, and a line on its output the answer, both JSON. A request that takes too long
ends the process.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20
CPU_S = 2.0
"""Limit of CPU seconds for one request, of a few dozen rows."""

MAX_TEXT_CHARS = 1 << 20

ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def refuse(message: str) -> None:
    """Raises an error. Chat templates call it to refuse messages."""
    raise ValueError(message)


def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


CHAT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
"""The environment in which transformers renders a chat template."""

CHAT.filters["tojson"] = as_json  # pyright: ignore[reportUnknownMemberType]
CHAT.globals["raise_exception"] = refuse  # pyright: ignore[reportUnknownMemberType]
CHAT.globals["strftime_now"] = now  # pyright: ignore[reportUnknownMemberType]


@functools.lru_cache(maxsize=64)
def compiled(kind: str, source: str) -> Callable[[dict[str, Any]], Any]:
    """Returns the function that makes the text of a row ("text") or of a conversation ("chat"), or
    tells whether an expression is true of a row ("test")."""
    if kind == "chat":
        chat = CHAT.from_string(source)
        return lambda values: bounded(chat.render(values))
    if kind == "text":
        template = ENVIRONMENT.from_string(source)
        return lambda row: bounded(template.render({"row": row} | row))
    expression = ENVIRONMENT.compile_expression(source, undefined_to_none=False)
    return lambda row: bool(expression({"row": row} | row))


def bounded(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"it is {len(text)} characters long, expected at most {MAX_TEXT_CHARS}")
    return text


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the `values` of all rows, or an `error` and the position of its row."""
    values: list[Any] = []
    position: int | None = None
    try:
        make = compiled(request["kind"], request["source"])
        for row in request["rows"]:
            position = len(values)
            values.append(make(row))
        return {"values": values}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "position": None}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB", "position": position}
    except Exception as error:  # whatever a template that we did not write raises
        return {"error": f"{str(error) or type(error).__name__:.300}", "position": position}


def main() -> None:
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        began_s = time.process_time()
        found = answer(json.loads(line))
        reply = json.dumps(found | {"cpu_s": time.process_time() - began_s})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
