"""GRPO steps of Hone and of TRL with the same settings, a `Recipe`: Hone as a job on the stack that
`hone up` starts, TRL as a process (`trl_side.py`). For the benchmarks that compare the two."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isnan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

import hone
from bench.report import in_turns, table
from bench.side import Side, resident_bytes, running
from bench.trl_side import CLIP_HIGH, CLIP_LOW, KV_CACHE_GIB, Recipe
from deploy import local
from deploy.machine import on_free_ports
from shared.wire import JobRecord

HONE, AHEAD = "Hone", "Hone, a step ahead"
GENERATIONS = {"TRL": "transformers", "TRL with vLLM": "vllm"}
"""TRL's sides, with the engine that samples."""

STAGES = ("generate", "reward", "train", "sync")

ENGINES = ("services.trainer", "services.rollout")
"""The modules of Hone's services that hold a model."""


@dataclass(frozen=True)
class Step:
    """A training step of one side: `seconds` of it and of its `stages`, the mean `reward` and the
    mean length of its completions in tokens, and how many of them are trained on: Hone leaves out
    groups whose rewards are equal, which have no gradient."""

    seconds: float
    stages: dict[str, float]
    reward: float
    mean_length: float
    num_trained: int


@dataclass(frozen=True)
class Turn:
    """The steps of one side that count, and the most memory that its processes have had so far, in
    GiB: TRL's, and Hone's trainer and sampler. A page that two of them share counts twice."""

    steps: list[Step]
    peak_gib: float

    @property
    def step_s(self) -> float:
        return fmean(step.seconds for step in self.steps)

    def stage_s(self, stage: str) -> float:
        """Returns the mean of a stage, NaN for a stage that the side does not measure."""
        return fmean(step.stages.get(stage, float("nan")) for step in self.steps)


Turns = dict[str, list[Turn]]
"""The turns of each side, in the order of the repeats."""


def take_turns(
    folder: Path,
    recipe: Recipe,
    staleness: Mapping[str, int],
    steps: int,
    repeats: int,
    *,
    samplers: int,
) -> tuple[Turns, dict[str, str]]:
    """Returns each side's turns, and why a side of TRL's could not run. The order changes from one
    repeat to the next. Each turn has processes of its own, so that only one side is in memory.
    `staleness`: Hone's sides, and the `max_staleness` of their jobs."""
    missing: dict[str, str] = {}
    turns: Turns = {side: [] for side in (*staleness, *GENERATIONS)}
    for side in in_turns(turns, repeats):
        if side in missing:
            continue
        if side in staleness:
            with stack(folder, samplers=samplers) as client:
                turn = HoneSide(client, folder, recipe, staleness[side]).turn(steps)
        else:
            try:
                with running_trl(GENERATIONS[side], folder, recipe) as trl:
                    turn = trl.turn(steps)
            except RuntimeError as error:
                missing[side] = str(error)
                continue
        turns[side].append(turn)
        print(f"{side}: {turn.step_s:.3f} s a step", file=sys.stderr, flush=True)
    return {side: of_side for side, of_side in turns.items() if side not in missing}, missing


def peak_gib(processes: Sequence[psutil.Process]) -> float:
    """Returns the sum of the largest resident memory of the processes and of what they started."""
    every = [each for one in processes for each in (one, *one.children(recursive=True))]
    return sum(resident_bytes("VmHWM", each.pid) for each in every) / 2**30


def better_trl(turns: Turns) -> list[float]:
    """Returns the seconds of a step of TRL's faster side, repeat by repeat."""
    sides = [[turn.step_s for turn in turns[side]] for side in GENERATIONS if side in turns]
    return [min(pair) for pair in zip(*sides, strict=True)]


def breakdown(turns: Turns) -> str:
    """Returns the table of seconds per stage. TRL's training is the rest of its step."""
    header = ("step", *STAGES, "keep", "store", "record")
    found = {side: stage_medians(of_side, header[1:]) for side, of_side in turns.items()}
    rows = [
        (side, *(f"{of_side[name]:.3f}" if name in of_side else "" for name in header))
        for side, of_side in found.items()
    ]
    return table(rows, ("side", *header))


def stage_medians(turns: Sequence[Turn], stages: Sequence[str] = STAGES) -> dict[str, float]:
    """Returns the median seconds of a step, and of each stage that the side measures."""
    found = {stage: median(turn.stage_s(stage) for turn in turns) for stage in stages}
    measured = {stage: seconds for stage, seconds in found.items() if not isnan(seconds)}
    return {"step": median(turn.step_s for turn in turns)} | measured


