"""The code that goes into sandboxes: the sources of the `inside_*` files, and one expression that
calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.wire import ExecuteRequest

_FOLDER = Path(__file__).parent
_PACKAGE = __name__.rpartition(".")[0]
_LOADER = """
import sys, types
def _load(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__.get("run")
"""


def _code(*files: str) -> str:
    sources = [(f"{_PACKAGE}.{file}", (_FOLDER / f"{file}.py").read_text()) for file in files]
    return _LOADER + "\n".join(f"_run = _load({name!r}, {source!r})" for name, source in sources)


_CANDIDATE = _code("codec", "inside_candidate")
_TESTS = _code("codec", "inside_tests")


def candidate_job(arguments: dict[str, Any], **limits: Any) -> ExecuteRequest:
    """Returns the job that runs a program and makes calls; `arguments` are those of
    `inside_candidate.run`."""
    return ExecuteRequest(
        code=_CANDIDATE, expression="_run(**_arguments)", inputs={"_arguments": arguments}, **limits
    )


def tests_job(arguments: dict[str, Any], **limits: Any) -> ExecuteRequest:
    """Returns the job that runs test code; `arguments` are those of `inside_tests.run`."""
    return ExecuteRequest(
        code=_TESTS, expression="_run(**_arguments)", inputs={"_arguments": arguments}, **limits
    )
