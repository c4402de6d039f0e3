"""Times whole GRPO steps of Hone and of TRL's `GRPOTrainer` on one machine.

    python -m bench.loop [--models 0.6M,40M,few-0.6M,few-40M] [--steps 4] [--repeats 3]

(TRL is in the extra `dev`.)

A figure is samples per second over whole steps: sampling, grading, the update, and the new weights
where the next step samples. Hone is a job on the stack that `hone up` starts: four services over
HTTP, each group and batch on disk before it is trained on, weights proven by digest and canary, a
row and an event per step. It has two samplers, as `HONE_ROLLOUT_REPLICAS=2 hone up` starts them: on
two cores they sample faster than one with two threads. TRL is one process that keeps nothing. It
runs twice: with the generation of transformers, and with vLLM colocated (`vllm_mode="colocate"`),
the same wheel that Hone has.

Both sides have the same random model, prompts, groups of 8 and completions of 64 tokens exactly
(nothing ends them, and prompts have one length, so TRL pads nothing), float32, loss "dapo" with the
same bounds, no reference model, AdamW at a constant learning rate, one optimizer step per batch,
all of it in one micro-batch, no gradient checkpointing, the same Python reward. Hone trains with
`max_staleness` 0, in turns as TRL does, and calls its reward in the sandbox. TRL's correction for
vLLM's log-probs is off, which saves it a forward pass: Hone's is off too at staleness 0. Beside it
Hone trains with `max_staleness` 1, where the next step is sampled while this one trains, with its
correction on; TRL has nothing like it.

The sides take turns, in another order each time, and only one works at a time; none spins while it
waits (`OMP_WAIT_POLICY=PASSIVE`). Of each turn the first step is not counted, and of Hone's nor is
the last one, which writes a checkpoint. A ratio is taken within a repeat, and the figure is the
median of the repeats. From Hone's own step metrics is the share of its steps that is neither
generation, grading, training nor sync: groups and batch onto the disk, the step's row and event,
and what is between them. A side of TRL's that cannot run is left out, with its last line.

The tasks `few-...` have prompts as long as GSM8K's questions behind four worked examples: in words
and marks a question of its training rows has 53 in the mean and its answer 99, so 608 tokens come
before a question. Hone computes them once for all prompts, and each question once for its group.
TRL has micro-batches of 8 sequences there, its default, because all of them would not fit.

Beside the ratio stands the most that it could be here: as if a step were nothing but the products
of its tokens with the model's weights, at the rate of one such product alone. On a CPU a model of
40 million parameters is near that: the cores do the same work on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import hone
from bench.loop_side import CLIP_HIGH, CLIP_LOW, KV_CACHE_GIB, LEARNING_RATE, Task, write_task
from bench.report import Figure, count, finish, ratios, repeated, table
from bench.side import start, told
from deploy import local
from deploy.machine import on_free_ports

TASKS = {
    "0.6M": Task(num_layers=4, hidden_size=128, intermediate_size=256, num_prompts=16),
    "40M": Task(num_layers=12, hidden_size=512, intermediate_size=1664, num_prompts=4),
}
TASKS |= {
    f"few-{name}": replace(task, worked=608, question=53, rows=8) for name, task in TASKS.items()
}

GENERATIONS = {"TRL": "transformers", "TRL with vLLM": "vllm"}
"""TRL's sides, and what samples there."""

AHEAD = "Hone, a step ahead"
STALENESS = {"Hone": 0, AHEAD: 1}
"""Hone's sides, and the `max_staleness` of their jobs."""

STAGES = ("generate", "reward", "train", "sync")
MOST_OVERHEAD = 0.05
NUM_PRODUCTS = 50
NUM_SAMPLERS = 2
LEAST_RATIO = {"0.6M": 2.0, "40M": 2.0, "few-0.6M": 1.5, "few-40M": 3.0}


@dataclass(frozen=True)
class Turn:
    """The steps of one side that count: `seconds` of each, and of its stages in the mean."""

    seconds: list[float]
    stages: dict[str, float]

    @property
    def step_s(self) -> float:
        return fmean(self.seconds)


