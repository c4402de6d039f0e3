"""Hone's forward and backward passes side by side with TRL's own, on the same model and the same
sequences.

    python -m bench.trainer [--quick] [--repeats 5]      (TRL is in the extra `dev`)

One measurement is a step without its optimizer: the passes over the batch, as each side cuts it
into micro-batches, up to the gradient of every weight. The model is random, in float32, on this
machine's CPU. It has the architecture of Qwen2.5 with a small body, so that most of the time goes
to the output head, the loss and the batching, in which the sides differ. Tokens per second count
prompt and completion tokens, without padding.

The first task, `equal lengths`, needs no padding: the sides differ in the head, the shared prompt
and the passes. In the next two tasks groups of 8 share a prompt and completions have log-normal
lengths, so much of the difference is TRL's padding.

The next four tasks are like what people train on: mathematics, code after a long prompt, few-shot
prompts, conversations. Their model has 40 M parameters and a small vocabulary, so that the body
takes most of the time. Hone is also compared with itself under `memory.shared_prefix = "off"`,
which packs the same sequences without padding. The goal is 0.85 of the ratio of computed tokens.
In the last task nothing is shared, and sharing may cost 3 % at most.

What each side is given:

- TRL: `GRPOTrainer` with its defaults of 8 sequences per micro-batch, its own `_compute_loss`,
  entropies and metrics included. Padded as it pads: the whole batch to its longest prompt and
  longest completion. Its head is `ChunkedLogProbFunction` on its path without Triton, plain torch
  tiles over every position of the padded rows, which it takes wherever there is no GPU. With
  Triton it runs other kernels, so these ratios say nothing about GPUs.
- Hone: a token budget equal to one such micro-batch; `Policy`, loss and metrics as an update
  calls them, `chunk_tokens` and `shared_prefix` at their defaults.
- Neither: gradient checkpointing (TRL's default is on), bfloat16, a reference model.

The last table is a simulation of how long ranks wait for one another (`trainer_ranks.py`).

Each measurement is a process of its own, and the sides alternate. A figure is the median of the
repeats, with the lowest and the highest; a ratio is taken within each repeat. Peak memory is the
process's largest resident size during the step less its size before the step. All sides compute the
same step, so losses are compared too, and gradients with TRL's. In the first three tasks, a third
of the measured speed, or more than half of TRL's peak memory, misses a goal.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from bench import trainer_ranks
from bench.report import Figure, count, finish, ratios, repeated, table
from bench.side import run
from bench.trainer_side import Task

BASE = Task(vocab_size=8_192, num_prompts=1, hidden_size=512, num_layers=8)


def workload(prompt: int, completion: int, group_size: int, **others: Any) -> Task:
    """Returns a task of prompts of about `prompt` tokens, and completions of at most `completion`
    tokens."""
    given = {
        "prompt": (prompt * 3 // 4, prompt * 5 // 4),
        "completion": completion // 2,
        "max_tokens": completion,
        "group_size": group_size,
    }
    return replace(BASE, **(given | others))


TASKS = {
    "equal lengths": Task(vocab_size=32_000, num_prompts=2, same_length=True),
    "32k": Task(vocab_size=32_000, num_prompts=2),
    "152k": Task(vocab_size=152_000, num_prompts=2),
}
WORKLOADS = {
    "math 128/512 x 16": workload(128, 512, 16),
    "code 512/256 x 8": workload(512, 256, 8),
    "few-shot 1,024/128 x 8": workload(100, 128, 8, num_prompts=2, in_common=924),
    "agent 3,072/256 x 8": workload(3072, 256, 8),
    "nothing shared": workload(256, 256, 1, num_prompts=8),
}
"""Tasks in which Hone is also compared with itself: prompt / completion x group."""

GOALS = {
    "equal lengths": {"speed": 1.5, "memory": 0.5},
    "32k": {"speed": 3.5, "memory": 0.5},
    "152k": {"speed": 4.0, "memory": 0.5},
}
"""Hone relative to TRL: least tokens per second, and most peak memory."""

MIN_OF_PROMISED, MIN_UNSHARED = 0.85, 0.97
"""Least speed relative to `off`, divided by the ratio of computed tokens: with shared prefixes, and
without any."""

LIMIT_S = 1800.0
SIDES = ("hone", "trl")
Runs = dict[str, list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="only `equal lengths`: about four minutes"
    )
    parser.add_argument("--repeats", type=count, default=5, help="default: 5")
    args = parser.parse_args()
    tasks = dict(list(TASKS.items())[:1]) if args.quick else TASKS | WORKLOADS
    results = {
        name: alternate(task, args.repeats, ("hone", "off", "trl") if name in WORKLOADS else SIDES)
        for name, task in tasks.items()
    }
    for name, runs in results.items():
        print(f"\n{name}: where the time goes (medians of {args.repeats})\n{breakdown(runs)}\n")
    print(f"\n{trainer_ranks.shown()}\n")
    figures = [figure for name, runs in results.items() for figure in compare(name, runs)]
    figures += trainer_ranks.figures()
    sizes = {name: asdict(task) for name, task in tasks.items()}
    return finish("trainer", figures, repeats=args.repeats, tasks=sizes, runs=results)


def alternate(task: Task, repeats: int, sides: tuple[str, ...]) -> Runs:
    """Returns each side's measurements. Each repeat reverses the order of the sides."""
    runs: Runs = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sorted(runs, reverse=bool(repeat % 2)):
            given = json.dumps(asdict(task))
            runs[side].append(run("bench.trainer_side", side, given, limit_s=LIMIT_S))
    return runs


