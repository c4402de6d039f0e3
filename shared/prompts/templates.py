"""Templates and filters of jobs, in Jinja. A stranger may have written them, so they run in a
process of their own with limits (`inside_templates.py`) and without our secrets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from signal import SIGPROF
from typing import Any, Literal

from shared.prompts.inside_templates import CPU_S

ROWS_PER_REQUEST = 64
INSIDE = Path(__file__).with_name("inside_templates.py")


class CannotRender(Exception):
    """Why a template failed, and at which row; None: at all rows."""

    def __init__(self, reason: str, position: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


class Renderer:
    """One process for all callers. It is started when it is needed, and again after it was
    ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()

    def texts(self, template: str, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Returns the text of each row. Raises CannotRender."""
        return self._values("text", template, rows)[0]

    def holds(self, expression: str, rows: Sequence[dict[str, Any]]) -> tuple[list[bool], float]:
        """Returns for each row whether the expression is true, and the CPU seconds for all rows.
        Raises CannotRender."""
        return self._values("test", expression, rows)

    def chats(self, template: str, values: Sequence[dict[str, Any]]) -> list[str]:
        """Returns the text that a model's chat template makes of each. Raises CannotRender."""
        return self._values("chat", template, values)[0]

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _values(
        self, kind: Literal["text", "test", "chat"], source: str, rows: Sequence[dict[str, Any]]
    ) -> tuple[list[Any], float]:
        """Returns the value of each row, and the CPU seconds for all rows."""
        values, cpu_s = list[Any](), 0.0
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            several = rows[start : start + ROWS_PER_REQUEST]
            try:
                answer = self._ask(kind, source, several)
            except CannotRender as error:
                position = None if error.position is None else start + error.position
                raise CannotRender(error.reason, position) from None
            values += answer["values"]
            cpu_s += answer["cpu_s"]
        return values, cpu_s

    def _ask(self, kind: str, source: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        try:
            request = json.dumps({"kind": kind, "source": source, "rows": rows})
        except (TypeError, ValueError) as error:
            reason = f"{error}; expected text, numbers, lists and tables of them"
            raise CannotRender(reason, 0) from error
        with self._turn:
            line = self._exchange(request)
            if not line:
                raise CannotRender(self._why_it_ended(), None)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CannotRender(answer["error"], answer["position"])
        return answer

    def _exchange(self, request: str) -> str:
        """Returns the answer; "" if the process ended instead."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._started()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", str(INSIDE)],
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _why_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        if code == -SIGPROF:
            return f"it takes more than {CPU_S:g} s of processor time for {ROWS_PER_REQUEST} rows"
        return f"the process that renders it ended with status {code}: it takes too much memory"


RENDERER = Renderer()
