"""Kills parts of a stack on which three jobs share a trainer, and shows that each job is what it
would be alone.

    python -m tests.faults.tenants [--seed 0] [--kills 40]

Three LoRA jobs of one base model train at once: with other seeds, learning rates and losses. At
random moments, from the seed, a random process gets kill -9. Once the jobs have ended each is
compared with the same job alone and undisturbed, for which its sampled batches are replayed: each
step once, the same weights after each, bit for bit. New jobs follow until all kills are done. The
last line is one JSON object.
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

from shared.errors import HoneError
from shared.job import Job, LoraSpec
from tests.faults.__main__ import FOLDER, made_job
from tests.faults.moments import Moments
from tests.faults.plan import PROCESSES
from tests.faults.stack import Stack
from tests.faults.trial import Running, post, problems_of, submit

PAUSE_S = (3.0, 12.0)
"""Least and most seconds between two kills: some come before the stack has recovered."""

STEPS = 12
ENDS_S = 900.0

UNLIKE = (
    {"learning_rate": 3e-3, "loss": "dapo"},
    {"learning_rate": 1e-3, "loss": "grpo", "beta": 0.02},
    {"learning_rate": 2e-3, "loss": "dapo", "adam_beta1": 0.8, "weight_decay": 0.1},
)


@dataclass
class Found:
    """What became of all jobs. `killed` are the processes, in order."""

    killed: list[str] = field(default_factory=list[str])
    num_jobs: int = 0
    shared: bool = False
    problems: list[str] = field(default_factory=list[str])
    hands: list[str] = field(default_factory=list[str])


def made_jobs(seed: int) -> list[Job]:
    job = made_job(seed).model_copy(update={"lora": LoraSpec(rank=4), "steps": STEPS})
    return [
        Job.model_validate(
            job.model_dump()
            | {"seed": number, "training": job.training.model_dump(exclude_unset=True) | training}
        )
        for number, training in enumerate(UNLIKE)
    ]


async def run(jobs: list[Job], kills: int, seed: int, found: Found) -> None:
    choose = random.Random(seed)
    moments = Moments()
    async with Stack(moments.seen, HONE_ROLLOUT_ADAPTERS=str(len(jobs))) as stack:
        try:
            while len(found.killed) < kills and not found.problems:
                await _round(stack, moments, jobs, kills, choose, found)
        finally:
            stack.keeps = bool(found.problems)
            if stack.keeps:
                print(f"logs and run folders: {stack.folder}", flush=True)


async def _round(
    stack: Stack, moments: Moments, jobs: list[Job], kills: int, choose: random.Random, found: Found
) -> None:
    """Runs the jobs at once, and kills while they run."""
    running = [Running(stack, moments, (await submit(stack, job)).id) for job in jobs]
    replays = [(await submit(stack, job)).id for job in jobs]
    for replay in replays:  # all places are taken, or soon will be
        await post(stack, f"{replay}/pause")
    ending = asyncio.gather(*(one.ends() for one in running))
    killing = asyncio.create_task(_kill(stack, kills, choose, found, running))
    try:
        records = await asyncio.wait_for(ending, ENDS_S)
    except (TimeoutError, HoneError) as error:
        found.problems.append(f"the jobs did not end: {error!r}")
        return
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    for one, record, replay in zip(running, records, replays, strict=True):
        problems = await problems_of(stack, record, replay)
        found.num_jobs += 1
        found.hands += one.paused
        found.problems += [f"{record.id}: {problem}" for problem in problems]
        said = "; ".join(problems) or "the same as alone and undisturbed, bit for bit"
        print(f"job {record.id}: {record.attempts} attempts, {said}", flush=True)


async def _kill(
    stack: Stack, kills: int, choose: random.Random, found: Found, running: list[Running]
) -> None:
    while len(found.killed) < kills:
        await asyncio.sleep(choose.uniform(*PAUSE_S))
        what = choose.choice(PROCESSES)
        try:
            statuses = [(await one.get()).status for one in running]
            os.kill(stack.pid(what), signal.SIGKILL)
        except (HoneError, LookupError, ProcessLookupError):
            continue  # it is away already
        found.shared |= statuses == ["running"] * len(running)
        found.killed.append(what)
        print(f"{len(found.killed):4}  {what}, while the jobs are {statuses}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.tenants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of kills and model")
    parser.add_argument("--kills", type=int, default=40, help="how many (default: 40)")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found, began = Found(), time.monotonic()
    asyncio.run(run(made_jobs(arguments.seed), arguments.kills, arguments.seed, found))
    ok = found.shared and not found.problems and not found.hands
    print(
        json.dumps(
            {
                "faults": "tenants",
                "ok": ok,
                "seed": arguments.seed,
                "kills": len(found.killed),
                "killed": {what: found.killed.count(what) for what in sorted({*found.killed})},
                "jobs": found.num_jobs,
                "hands": found.hands,
                "problems": found.problems,
                "seconds": round(time.monotonic() - began),
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
