"""`make faults`: breaks one part of a running job after another, and shows that nothing was lost.

    python -m tests.faults [--seed 0] [--faults 80] [--only 'rank 0|disk'] [--seconds 400]
    python -m tests.faults --environment worker --faults 20      (or class)

The job of `make demo-tiny`, made short, runs on the real stack: vLLM, DeepSpeed on two ranks,
Redis, the sandbox. Processes are killed, stopped by SIGTERM or frozen for longer than the lease;
connections are cut or slow; the disk is full; Redis is unreachable. Each fault (`plan.py`, from the
seed) strikes when its stage is seen to begin (`moments.py`), or up to 0.15 s later, and is over
once the job has done two more steps by itself. A job takes several faults. Then it is compared with
the same job undisturbed, for which its sampled batches are replayed: each step once, the same
weights after each, bit for bit.

With `--environment` the job's rollouts are the conversations of `make demo-agent`: played by an
agent of `hone work`, or by a class in the sandbox. What is killed then dies in the middle of
episodes.

What is measured is added to a file as it comes. A run that is cut, or ends after `--seconds`, goes
on with what is missing; the table and the last line, one JSON object, are of all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.report import finish
from deploy.machine import exit_on_signals
from deploy.tool_model import write_task
from shared.errors import HoneError
from shared.job import Job
from shared.job.file import load_job
from tests.faults.agent import MAX_TURNS
from tests.faults.moments import Moments
from tests.faults.plan import KILLED, Fault, draw, draw_episodes
from tests.faults.results import (
    CHECKPOINT_EVERY,
    EVALUATED_EVERY,
    Results,
    figures,
    markdown,
)
from tests.faults.stack import LEASE_S, ROOT, Stack
from tests.faults.trial import DoesNotGoOn, Struck, run_trial

FOLDER = Path(".hone/faults")
CHANGES = (
    "steps=18",
    "sampling.prompts_per_step=8",
    f"evaluation.every={EVALUATED_EVERY}",
    "evaluation.num_prompts=8",
    f"checkpoints.every={CHECKPOINT_EVERY}",
)


async def run(
    faults: Sequence[Fault], job: Job, results: Results, until: float, environment: str | None
) -> None:
    """Strikes with as many faults as there is time for. After one that a job did not survive, a
    new stack continues with the next."""
    waiting = list(faults)
    while waiting and time.monotonic() < until:
        moments = Moments()
        async with Stack(moments.seen, environment) as stack:
            if not stack.has_own_disk:
                waiting = [fault for fault in waiting if fault.what != "disk"]
            try:
                while waiting and time.monotonic() < until:
                    await _trial(stack, moments, job, waiting, results, until)
            except (DoesNotGoOn, HoneError, LookupError) as error:
                stack.keeps = True
                results.add_failure(waiting.pop(0) if waiting else None, str(error))
                print(f"FAILED: {error}\n  logs: {stack.folder}", flush=True)


async def _trial(
    stack: Stack,
    moments: Moments,
    job: Job,
    waiting: list[Fault],
    results: Results,
    until: float,
) -> None:
    """Runs one job; takes the faults that struck it off `waiting`."""

    def note(job_id: str, struck: Struck) -> None:
        waiting.remove(struck.fault)
        results.add_fault(job_id, struck)
        hands = f"  NEEDED A HAND: {'; '.join(struck.hands)}" if struck.hands else ""
        print(f"{struck.fault.number:4}  {struck.gap_s:6.1f} s  {struck.fault}{hands}", flush=True)

    trial = await run_trial(stack, moments, job, tuple(waiting), until, note)
    results.add_trial(trial)
    said = "; ".join(trial.problems) or "the same as undisturbed, bit for bit"
    print(f"job {trial.job_id}: {len(trial.struck)} faults, {said}", flush=True)
    if trial.problems:
        stack.keeps = True
        print(f"  logs and run folders: {stack.folder}", flush=True)


def made_job(seed: int) -> Job:
    """Returns the job of `make demo-tiny`, made short; makes its model if there is none yet."""
    task = FOLDER.resolve() / f"task-{seed}"
    if not (task / "model").is_dir():
        made = task.with_suffix(".new")
        command = [sys.executable, "-m", "deploy.tiny_model", "--out", str(made)]
        subprocess.run([*command, "--seed", str(seed)], check=True, cwd=ROOT)
        made.rename(task)
    text = (
        (ROOT / "deploy/jobs/demo_tiny.toml").read_text().replace(".hone/demo-tiny/task", str(task))
    )
    (FOLDER / "job.toml").write_text(text)
    return load_job(FOLDER / "job.toml", [*CHANGES, f"seed={seed}"])


def made_conversations(seed: int, environment: str) -> Job:
    """Returns the job of `make demo-agent`, made short, with this kind of environment."""
    task = FOLDER.resolve() / f"agent-task-{seed}"
    write_task(task, seed)
    job = load_job(ROOT / "deploy/jobs/demo_agent.toml", [*CHANGES, f"seed={seed}"])
    data = job.data.model_copy(
        update={"train": str(task / "train.jsonl"), "eval": str(task / "test.jsonl")}
    )
    changed = job.model_dump() | {"model": str(task / "model"), "data": data.model_dump()}
    if environment == "worker":
        changed["environment"] = {"kind": "worker", "max_turns": MAX_TURNS}
    return Job.model_validate(changed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of faults, model and job")
    parser.add_argument("--faults", type=int, default=80, help="how many (default: 80)")
    parser.add_argument("--only", default="", help="a pattern: those whose name has it")
    parser.add_argument("--environment", choices=tuple(KILLED), help="of conversations")
    parser.add_argument("--seconds", type=float, default=7200.0, help="start none after so long")
    parser.add_argument("--out", type=Path, default=FOLDER / "results.jsonl", help="added to")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    kind, seed = arguments.environment, arguments.seed
    out = arguments.out.with_suffix(f".{kind}.jsonl") if kind else arguments.out
    results = Results(out, seed)
    drawn = draw_episodes(seed, arguments.faults, kind) if kind else draw(seed, arguments.faults)
    faults = [fault for fault in drawn if re.search(arguments.only, str(fault))]
    found = {each.number: each.is_done for each in results.measured()}
    until = time.monotonic() + arguments.seconds
    missing = [fault for fault in faults if not found.get(fault.number)]
    missing.sort(key=lambda fault: fault.number in found)  # first the faults that never struck
    if missing:
        exit_on_signals(signal.SIGTERM)
        job = made_conversations(seed, kind) if kind else made_job(seed)
        asyncio.run(run(missing, job, results, until, kind))
    print(markdown(results.measured()))
    facts = {"seed": seed, "lease_s": LEASE_S, "problems": results.problems()}
    wanted = {fault.number for fault in faults}
    return finish("faults", figures(results, wanted), **facts, failures=results.failures())


if __name__ == "__main__":
    sys.exit(main())
