"""Learning curves of Hone and of TRL's `GRPOTrainer`: the same real model, three tasks.

    python -m bench.curves [--tasks sums,reverse,json] [--seeds 0,1,2] [--sides hone,trl]
    python -m bench.curves --times [--turn-steps 3] [--repeats 3]
    python -m bench.curves --overlap [--tasks sums] [--turn-steps 3] [--repeats 3]

The model is SmolLM2-135M-Instruct (`deploy/real_model.py`). A few supervised steps
(`curve_model.py`) teach it the form of a task's answers, once, and all sides start from these
weights in float32. They have the same rows in the same order, chat template, groups, temperature 1,
loss "dapo" with the same bounds, no reference model, AdamW at the same constant learning rate
without warm-up, one optimizer step per batch, gradients of norm 1 at most, and no gradient
checkpointing. The reward is one Python function (`curve_rewards.py`), which Hone calls in its
sandbox. Hone is a job on the stack that `hone up` starts, with `max_staleness` 0; TRL is a process
that samples with transformers, or with vLLM colocated (`--sides trl-vllm`). They draw other random
numbers, so curves agree only in distribution, and three seeds, each with other rows, show how
closely.

A curve is the mean reward of each step's rollouts. Held-out reward is measured for all sides by one
program: transformers decodes 64 problems that no training row contains, greedily, before and after
training. Curves agree at the end if the means over the seeds of the last quarter of the steps
differ by at most the larger of the two sides' standard deviations over the seeds, or by 0.05. Two
flat curves agree too, so each seed of each side must also gain 0.1 from the first quarter of the
steps to the last. Greedy answers may gain less: they are often right before rollouts at temperature
1 are.

Each finished run is a file in `--results`, so an interrupted benchmark continues; the figures and
the picture (`--picture`) are of all files there.

With `--times` all sides take turns of a few steps; the task `few`, with prompts of 600 tokens, is
for that alone. The learning rate is almost 0 there, so that all sample from the same weights, and
completions of one length. A step is all of Hone's, with groups and batch on disk, against the
faster of TRL's two. Hone does not train on groups whose rewards are equal, and TRL does, with a
gradient of zero: that is part of the ratio. TRL's vLLM has no oneDNN, which TRL's weight sync
cannot load (`trl_side.py`). Memory is the resident memory of Hone's trainer and sampler at their
peaks, against the TRL process that needs less.

With `--overlap` Hone takes turns with itself a step ahead (`max_staleness` 1), sampler and trainer
on one thread each, as if each had a processor of its own. The limit of the ratio is a step in turns
against the longer of sampling with grading and training, and the sync, which neither overlaps.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import hone
from bench import curve_rewards
from bench.curve_tasks import TASKS, Task, write_rows
from bench.grpo import (
    AHEAD,
    GENERATIONS,
    HONE,
    HoneSide,
    Step,
    Turn,
    Turns,
    better_trl,
    breakdown,
    running_trl,
    stack,
    stage_medians,
    take_turns,
)
from bench.report import Figure, count, finish, in_turns, names, options, ratios, repeated
from bench.side import run
from bench.trl_side import Recipe
from deploy.machine import exit_on_signals
from deploy.plot import running_mean
from deploy.real_model import fetch

SIDES = {"hone": HONE, "trl": "TRL", "trl-vllm": "TRL with vLLM"}
COLORS = {"hone": "#1f5fa8", "trl": "#c2410c", "trl-vllm": "#4d7c0f"}

MIN_DIFFERENCE = 0.05
"""A difference of rewards that never counts as a disagreement, however little the seeds differ."""

LEAST_GAIN = 0.1
LEAST_RATIO = 1.5
LEAST_RATIOS = {"sums": 2.5, "reverse": 2.0, "few": 5.0}
"""Goals of single tasks with `--times`."""

MOST_MEMORY = 0.6
"""Of Hone's trainer and sampler to the smaller of TRL's processes."""

NUM_SAMPLERS = 1
"""A second one would need 2 GiB more, and memory is a figure too."""

TIMES_LEARNING_RATE = 1e-9
WINDOW = 5
LIMIT_S = 3600.0


@dataclass(frozen=True)
class HeldOut:
    """The mean `reward` of greedy answers to the held-out problems, the share that is `right`, with
    a reward of 1, and the answers."""

    reward: float
    right: float
    completions: list[str]


@dataclass(frozen=True)
class Curve:
    """A training run of one side with one seed: its steps, and the weights after them."""

    steps: list[Step]
    held_out: HeldOut

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps]

    @property
    def first_quarter(self) -> float:
        """The mean reward of the first quarter of the steps."""
        return fmean(self.rewards[: self._quarter])

    @property
    def last_quarter(self) -> float:
        return fmean(self.rewards[-self._quarter :])

    @property
    def _quarter(self) -> int:
        return max(1, len(self.steps) // 4)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


Curves = dict[str, list[Curve]]
"""The curves of each side, in the order of the seeds."""


def main() -> int:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--tasks", type=names(TASKS), default=["sums", "reverse", "json"])
    parser.add_argument("--sides", type=names(SIDES), default=["hone", "trl"])
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--steps", type=count, help="of a run (default: the task's)")
    parser.add_argument("--results", type=Path, default=Path(".hone/curves"))
    parser.add_argument("--picture", type=Path, default=Path("docs/curves.png"))
    parser.add_argument("--times", action="store_true", help="measure the time of a step instead")
    parser.add_argument("--overlap", action="store_true", help="measure sampling a step ahead")
    parser.add_argument("--turn-steps", type=count, default=3, help="that count (default: 3)")
    args = parser.parse_args()
    exit_on_signals(signal.SIGTERM)  # so that the stack is stopped too
    tasks = [TASKS[name] for name in args.tasks]
    if args.steps:
        tasks = [replace(task, steps=args.steps) for task in tasks]
    results = Results(args.results)
    for task in tasks:
        results.prepare(task)
    if args.overlap:
        figures = [
            figure
            for task in tasks
            for figure in overlap(results, task, args.turn_steps, args.repeats)
        ]
        return finish("curves", figures)
    if args.times:
        for task in tasks:
            measure_times(results, task, args.turn_steps, args.repeats)
    else:
        for side in args.sides:
            train_missing(results, side, [(task, seed) for task in tasks for seed in args.seeds])
    return report(results, tasks, args.seeds, args.picture)


def parse_seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


# --- results -------------------------------------------------------------------------------------


class Results:
    """The folder of finished runs, one file each, with the weights from which they start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, task: Task) -> Path:
        """Returns the folder of the weights after the supervised steps."""
        return (self._folder / "models" / task.name).resolve()

    def prepare(self, task: Task) -> None:
        """Makes the weights from which all sides start, and measures them, unless the results have
        them."""
        if self.start(task):
            return
        model = self.model(task)
        log(f"{task.name}: {task.warmup.steps} supervised steps")
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder, "warmup.jsonl")
            write_rows(rows, task.warmup_rows())
            warmup = json.dumps(asdict(task.warmup))
            arguments = ("warmup", str(fetch()), str(rows), warmup, str(model))
            run("bench.curve_model", *arguments, limit_s=LIMIT_S)
        found = asdict(held_out(task, model))
        self._write(f"{task.name}-start", task.settings, found)
        log(f"{task.name}: held-out reward {found['reward']:.3f} before training")

    def start(self, task: Task) -> HeldOut | None:
        found = self._read(f"{task.name}-start", task.settings)
        return HeldOut(**found) if found else None

    def curve(self, task: Task, side: str, seed: int) -> Curve | None:
        found = self._read(f"{task.name}-{side}-{seed}", task.run_settings(seed))
        if found is None:
            return None
        return Curve([Step(**step) for step in found["steps"]], HeldOut(**found["held_out"]))

    def store(self, task: Task, side: str, seed: int, curve: Curve) -> None:
        self._write(f"{task.name}-{side}-{seed}", task.run_settings(seed), asdict(curve))
        log(
            f"{task.name}, {SIDES[side]}, seed {seed}: reward {curve.rewards[0]:.3f} -> "
            f"{curve.last_quarter:.3f}, held-out {curve.held_out.reward:.3f}, "
            f"{curve.seconds:.0f} s"
        )

    def times(self, task: Task) -> tuple[Turns, dict[str, str]]:
        """Returns the turns of each side, none if they were not measured, and why a side is
        missing."""
        found = self._read(f"{task.name}-times", times_settings(task))
        if found is None:
            return {}, {}
        turns = {
            side: [
                Turn([Step(**step) for step in turn["steps"]], turn["peak_gib"]) for turn in of_side
            ]
            for side, of_side in found["turns"].items()
        }
        return turns, found["missing"]

    def store_times(self, task: Task, turns: Turns, missing: dict[str, str]) -> None:
        found = {side: [asdict(turn) for turn in of_side] for side, of_side in turns.items()}
        document = {"turns": found, "missing": missing}
        self._write(f"{task.name}-times", times_settings(task), document)

    def _read(self, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the result that is stored under the name, or None. Raises ValueError if it was
        measured with other settings."""
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        document = json.loads(path.read_text())
        if document["settings"] != settings:
            raise ValueError(
                f"{path} has the settings {document['settings']}, expected {settings}; remove it, "
                "or name another folder with --results"
            )
        return document["found"]

    def _write(self, name: str, settings: dict[str, Any], found: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f"{name}.part"
        part.write_text(json.dumps({"settings": settings, "found": found}, indent=1))
        part.replace(part.with_suffix(".json"))


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def held_out(task: Task, model: Path) -> HeldOut:
    """Returns the held-out result of the weights in the folder."""
    rows = task.held_out()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "held_out.jsonl")
        write_rows(path, rows)
        arguments = ("answer", str(model), str(path), str(task.recipe.max_tokens))
        completions = run("bench.curve_model", *arguments, limit_s=LIMIT_S)["completions"]
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    reward = getattr(curve_rewards, task.recipe.reward)
    rewards = reward(completions=messages, answer=[row["answer"] for row in rows])
    right = fmean(each == 1 for each in rewards)
    return HeldOut(fmean(rewards), right, completions)


# --- runs ----------------------------------------------------------------------------------------


def train_missing(results: Results, side: str, runs: Sequence[tuple[Task, int]]) -> None:
    """Trains the runs that are missing from the results."""
    left = [(task, seed) for task, seed in runs if results.curve(task, side, seed) is None]
    if not left:
        return
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        client: hone.Client | None = None
        if side == "hone":
            client = running.enter_context(stack(folder, samplers=NUM_SAMPLERS))
        for task, seed in left:
            recipe = replace(task.recipe, seed=seed)
            own = folder / f"{task.name}-{seed}"
            write_side(own, results.model(task), task.train_rows(seed))
            if client:
                curve = hone_curve(client, own, task, recipe)
            else:
                curve = trl_curve(GENERATIONS[SIDES[side]], own, task, recipe)
            results.store(task, side, seed, curve)
            shutil.rmtree(own)


def hone_curve(client: hone.Client, folder: Path, task: Task, recipe: Recipe) -> Curve:
    record, steps = HoneSide(client, folder, recipe).train(task.steps)
    curve = Curve(steps, held_out(task, Path((record.summary or {})["checkpoint"])))
    client.delete(record.id, files=True)
    return curve


def trl_curve(generation: str, folder: Path, task: Task, recipe: Recipe) -> Curve:
    trained = folder / "trained"
    with running_trl(generation, folder, recipe, save=trained) as trl:
        steps = trl.train(task.steps)
        trl.side.finish()
    return Curve(steps, held_out(task, trained))


def measure_times(results: Results, task: Task, steps: int, repeats: int) -> None:
    """Lets all sides take turns of a few steps."""
    recipe = times_recipe(task)
    with tempfile.TemporaryDirectory() as name:
        rows = replace(task, steps=steps + 2).train_rows(seed=0)
        write_side(Path(name), results.model(task), rows)
        turns, missing = take_turns(
            Path(name), recipe, {HONE: 0}, steps, repeats, samplers=NUM_SAMPLERS
        )
    results.store_times(task, turns, missing)


def overlap(results: Results, task: Task, steps: int, repeats: int) -> list[Figure]:
    """Returns the figures of sampling a step ahead, on one thread each."""
    turns: Turns = {HONE: [], AHEAD: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = replace(task, steps=steps + 2).train_rows(seed=0)
        write_side(folder, results.model(task), rows)
        with stack(folder, samplers=NUM_SAMPLERS, OMP_NUM_THREADS="1") as client:
            for side in in_turns(turns, repeats):
                one = HoneSide(client, folder, times_recipe(task), int(side == AHEAD))
                turns[side].append(one.turn(steps))
    print(f"\n{task.name}: seconds of a step (medians)\n{breakdown(turns)}\n")
    in_turn, ahead = ([turn.step_s for turn in of_side] for of_side in turns.values())
    least = [
        max(turn.stage_s("generate") + turn.stage_s("reward"), turn.stage_s("train"))
        + turn.stage_s("sync")
        for turn in turns[HONE]
    ]
    return [
        repeated(f"{task.name}: a step in turns to one a step ahead", ratios(in_turn, ahead), "x"),
        repeated(f"{task.name}: the limit of that", ratios(in_turn, least), "x"),
    ]


def times_recipe(task: Task) -> Recipe:
    return replace(task.recipe, learning_rate=TIMES_LEARNING_RATE)


def times_settings(task: Task) -> dict[str, Any]:
    """Returns everything that the time of a step depends on."""
    return task.settings | {"recipe": asdict(times_recipe(task))}


def write_side(folder: Path, model: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the files with which a side trains."""
    folder.mkdir(exist_ok=True)
    (folder / "model").symlink_to(model)
    (folder / "reward.py").write_text(Path(curve_rewards.__file__).read_text())
    write_rows(folder / "train.jsonl", rows)


# --- figures -------------------------------------------------------------------------------------


def report(results: Results, tasks: Sequence[Task], seeds: Sequence[int], picture: Path) -> int:
    """Draws and prints the figures of all results; returns the exit status."""
    figures: list[Figure] = []
    facts: dict[str, Any] = {"seeds": [*seeds], "tasks": {}}
    drawn: dict[str, tuple[float, Curves]] = {}
    num_missing = 0
    for task in tasks:
        start = results.start(task)
        assert start
        curves = finished_curves(results, task, seeds)
        turns, missing = results.times(task)
        figures += compare(task.name, start.reward, curves) + compare_times(task.name, turns)
        drawn[task.name] = (start.reward, curves)
        num_missing += len(curves) < 2 or len(turns) < 2
        facts["tasks"][task.name] = task.run_settings(0) | {
            "before": {"reward": start.reward, "right": start.right},
            "curves": {
                side: [
                    {"rewards": curve.rewards, "held_out": curve.held_out.reward}
                    for curve in of_side
                ]
                for side, of_side in curves.items()
            },
            "stages": {side: stage_medians(of_side) for side, of_side in turns.items()},
            "missing": missing,
        }
        for side, why in missing.items():
            print(f"{task.name}: {side} could not run: {why}")
        if turns:
            print(f"\n{task.name}: seconds of a step (medians)\n{breakdown(turns)}\n")
    if any(curves for _, curves in drawn.values()):
        plot(drawn, picture)
    figures.append(Figure("tasks without a comparison", num_missing, "", 0, "max"))
    return finish("curves", figures, **facts)


def finished_curves(results: Results, task: Task, seeds: Sequence[int]) -> Curves:
    """Returns the curves of each side that has all seeds."""
    curves: Curves = {}
    for side in SIDES:
        found = [results.curve(task, side, seed) for seed in seeds]
        of_side = [curve for curve in found if curve is not None]
        if of_side and len(of_side) == len(found):
            curves[side] = of_side
    return curves


def compare(task: str, before: float, curves: Curves) -> list[Figure]:
    """Returns the figures of a task's curves, those with a goal first."""
    ends = {side: [curve.last_quarter for curve in of_side] for side, of_side in curves.items()}
    figures = [
        agreement(f"{task}: rewards at the end, Hone and {SIDES[side]}", ends["hone"], ends[side])
        for side in curves
        if side != "hone" and "hone" in curves
    ]
    figures += [
        least_gain(f"{task}: least reward gained, {SIDES[side]}", curves[side]) for side in curves
    ]
    figures.append(Figure(f"{task}: held-out reward before training", before))
    for side, of_side in curves.items():
        name = SIDES[side]
        after = [curve.held_out.reward for curve in of_side]
        rights = [curve.held_out.right for curve in of_side]
        seconds = [curve.seconds / len(curve.steps) for curve in of_side]
        trained = [fmean(step.num_trained for step in curve.steps) for curve in of_side]
        figures += [
            repeated(f"{task}: held-out reward, {name}", after),
            repeated(f"{task}: held-out answers that are right, {name}", rights),
            repeated(f"{task}: reward of the last quarter, {name}", ends[side]),
            repeated(f"{task}: completions that train per step, {name}", trained),
            repeated(f"{task}: a step while learning, {name}", seconds, "s"),
        ]
    return figures


def least_gain(name: str, curves: Sequence[Curve]) -> Figure:
    """Returns the gain of the seed that gained least: a median would hide a seed that unlearned."""
    gains = [curve.last_quarter - curve.first_quarter for curve in curves]
    return Figure(name, min(gains), "", LEAST_GAIN, "min", (min(gains), max(gains)))


def agreement(name: str, one: Sequence[float], other: Sequence[float]) -> Figure:
    """Returns the difference of two sides' means over the seeds. The goal is the larger standard
    deviation of the two over the seeds, at least `MIN_DIFFERENCE`."""
    spreads = [stdev(ends) if len(ends) > 1 else 0.0 for ends in (one, other)]
    return Figure(name, abs(fmean(one) - fmean(other)), "", max(*spreads, MIN_DIFFERENCE), "max")


def compare_times(task: str, turns: Turns) -> list[Figure]:
    if not turns:
        return []
    hones = [turn.step_s for turn in turns[HONE]]
    figures = [
        repeated(f"{task}: {side}, a step", [turn.step_s for turn in of_side], "s")
        for side, of_side in turns.items()
    ]
    figures += [
        Figure(f"{task}: {side}, peak memory", of_side[-1].peak_gib, "GiB")
        for side, of_side in turns.items()
    ]
    if len(turns) > 1:
        ratio = ratios(better_trl(turns), hones)
        goal = LEAST_RATIOS.get(task, LEAST_RATIO)
        memory = turns[HONE][-1].peak_gib / min(
            of_side[-1].peak_gib for side, of_side in turns.items() if side != HONE
        )
        figures[:0] = [
            repeated(f"{task}: a step of the better TRL to Hone's", ratio, "x", goal),
            Figure(f"{task}: Hone's peak memory to TRL's", memory, "x", MOST_MEMORY, "max"),
        ]
    return figures


def plot(drawn: dict[str, tuple[float, Curves]], path: Path) -> None:
    """Draws a panel for each task: every side's mean reward over the seeds, as a running mean, with
    the range of the seeds, and held-out rewards as points."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(5 * len(drawn), 4.2), dpi=120)
    panels = picture.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (task, (before, curves)) in zip(panels, drawn.items(), strict=True):
        for side, of_side in curves.items():
            steps = range(1, 1 + len(of_side[0].steps))
            smooth = [running_mean(curve.rewards, WINDOW) for curve in of_side]
            by_step = [*zip(*smooth, strict=True)]
            color, label = COLORS[side], f"{SIDES[side]}, mean of {len(of_side)} seeds"
            axes.fill_between(
                steps, [*map(min, by_step)], [*map(max, by_step)], color=color, alpha=0.2, lw=0
            )
            axes.plot(steps, [*map(fmean, by_step)], color=color, linewidth=2, label=label)
            after = [curve.held_out.reward for curve in of_side]
            axes.plot([steps[-1]] * len(after), after, "o", color=color, clip_on=False)
        axes.plot([0], [before], "o", color="#444444", label="held-out, greedy")
        axes.set(title=task, xlabel="step", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward")
    panels[0].legend(loc="upper left")
    picture.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, format="png")


if __name__ == "__main__":
    sys.exit(main())
