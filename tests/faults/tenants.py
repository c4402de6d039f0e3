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

import asyncio
import sys
from dataclasses import dataclass, field

from shared.errors import HoneError
from shared.job import Job, LoraSpec
from tests.faults.__main__ import made_job
from tests.faults.kills import Kills, kills_from_arguments
from tests.faults.moments import Moments
from tests.faults.stack import Stack
from tests.faults.trial import Running, post, problems_of, submit

STEPS = 12
ENDS_S = 900.0

UNLIKE = (
    {"learning_rate": 3e-3, "loss": "dapo"},
    {"learning_rate": 1e-3, "loss": "grpo", "beta": 0.02},
    {"learning_rate": 2e-3, "loss": "dapo", "adam_beta1": 0.8, "weight_decay": 0.1},
)


@dataclass
class Found:
    """What became of all jobs. `shared`: they ran at once when a process was killed."""

    num_jobs: int = 0
    shared: bool = False
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


async def run(kills: Kills, found: Found) -> None:
    jobs, moments = made_jobs(kills.seed), Moments()
    async with Stack(moments.seen, HONE_ROLLOUT_ADAPTERS=str(len(jobs))) as stack:
        try:
            while kills.are_going_on:
                await _round(stack, moments, jobs, kills, found)
        finally:
            kills.keep_if_wrong(stack)


async def _round(
    stack: Stack, moments: Moments, jobs: list[Job], kills: Kills, found: Found
) -> None:
    """Runs the jobs at once, and kills while they run."""
    running = [Running(stack, moments, (await submit(stack, job)).id) for job in jobs]
    replays = [(await submit(stack, job)).id for job in jobs]
    for replay in replays:  # all places are taken, or soon will be
        await post(stack, f"{replay}/pause")
    ending = asyncio.gather(*(one.ends() for one in running))

    async def look() -> str:
        statuses = [(await one.get()).status for one in running]
        found.shared |= statuses == ["running"] * len(running)
        return f"the jobs are {statuses}"

    try:
        records = await kills.during(asyncio.wait_for(ending, ENDS_S), stack, look)
    except (TimeoutError, HoneError) as error:
        kills.problems.append(f"the jobs did not end: {error!r}")
        return
    for one, record, replay in zip(running, records, replays, strict=True):
        found.num_jobs += 1
        found.hands += one.paused
        what = f"job {record.id}, of {record.attempts} attempts"
        kills.note_comparison(what, await problems_of(stack, record, replay))


def main() -> int:
    wanted, found = kills_from_arguments("tenants", __doc__), Found()
    asyncio.run(run(wanted, found))
    ok = found.shared and not found.hands
    return wanted.report(ok, jobs=found.num_jobs, hands=found.hands)


if __name__ == "__main__":
    sys.exit(main())
