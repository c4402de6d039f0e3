"""The tools of a job's own reward, inside its worker. Standard library only.

Model-written code goes back to the service, which runs it in its own sandboxes: the worker's is the
user's. The socket carries one question at a time; what other threads ask meanwhile goes together as
the next one.
"""

from __future__ import annotations

import json
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from services.reward.job_code.inside.children import Children
from services.reward.sandbox.inside import frames
from shared.rewards import Outcome


class WorkerTools:
    """Implements `shared.rewards.Tools`. `module` holds what the job's file defines, `call` is the
    number of the message that is answered next."""

    def __init__(self, channel: int, module: types.ModuleType) -> None:
        self.call = ""
        self._channel = channel
        self._turn = threading.Lock()
        self._lock = threading.Lock()  # guards the next line only
        self._asked: list[tuple[list[dict[str, Any]], Future[list[Outcome]]]] = []
        self._children = Children(lambda name: vars(module)[name], lambda: os.close(channel))

    def in_sandbox(self, programs: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        # What is not plain data fails here, and alone.
        plain = json.loads(json.dumps([dict(program) for program in programs], allow_nan=False))
        answer: Future[list[Outcome]] = Future()
        with self._lock:
            self._asked.append((plain, answer))
        with self._turn:
            if not answer.done():
                self._ask_all()
        return answer.result()

    def in_function(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        isolated: bool,
        timeout_s: float,
    ) -> list[Outcome]:
        return self._children.run(function, arguments, isolated=isolated, timeout_s=timeout_s)

    def _ask_all(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        execute = [programs for programs, _ in asked]
        frames.send(self._channel, {"execute": execute, "call": self.call})
        reply: dict[str, Any] = frames.receive(self._channel) or {
            "executions": ["the reward service is gone"] * len(asked),
            "call": self.call,
        }
        self.call = reply["call"]
        for (_, answer), executions in zip(asked, reply["executions"], strict=True):
            if isinstance(executions, str):
                answer.set_exception(ValueError(executions))
            else:
                answer.set_result([Outcome(**execution) for execution in executions])
