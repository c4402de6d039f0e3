"""Three LoRA jobs that share a trainer and its sampler, beside the same jobs one after the other.

    python -m bench.tenants [--model 0.6M] [--steps 12] [--jobs 3] [--repeats 3]

A figure is the time of a step of all jobs, at once to one after the other: how many steps all jobs
do per second between the moment when each has done its first step and the moment when the first has
done its last, against a job alone. So loading a model is in neither; beside it stands the whole
time from the first submission to the last end, with loading, as a user waits for it.

The jobs are like the job of `bench.loop` (random model, 16 prompts in groups of 8, 64 tokens
exactly, a Python reward in the sandbox, float32) with an adapter of rank 8, on the stack that `hone
up` starts with one sampler. A job trains with `max_staleness` 0, in turns with its sampling: where
it trains the sampler is idle, and where it samples the trainer is. Shared, they work for the others
then. On two cores, which both use, what is won is what one job alone leaves of them: waits of a
request, of a disk, of a program that runs on one core, and that the sampler computes a token of
three jobs in little more time than of one.

The cost of a turn is the time in which the trainer exchanges one job's adapter, optimizer and
random numbers for another's (`time/turn`), to the time of a step of one job alone.

The last figures are no measurement here: they say what to expect of a GPU for sampling and one for
training, where neither slows the other down, from the shares of a step measured here. The trainer
is busy for at most all of the time, and so is the sampler, which takes `--batch-cost` of a job's
time more for each further job.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import hone
from bench.grpo import document_of, finished, stack
from bench.loop import TASKS, Task, write_task
from bench.report import Figure, count, finish, ratios, repeated
from deploy.machine import exit_on_signals

MOST_TIME = 0.7
MOST_TURN = 0.02
BATCH_COST = 0.2
"""What the sampler of the GPU's shape takes longer for each further job: decoding is bound by
memory, so a larger batch costs little."""


@dataclass(frozen=True)
class Turn:
    """One way to run the jobs: `steps_per_s` of all together, `whole_s` from the first submission
    to the last end, and of each step its `rows`."""

    steps_per_s: float
    whole_s: float
    rows: list[dict[str, float]]

    def mean(self, name: str) -> float:
        return fmean(row[name] for row in self.rows if name in row)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.6M", choices=TASKS, help="default: 0.6M")
    parser.add_argument("--steps", type=count, default=12, help="of each job (default: 12)")
    parser.add_argument("--jobs", type=count, default=3, help="default: 3")
    parser.add_argument("--repeats", type=count, default=3, help="default: 3")
    parser.add_argument("--batch-cost", type=float, default=BATCH_COST, help="default: 0.2")
    args = parser.parse_args()
    exit_on_signals(signal.SIGTERM)  # the stack ends too
    task, apart, shared = TASKS[args.model], list[Turn](), list[Turn]()
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), task)
        adapters = {"HONE_ROLLOUT_ADAPTERS": str(args.jobs)}
        with stack(Path(folder), samplers=1, **adapters) as client:
            jobs = [job_of(Path(folder), task, args.steps, seed) for seed in range(args.jobs)]
            one_after_the_other(client, jobs[:1])  # the sampler's engine starts
            for repeat in range(args.repeats):
                ways = [(apart, one_after_the_other), (shared, at_once)]
                for found, way in ways[:: 1 if repeat % 2 == 0 else -1]:
                    found.append(way(client, jobs))
                    print(f"{way.__name__}: {found[-1].whole_s:.1f} s", file=sys.stderr, flush=True)
    return finish(
        "tenants",
        compare(apart, shared, args.jobs, args.batch_cost),
        task=asdict(task),
        jobs=args.jobs,
        steps=args.steps,
        repeats=args.repeats,
        batch_cost=args.batch_cost,
    )


def compare(
    apart: list[Turn], shared: list[Turn], num_jobs: int, batch_cost: float
) -> list[Figure]:
    step_s = [1 / turn.steps_per_s for turn in apart]
    turns = [turn.mean("time/turn") for turn in shared]
    on_gpus = [expected(turn, num_jobs, batch_cost) for turn in apart]
    return [
        repeated(
            f"{num_jobs} jobs at once, to one after the other: time of a step",
            ratios([1 / turn.steps_per_s for turn in shared], step_s),
            "x",
            MOST_TIME,
            "max",
        ),
        repeated("a turn, to a step of one job", ratios(turns, step_s), "", MOST_TURN, "max"),
        repeated(
            "with loading, from submission to end",
            ratios([turn.whole_s for turn in shared], [turn.whole_s for turn in apart]),
            "x",
        ),
        repeated("one after the other: step", step_s, "s"),
        repeated("of it generation", [turn.mean("time/generate") for turn in apart], "s"),
        repeated("of it training", [turn.mean("time/train") for turn in apart], "s"),
        repeated("a turn", turns, "s"),
        repeated("expected with a GPU for each side: time of a step", on_gpus, "x"),
    ]


def expected(alone: Turn, num_jobs: int, batch_cost: float) -> float:
    """Returns the time of a step of several jobs to one job's, if sampling and training slow each
    other down by nothing, and a step's other parts are waited for and cost neither."""
    step_s = alone.mean("time/step")
    sampling_s = alone.mean("time/generate") * (1 + batch_cost * (num_jobs - 1)) / num_jobs
    return max(sampling_s, alone.mean("time/train"), step_s / num_jobs) / step_s


# --- the two ways --------------------------------------------------------------------------------


def one_after_the_other(client: hone.Client, jobs: list[hone.Job]) -> Turn:
    began, rates, rows = time.monotonic(), list[float](), list[dict[str, float]]()
    for job in jobs:
        steps = steps_of(client, client.submit(job).id)
        rates.append((len(steps.at) - 1) / (steps.at[-1] - steps.at[0]))
        rows += steps.rows
    return Turn(median(rates), time.monotonic() - began, rows)


def at_once(client: hone.Client, jobs: list[hone.Job]) -> Turn:
    began = time.monotonic()
    ids = [client.submit(job).id for job in jobs]
    found = [steps_of(client, job_id) for job_id in ids]
    whole_s = time.monotonic() - began
    first, last = max(one.at[0] for one in found), min(one.at[-1] for one in found)
    num_steps = sum(first < at <= last for one in found for at in one.at)
    return Turn(num_steps / (last - first), whole_s, [row for one in found for row in one.rows])


@dataclass(frozen=True)
class Steps:
    """When each step of a job was done, in Unix seconds, and its metrics."""

    at: list[float]
    rows: list[dict[str, float]]


def steps_of(client: hone.Client, job_id: str) -> Steps:
    """Returns the steps of the job once it has succeeded."""
    record = finished(client, job_id)
    at = [event.time for event in client.events(job_id) if event.type == "step"]
    rows = [row.metrics for row in client.metrics(job_id).rows if 1 < row.step < record.steps]
    return Steps(at, rows)


def job_of(folder: Path, task: Task, steps: int, seed: int) -> hone.Job:
    document = document_of(folder, replace(task, seed=seed), steps + 1)
    return hone.Job.model_validate(document | {"name": "tenants", "lora": {"rank": 8}})


if __name__ == "__main__":
    sys.exit(main())
