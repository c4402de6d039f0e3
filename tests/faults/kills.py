"""What runs with random kills have in common: their arguments, the kills, and the report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from deploy.machine import exit_on_signals
from shared.errors import HoneError
from tests.faults.__main__ import FOLDER
from tests.faults.plan import PROCESSES
from tests.faults.stack import Stack

PAUSE_S = (3.0, 12.0)
"""Least and most seconds between two kills: some come before the stack has recovered."""

Look = Callable[[], Awaitable[str]]
"""Returns what is under way at a kill, for the report's line. May raise HoneError."""


@dataclass
class Kills:
    """The kills of a run. `killed` are the processes, in order; `problems` how results differ from
    the undisturbed ones."""

    name: str
    seed: int
    num_wanted: int
    killed: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._choose = random.Random(self.seed)

    @property
    def are_going_on(self) -> bool:
        return len(self.killed) < self.num_wanted and not self.problems

    async def during(self, work: Awaitable[Any], stack: Stack, look: Look) -> Any:
        """Returns the result of `work`, and kills while it continues."""
        killing = asyncio.create_task(self._kill(stack, look))
        try:
            return await work
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)

    async def _kill(self, stack: Stack, look: Look) -> None:
        while len(self.killed) < self.num_wanted:
            await asyncio.sleep(self._choose.uniform(*PAUSE_S))
            what = self._choose.choice(PROCESSES)
            try:
                under_way = await look()
                os.kill(stack.pid(what), signal.SIGKILL)
            except (HoneError, LookupError, ProcessLookupError):
                continue  # it is unreachable already
            self.killed.append(what)
            print(f"{len(self.killed):4}  {what}, while {under_way}", flush=True)

    def note_comparison(self, what: str, problems: list[str]) -> None:
        """Notes how `what` compares with itself alone and undisturbed."""
        self.problems += [f"{what}: {problem}" for problem in problems]
        said = "; ".join(problems) or "the same as alone and undisturbed, bit for bit"
        print(f"{what}: {said}", flush=True)

    def keep_if_wrong(self, stack: Stack) -> None:
        """Keeps the stack's logs and run folders if there are problems."""
        stack.keeps = bool(self.problems)
        if stack.keeps:
            print(f"logs and run folders: {stack.folder}", flush=True)

    def report(self, goals_met: bool, **more: Any) -> int:
        """Prints the run as one JSON object, and returns its exit status."""
        ok = goals_met and not self.problems and len(self.killed) >= self.num_wanted
        of_each = {what: self.killed.count(what) for what in sorted({*self.killed})}
        told = {"faults": self.name, "ok": ok, "seed": self.seed, "kills": len(self.killed)}
        told |= {"killed": of_each, **more, "problems": self.problems}
        print(json.dumps(told | {"seconds": round(time.monotonic() - self.began)}))
        return 0 if ok else 1


def kills_from_arguments(name: str, doc: str | None) -> Kills:
    """Returns the kills that the command line asks for."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.faults.{name}", description=doc)
    parser.add_argument("--seed", type=int, default=0, help="of kills and model")
    parser.add_argument("--kills", type=int, default=40, help="how many (default: 40)")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    exit_on_signals(signal.SIGTERM)
    return Kills(name, arguments.seed, arguments.kills)