def compare(name: str, runs: Runs) -> list[Figure]:
    """Returns the figures of one task; figures with a goal come first."""
    goals = GOALS.get(name, {})
    rates = {side: [run["num_tokens"] / run["seconds"] for run in runs[side]] for side in runs}
    memory = {side: [run["peak_bytes"] / 2**20 for run in runs[side]] for side in runs}
    cpu = {side: [run["cpu_s"] for run in runs[side]] for side in runs}
    pairs = list(zip(runs["hone"], runs["trl"], strict=True))
    losses = [abs(hone["loss"] - trl["loss"]) for hone, trl in pairs]
    norms = [abs(hone["grad_norm"] / trl["grad_norm"] - 1) for hone, trl in pairs]
    return [
        repeated(
            f"{name}: tokens per second, Hone to TRL",
            ratios(rates["hone"], rates["trl"]),
            "x",
            goals.get("speed"),
        ),
        repeated(
            f"{name}: peak memory, Hone to TRL",
            ratios(memory["hone"], memory["trl"]),
            "x",
            goals.get("memory"),
            "max",
        ),
        *(compare_off(name, rates, memory, runs) if "off" in runs else ()),
        repeated(f"{name}: difference of the losses", losses, "", 1e-5, "max"),
        repeated(f"{name}: difference of the gradients' norms", norms, "", 1e-5, "max"),
        repeated(f"{name}: CPU time, TRL to Hone", ratios(cpu["trl"], cpu["hone"]), "x"),
        *[repeated(f"{name}: {side} tokens per second", rates[side], "/s") for side in runs],
        *[repeated(f"{name}: {side} peak memory", memory[side], "MiB") for side in runs],
    ]


def compare_off(
    name: str, rates: dict[str, list[float]], memory: dict[str, list[float]], runs: Runs
) -> list[Figure]:
    """Returns the figures of Hone relative to Hone without shared prefixes."""
    speeds = ratios(rates["hone"], rates["off"])
    promised = middle(runs["off"], "body_tokens") / middle(runs["hone"], "body_tokens")
    of_promise = [speed / promised for speed in speeds]
    losses = [
        abs(on["loss"] - off["loss"]) for on, off in zip(runs["hone"], runs["off"], strict=True)
    ]
    goal = MIN_UNSHARED if promised < 1.01 else MIN_OF_PROMISED
    return [
        repeated(
            f"{name}: speed, Hone to off, as a share of {promised:.2f} x", of_promise, "", goal
        ),
        repeated(f"{name}: speed, Hone to off", speeds, "x"),
        repeated(f"{name}: peak memory, Hone to off", ratios(memory["hone"], memory["off"]), "x"),
        repeated(f"{name}: difference of the losses, Hone to off", losses, "", 1e-5, "max"),
    ]


def breakdown(runs: Runs) -> str:
    """Returns the table of seconds by part of the step, and of the tokens of each kind."""
    rows = []
    for side, all_runs in runs.items():
        m = {key: middle(all_runs, key) for key in all_runs[0]}
        rest_s = m["seconds"] - m["head_forward_s"] - m["head_backward_s"]
        seconds = (m["seconds"], m["head_forward_s"], m["head_backward_s"], rest_s)
        counts = (
            m["micro_batches"],
            m["body_tokens"],
            m["num_tokens"],
            m["head_positions"],
            m["num_completion_tokens"],
        )
        rows.append(
            (side, *(f"{value:.2f}" for value in seconds), *(f"{value:.0f}" for value in counts))
        )
    header = (
        "side",
        "step s",
        "head forward",
        "head backward",
        "body, loss",
        "micro-batches",
        "tokens run",
    )
    return table(rows, (*header, "of them real", "positions scored", "completion tokens"))


def middle(runs: list[dict[str, Any]], key: str) -> float:
    return median(run[key] for run in runs)


if __name__ == "__main__":
    sys.exit(main())
