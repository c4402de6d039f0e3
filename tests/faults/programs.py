"""Kills parts of a stack on which three programs drive a model each, with Tinker's SDK as it is on
PyPI, and shows that each program sees what it would see alone.

    python -m tests.faults.programs [--seed 0] [--kills 40]

The programs train LoRA models of one base model, with data, losses and learning rates of their own,
and sample on the way. At random moments, from the seed, a random process gets kill -9; nobody kills
the programs. Each loss, gradient norm and last log-prob, and the last checkpoint with its optimizer
state, are compared with the same program's alone and undisturbed, bit for bit; and what its first
snapshot gives at the end with what it gave at first. New programs follow until all kills are done.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.programs.saved import Saved
from shared.weights.digest import stored_tensors, tensor_digests
from tests.compat.packages import ROOT, python_with
from tests.faults.__main__ import FOLDER, made_job
from tests.faults.plan import PROCESSES
from tests.faults.stack import Stack

PAUSE_S = (3.0, 12.0)
"""Least and most seconds between two kills: some come before the stack has recovered."""

SEEDS = (0, 1, 2)
STEPS = 12
ENDS_S = 900.0
NEAR_NATS = 0.05
"""How far the same snapshot's log-probs may lie apart: samplers batch, and so round, otherwise."""


@dataclass
class Found:
    killed: list[str] = field(default_factory=list[str])
    num_programs: int = 0
    problems: list[str] = field(default_factory=list[str])


async def played(stack: Stack, model: str, seed: int) -> dict[str, Any]:
    """Returns what a program printed, with the weights of its last checkpoint."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HONE_")}
    url = f"http://127.0.0.1:{stack.ports['orchestrator']}"
    program = await asyncio.create_subprocess_exec(
        str(python_with("tinker")),
        str(ROOT / "tests/compat/tinker_tenant.py"),
        *(model, str(seed), str(STEPS)),
        env=environment | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-none", "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(program.communicate(), ENDS_S)
    finally:
        if program.returncode is None:
            program.kill()
    if program.returncode:
        return {"failed": err.decode(errors="replace")[-2000:]}
    told = json.loads(out.decode().splitlines()[-1])
    run = stack.runs / told.pop("path").split("/")[2]
    saved = Saved(run).find("checkpoint", "end")
    assert saved is not None
    folders = ("", "adapter", "trainer")
    stored = [stored_tensors(Path(saved.path) / folder) for folder in folders]
    return told | {"weights": [tensor_digests(tensors) for tensors in stored]}


def problems_of(told: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    if "failed" in told:
        return [told["failed"]]
    found = [name for name in ("losses", "logprobs", "weights") if told[name] != alone[name]]
    problems = [f"its {name} differ" for name in found]
    if not told["whole"]:
        problems.append("a sample has no log-prob for each token")
    apart = max(abs(a - b) for a, b in zip(told["first"], alone["first"], strict=True))
    if max(apart, told["apart"]) > NEAR_NATS:
        problems.append(f"its first snapshot gives other log-probs: {apart}, {told['apart']}")
    return problems


async def run(model: str, kills: int, seed: int, found: Found) -> None:
    choose = random.Random(seed)
    async with Stack(lambda *_: None, HONE_ROLLOUT_ADAPTERS=str(len(SEEDS))) as stack:
        stack.keeps = True
        alone = [await played(stack, model, each) for each in SEEDS]
        for one in alone:
            if problems := problems_of(one, one):
                found.problems += problems
                return
        print("three programs, one after the other and undisturbed", flush=True)
        while len(found.killed) < kills and not found.problems:
            killing = asyncio.create_task(_kill(stack, kills, choose, found))
            try:
                every = await asyncio.gather(*(played(stack, model, each) for each in SEEDS))
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
            for each, told, undisturbed in zip(SEEDS, every, alone, strict=True):
                problems = problems_of(told, undisturbed)
                found.num_programs += 1
                found.problems += [f"program {each}: {problem}" for problem in problems]
                said = "; ".join(problems) or "the same as alone and undisturbed, bit for bit"
                print(f"program {each}: {said}", flush=True)
        stack.keeps = bool(found.problems)
        if stack.keeps:
            print(f"logs and run folders: {stack.folder}", flush=True)


async def _kill(stack: Stack, kills: int, choose: random.Random, found: Found) -> None:
    while len(found.killed) < kills:
        await asyncio.sleep(choose.uniform(*PAUSE_S))
        what = choose.choice(PROCESSES)
        try:
            os.kill(stack.pid(what), signal.SIGKILL)
        except (LookupError, ProcessLookupError):
            continue  # it is away already
        found.killed.append(what)
        print(f"{len(found.killed):4}  {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of kills and model")
    parser.add_argument("--kills", type=int, default=40, help="how many (default: 40)")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found, began = Found(), time.monotonic()
    model = made_job(arguments.seed).model
    asyncio.run(run(model, arguments.kills, arguments.seed, found))
    ok = not found.problems and len(found.killed) >= arguments.kills
    print(
        json.dumps(
            {
                "faults": "programs",
                "ok": ok,
                "seed": arguments.seed,
                "kills": len(found.killed),
                "killed": {what: found.killed.count(what) for what in sorted({*found.killed})},
                "programs": found.num_programs,
                "problems": found.problems,
                "seconds": round(time.monotonic() - began),
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
