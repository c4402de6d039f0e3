"""Three LoRA jobs that share a trainer and its sampler, beside the same jobs one after the other.

    python -m bench.tenants [--model 0.6M] [--steps 12] [--jobs 3] [--repeats 3]

A figure is the time of a step of all jobs, at once to one after the other: how many steps all jobs
do per second between the moment when each has done its first step and the moment when the first has
done its last, against a job alone. Loading a model is in neither; beside it stands the whole time
from the first submission to the last end.

The jobs are like the job of `bench.loop` with an adapter of rank 8, on a stack with one sampler. A
job trains with `max_staleness` 0: while it trains, its sampler is idle, and the reverse; shared,
they work for the other jobs then. On two cores, which both use, the gain is what one job leaves
unused: the waits for requests, the disk and programs on one core, and that the sampler computes a
token of three jobs in little more time than of one.

A turn is the time in which the trainer exchanges one job's adapter, optimizer and random numbers
for another's (`time/turn`). The last figure is arithmetic: the time to expect of a GPU for sampling
and one for training, from the shares of a step measured here, if the sampler takes `--batch-cost`
of a job's time more for each further job.
"""

from __future__ import annotations

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
from bench.report import Figure, count, finish, in_turns, options, ratios, repeated
from deploy.machine import exit_on_signals

MOST_TIME = 0.7
MOST_TURN = 0.02
BATCH_COST = 0.2
"""The share by which a GPU's sampler takes longer for each further job: decoding is bound by
memory, so a larger batch costs little."""


@dataclass(frozen=True)
class Turn:
    """A run of the jobs in one way: `steps_per_s` of all together, `whole_s` from the first
    submission to the last end, and the `rows` of each step."""

    steps_per_s: float
    whole_s: float
    rows: list[dict[str, float]]

    def mean(self, name: str) -> float:
        return fmean(row[name] for row in self.rows if name in row)


def main() -> int:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--model", default="0.6M", choices=TASKS, help="default: 0.6M")
    parser.add_argument("--steps", type=count, default=12, help="of each job (default: 12)")
    parser.add_argument("--jobs", type=count, default=3, help="default: 3")
    parser.add_argument("--batch-cost", type=float, default=BATCH_COST, help="default: 0.2")
    args = parser.parse_args()
    exit_on_signals(signal.SIGTERM)  # so that the stack is stopped too
    task = TASKS[args.model]
    ways = {way.__name__: way for way in (one_after_the_other, at_once)}
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), task)
        adapters = {"HONE_ROLLOUT_ADAPTERS": str(args.jobs)}
        with stack(Path(folder), samplers=1, **adapters) as client:
            jobs = [job_of(Path(folder), task, args.steps, seed) for seed in range(args.jobs)]
            one_after_the_other(client, jobs[:1])  # lets the sampler's engine start
            for name in in_turns(ways, args.repeats):
                turns[name].append(ways[name](client, jobs))
                print(f"{name}: {turns[name][-1].whole_s:.1f} s", file=sys.stderr, flush=True)
    figures = compare(turns, args.jobs, args.batch_cost)
    return finish("tenants", figures, task=asdict(task), **vars(args))


def compare(turns: dict[str, list[Turn]], num_jobs: int, batch_cost: float) -> list[Figure]:
    apart, shared = turns.values()
    step_s = [1 / turn.steps_per_s for turn in apart]
    turn_s = [turn.mean("time/turn") for turn in shared]
    on_gpus = [expected(turn, num_jobs, batch_cost) for turn in apart]
    return [
        repeated(
            f"{num_jobs} jobs at once, to one after the other: time of a step",
            ratios([1 / turn.steps_per_s for turn in shared], step_s),
            "x",
            MOST_TIME,
            "max",
        ),
        repeated("a turn, to a step of one job", ratios(turn_s, step_s), "", MOST_TURN, "max"),
        repeated(
            "with loading, from submission to end",
            ratios([turn.whole_s for turn in shared], [turn.whole_s for turn in apart]),
            "x",
        ),
        repeated("one after the other: step", step_s, "s"),
        repeated("of it generation", [turn.mean("time/generate") for turn in apart], "s"),
        repeated("of it training", [turn.mean("time/train") for turn in apart], "s"),
        repeated("a turn", turn_s, "s"),
        repeated("expected with a GPU for each side: time of a step", on_gpus, "x"),
    ]


def expected(alone: Turn, num_jobs: int, batch_cost: float) -> float:
    """Returns the time of a step of several jobs to one job's, if sampling and training do not slow
    each other down, and the other parts of a step take time but use neither GPU."""
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
    """The times at which each step of a job was done, in Unix seconds, and its metrics."""

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