# --- Hone ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HoneSide:
    """A running stack that trains a job for each turn."""

    client: hone.Client
    folder: Path
    recipe: Recipe
    max_staleness: int = 0

    def turn(self, steps: int) -> Turn:
        """Returns the steps of a job without its first, in which engines start, and its last, which
        writes a checkpoint."""
        _, found = self.train(steps + 2)
        state = local.running(self.folder / "stack")
        assert state
        services = [
            process
            for process in psutil.Process(state["pid"]).children()
            if any(word in ENGINES for word in process.cmdline())
        ]
        return Turn(found[1:-1], peak_gib(services))

    def train(self, steps: int) -> tuple[JobRecord, list[Step]]:
        """Returns the record and all steps of a job that has succeeded."""
        document = document_of(self.folder, self.recipe, steps)
        document["max_staleness"] = self.max_staleness
        record = finished(self.client, self.client.submit(document).id)
        rows = [row.metrics for row in self.client.metrics(record.id).rows if row.step > 0]
        if len(rows) != steps:
            raise RuntimeError(f"got {len(rows)} steps of metrics, expected {steps}")
        return record, [_step_of(row) for row in rows]


def _step_of(row: Mapping[str, float]) -> Step:
    stages = {
        name.removeprefix("time/"): seconds
        for name, seconds in row.items()
        if name.startswith("time/") and name != "time/step"
    }
    return Step(
        row["time/step"],
        stages,
        row["reward"],
        row["completions/mean_length"],
        int(row["num_examples"]),
    )


def document_of(folder: Path, recipe: Recipe, steps: int) -> dict[str, Any]:
    """Returns the job that trains by the recipe."""
    return {
        "name": "bench",
        "model": str(folder / "model"),
        "steps": steps,
        "seed": recipe.seed,
        "data": {"train": str(folder / "train.jsonl"), "shuffle": False},
        "sampling": {
            "prompts_per_step": recipe.num_prompts,
            "group_size": recipe.group_size,
            "max_tokens": recipe.max_tokens,
        },
        "rewards": [{"source": (folder / "reward.py").read_text(), "function": recipe.reward}],
        "training": {
            "loss": "dapo",
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
            "learning_rate": recipe.learning_rate,
            "dtype": "float32",
        },
        "memory": {"gradient_checkpointing": False},
        "checkpoints": {"every": 0},
    }


def finished(client: hone.Client, job_id: str) -> JobRecord:
    """Waits for the job and returns its record. Raises RuntimeError unless it succeeded."""
    for _ in client.events(job_id, follow=True):
        pass
    record = client.get(job_id)
    if record.status != "succeeded":
        raise RuntimeError(f"the job {record.status}: {record.error}")
    return record


@contextlib.contextmanager
def stack(folder: Path, *, samplers: int, **variables: str) -> Generator[hone.Client]:
    """Yields a client of a stack that `hone up` starts on free ports, with further `variables`."""
    os.environ |= on_free_ports(samplers=samplers) | {
        "HONE_ROLLOUT_REPLICAS": str(samplers),
        "HONE_RUNS_DIR": str(folder / "runs"),
        "HONE_KV_CACHE_GIB": str(KV_CACHE_GIB),
        "HONE_LOG_LEVEL": "warning",
        **variables,
    }
    try:
        state = local.up(folder / "stack", quiet=True)
        with hone.Client(state["urls"]["orchestrator"]) as client:
            yield client
    finally:
        local.down(folder / "stack")


# --- TRL -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrlSide:
    """A process of TRL that is ready, and waits between turns."""

    side: Side

    def turn(self, steps: int) -> Turn:
        """Returns the steps of a turn without its first."""
        found = self.train(steps + 1)
        process = psutil.Process(self.side.process.pid)
        return Turn(found[1:] or found, peak_gib([process]))

    def train(self, steps: int) -> list[Step]:
        return [Step(**step) for step in self.side.ask(steps)["steps"]]


@contextlib.contextmanager
def running_trl(
    generation: str, folder: Path, recipe: Recipe, save: Path | None = None
) -> Generator[TrlSide]:
    settings = {field.name: asdict(recipe)[field.name] for field in fields(Recipe)}
    arguments = [generation, str(folder), json.dumps(settings), *([str(save)] if save else [])]
    log, env = folder / f"{generation}.log", os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with running("bench.trl_side", *arguments, log=log, env=env) as side:
        side.told()  # it is ready
        yield TrlSide(side)