Turns = dict[str, list[Turn]]
"""By side, in the order of the repeats."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="0.6M,40M", help="default: 0.6M,40M")
    parser.add_argument("--steps", type=count, default=4, help="that count, in a turn (default: 4)")
    parser.add_argument("--repeats", type=count, default=3, help="turns of each side (default: 3)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the stack ends too
    figures: list[Figure] = []
    facts: dict[str, Any] = {"steps": args.steps, "repeats": args.repeats}
    facts |= {"tasks": {}, "turns": {}, "missing": {}}
    for name in args.models.split(","):
        task = TASKS[name]
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = write_task(Path(folder), task)
            turns, missing = alternate(Path(folder), task, args.steps, args.repeats)
        least_s = products_s(task, num_parameters)
        for side, why in missing.items():
            print(f"{name}: {side} could not run: {why}")
        print(f"\n{name}: seconds of a step (medians of {args.repeats})\n{breakdown(turns)}\n")
        figures += compare(name, task, turns, least_s)
        facts["tasks"][name] = asdict(task) | {
            "num_parameters": num_parameters,
            "products_s": least_s,
        }
        facts["missing"] |= missing
        facts["turns"][name] = {side: [asdict(one) for one in turns[side]] for side in turns}
    return finish("loop", figures, **facts)


def alternate(folder: Path, task: Task, steps: int, repeats: int) -> tuple[Turns, dict[str, str]]:
    """Returns each side's turns, and why a side of TRL's could not run; which one goes first
    changes from one repeat to the next."""
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as running:
        starting = {
            side: running.enter_context(trl(generation, folder, task))
            for side, generation in GENERATIONS.items()
        }
        client = running.enter_context(stack(folder))
        sides: dict[str, Hone | Trl] = {
            side: Hone(client, folder, task, staleness) for side, staleness in STALENESS.items()
        }
        for side, one in starting.items():
            try:
                one.begin()
                sides[side] = one
            except RuntimeError as error:
                missing[side] = str(error)
        turns: Turns = {side: [] for side in sides}
        names = [*sides]
        for repeat in range(repeats):
            first = repeat % len(names)
            for side in names[first:] + names[:first]:
                turn = sides[side].turn(steps)
                turns[side].append(turn)
                print(f"{side}: {turn.step_s:.3f} s a step", file=sys.stderr, flush=True)
        return turns, missing


# --- Hone ----------------------------------------------------------------------------------------


class Hone:
    """A running stack, which trains a job for each turn."""

    def __init__(self, client: hone.Client, folder: Path, task: Task, max_staleness: int) -> None:
        self._client = client
        self._folder = folder
        self._task = task
        self._max_staleness = max_staleness

    def turn(self, steps: int) -> Turn:
        record = self._client.submit(self._job(steps + 2))
        for _ in self._client.events(record.id, follow=True):
            pass
        record = self._client.get(record.id)
        if record.status != "succeeded":
            raise RuntimeError(f"the job {record.status}: {record.error}")
        found = self._client.metrics(record.id).rows
        rows = [row.metrics for row in found if 1 < row.step < record.steps]
        assert len(rows) == steps
        for row in rows:
            assert row["completions/mean_length"] == self._task.max_tokens
            assert row["num_examples"] == self._task.num_samples
        stages = sorted({name for row in rows for name in row if name.startswith("time/")})
        return Turn(
            [row["time/step"] for row in rows],
            {name.removeprefix("time/"): fmean(row[name] for row in rows) for name in stages},
        )

    def _job(self, steps: int) -> hone.Job:
        return hone.Job.model_validate(
            {
                "name": "bench",
                "model": str(self._folder / "model"),
                "steps": steps,
                "max_staleness": self._max_staleness,
                "data": {"train": str(self._folder / "train.jsonl")},
                "sampling": {
                    "prompts_per_step": self._task.num_prompts,
                    "group_size": self._task.group_size,
                    "max_tokens": self._task.max_tokens,
                },
                "rewards": [{"source": (self._folder / "reward.py").read_text()}],
                "training": {
                    "loss": "dapo",
                    "clip_low": CLIP_LOW,
                    "clip_high": CLIP_HIGH,
                    "learning_rate": LEARNING_RATE,
                    "dtype": "float32",
                },
                "memory": {"gradient_checkpointing": False},
                "checkpoints": {"every": 0},
            }
        )


@contextlib.contextmanager
def stack(folder: Path) -> Generator[hone.Client]:
    """The stack that `hone up` starts, on free ports."""
    os.environ |= on_free_ports(samplers=NUM_SAMPLERS) | {
        "HONE_ROLLOUT_REPLICAS": str(NUM_SAMPLERS),
        "HONE_RUNS_DIR": str(folder / "runs"),
        "HONE_KV_CACHE_GIB": str(KV_CACHE_GIB),
        "HONE_LOG_LEVEL": "warning",
    }
    try:
        state = local.up(folder / "stack", quiet=True)
        with hone.Client(state["urls"]["orchestrator"]) as client:
            yield client
    finally:
        local.down(folder / "stack")


# --- TRL -----------------------------------------------------------------------------------------


class Trl:
    """A process of TRL's (`loop_side.py`), which waits between its turns."""

    def __init__(self, process: subprocess.Popen[str], log: Path, task: Task) -> None:
        self._process = process
        self._log = log
        self._task = task

    def begin(self) -> None:
        """Waits until it is ready, and lets it do a step. Raises RuntimeError with the last line
        that it logged if it ends."""
        self.told()
        self.turn(0)

    def turn(self, steps: int) -> Turn:
        assert self._process.stdin
        self._process.stdin.write(f"{steps + 1}\n")
        self._process.stdin.flush()
        found = self.told()
        num_samples = self._task.num_samples * (steps + 1)
        assert found["num_completions"] == num_samples
        assert found["num_tokens"] == num_samples * self._task.max_tokens
        generate_s = found["generate_s"] / (steps + 1)
        return Turn(found["seconds"][1:] or found["seconds"], {"generate": generate_s})

    def told(self) -> dict[str, Any]:
        """Returns what it says next. Raises RuntimeError at its end."""
        if (found := told(self._process)) is not None:
            return found
        lines = self._log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"it ended with {self._process.wait()}")


