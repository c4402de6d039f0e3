"""The code that goes into sandboxes: the `inside_*` files, and one expression that calls them.

It goes as Python compiled it here: compiling it in each sandbox would take longer than most
programs. A sandbox with another Python gets to compile the source.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
from pathlib import Path
from typing import Any

from services.reward.grading import codec
from shared.wire import ExecuteRequest

_CODEC = codec.__name__
_PACKAGE = __name__.rpartition(".")[0]
_LOADER = """
import marshal, sys, types
for _name, _compiled, _source in _files:
    _module = sys.modules[_name] = types.ModuleType(_name)
    exec(marshal.loads(bytes.fromhex(_compiled)) if sys.hexversion == _hexversion
         else compile(_source, _name, "exec", dont_inherit=True), _module.__dict__)
"""
_CALL = "_module.run(**_arguments)"


def _inputs(*modules: str) -> dict[str, Any]:
    sources = {name: _source(name) for name in modules}
    return {
        "_hexversion": sys.hexversion,
        "_files": [[name, _compiled(source, name), source] for name, source in sources.items()],
    }


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def _compiled(source: str, name: str) -> str:
    code = compile(source, name, "exec", dont_inherit=True)
    return marshal.dumps(code).hex()


_CANDIDATE = _inputs(_CODEC, f"{_PACKAGE}.inside_candidate")
_TESTS = _inputs(_CODEC, f"{_PACKAGE}.inside_tests")


def candidate_job(arguments: dict[str, Any], **limits: Any) -> ExecuteRequest:
    """Returns the job that runs a program and makes calls; `arguments` are those of
    `inside_candidate.run`."""
    return _job(_CANDIDATE, arguments, limits)


def tests_job(arguments: dict[str, Any], **limits: Any) -> ExecuteRequest:
    """Returns the job that runs test code; `arguments` are those of `inside_tests.run`."""
    return _job(_TESTS, arguments, limits)


def _job(
    files: dict[str, Any], arguments: dict[str, Any], limits: dict[str, Any]
) -> ExecuteRequest:
    inputs = {**files, "_arguments": arguments}
    return ExecuteRequest(code=_LOADER, expression=_CALL, inputs=inputs, **limits)