@contextlib.contextmanager
def trl(generation: str, folder: Path, task: Task) -> Generator[Trl]:
    arguments = [generation, str(folder), json.dumps(asdict(task))]
    log = folder / f"{generation}.log"
    with log.open("w") as stderr:
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        process = start("bench.loop_side", *arguments, env=environment, stderr=stderr)
    try:
        yield Trl(process, log, task)
    finally:
        process.terminate()
        process.wait()


# --- figures -------------------------------------------------------------------------------------


def compare(name: str, task: Task, turns: Turns, least_s: float) -> list[Figure]:
    """Returns the figures of one model, those with a goal first."""
    rates = {
        side: [task.num_samples / turn.step_s for turn in of_side]
        for side, of_side in turns.items()
    }
    trls = [side for side in GENERATIONS if side in rates]
    better = [max(pair) for pair in zip(*(rates[side] for side in trls), strict=True)]
    overheads = [overhead(turn) for turn in turns["Hone"]]
    return [
        repeated(
            f"{name}: samples per second, Hone to the better TRL",
            ratios(rates["Hone"], better),
            "x",
            LEAST_RATIO.get(name, 0.0),
        ),
        repeated(f"{name}: share of a step beside its work", overheads, "", MOST_OVERHEAD, "max"),
        repeated(f"{name}: {AHEAD}, to the better TRL", ratios(rates[AHEAD], better), "x"),
        repeated(
            f"{name}: nothing but the products of a step, to the better TRL",
            [task.num_samples / least_s / rate for rate in better],
            "x",
        ),
        *[
            repeated(f"{name}: Hone to {side}", ratios(rates["Hone"], rates[side]), "x")
            for side in trls
        ],
        *[repeated(f"{name}: {side}", rates[side], "samples/s") for side in rates],
    ]


def products_s(task: Task, num_parameters: int) -> float:
    """Returns the seconds that the products of a step's completion tokens with the weights take on
    this machine, in float32: 2 operations per token and weight to sample them, and 6 to train on
    them (arXiv 2001.08361, 2.1). The rate is measured on a product of the model's own shape."""
    import torch

    num_tokens = task.num_samples * task.max_tokens
    tokens, weights = (
        torch.randn(num_tokens, task.hidden_size),
        torch.randn(task.hidden_size, task.intermediate_size),
    )
    seconds = []
    for _ in range(NUM_PRODUCTS):
        began = time.perf_counter()
        torch.mm(tokens, weights)
        seconds.append(time.perf_counter() - began)
    rate = 2 * num_tokens * weights.numel() / min(seconds)
    return 8 * num_parameters * num_tokens / rate


def overhead(turn: Turn) -> float:
    """Returns the share of Hone's steps that is neither generation, grading, training nor sync."""
    return 1 - sum(turn.stages[stage] for stage in STAGES) / turn.step_s


def breakdown(turns: Turns) -> str:
    """Returns the table of where the time goes. Of TRL only generation is measured apart; with vLLM
    it has the sync in it."""
    rows = []
    for side, of_side in turns.items():
        step_s = median(turn.step_s for turn in of_side)
        stages = [
            median(turn.stages.get(stage, float("nan")) for turn in of_side)
            for stage in (*STAGES, "keep", "store", "record")
        ]
        shown = ["" if seconds != seconds else f"{seconds:.3f}" for seconds in stages]
        rows.append((side, f"{step_s:.3f}", *shown))
    return table(rows, ("side", "step", *STAGES, "keep", "store", "record"))


if __name__ == "__main__":
    sys.exit(main())
