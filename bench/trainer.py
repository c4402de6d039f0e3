"""Hone's forward and backward passes side by side with TRL's own, on the same model and the same
sequences.

    python -m bench.trainer [--quick] [--repeats 5]      (TRL is in the extra `dev`)

One figure is a step: the batch's passes, as each side cuts it into micro-batches, up to the
gradient of every weight; no optimizer. The model is random, of Qwen2.5's shape with a small body
(so what is compared is mostly the output head, the loss and the batching, which are what differs),
float32, on this machine's CPU. Tokens per second count prompt and completion tokens, without
padding.

The first task, `equal lengths`, has nothing to pad: what differs there is the head's and the
passes' own. In the other two sequences are groups of 8 with a prompt in common and completions of
log-normal lengths, and most of the difference is TRL's padding.

What each side is given:

- TRL: `GRPOTrainer` with its defaults of 8 sequences per micro-batch, its own `_compute_loss`,
  entropies and metrics included. Padded as it pads: the whole batch to its longest prompt and
  longest completion. Its head is `ChunkedLogProbFunction` on its path without Triton, plain torch
  tiles over every position of the padded rows, which it takes wherever there is no GPU. With
  Triton it is another program: these ratios say nothing of GPUs.
- Hone: a token budget equal to one such micro-batch; `Policy`, loss and metrics as an update
  calls them, `chunk_tokens` at its default; padded, not packed.
- Neither: gradient checkpointing (TRL's default is on), bfloat16, a reference model.

Each measurement is a process of its own, and the sides alternate. A figure is the median of the
repeats with the lowest and the highest; a ratio is taken within each repeat. Peak memory is the
process's largest resident size during the step less that before it. Losses and gradients of both
are compared too: it is the same step. Goals are set so that a threefold loss of speed, or three
times the memory, would miss them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.report import Figure, finish, ratios, repeated, table
from bench.side import run
from bench.trainer_side import Task

TASKS = {
    "equal lengths": Task(vocab_size=32_000, num_prompts=2, same_length=True),
    "32k": Task(vocab_size=32_000, num_prompts=2),
    "152k": Task(vocab_size=152_000, num_prompts=2),
}
"""In the order of the report."""

GOALS = {
    "equal lengths": {"speed": 1.5, "memory": 0.5},
    "32k": {"speed": 3.5, "memory": 0.5},
    "152k": {"speed": 4.0, "memory": 0.5},
}
"""Hone to TRL: tokens per second at least, peak memory at most."""

LIMIT_S = 1800.0
Runs = dict[str, list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="only `equal lengths`: about four minutes"
    )
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    args = parser.parse_args()
    tasks = dict(list(TASKS.items())[:1]) if args.quick else TASKS
    results = {name: alternate(task, args.repeats) for name, task in tasks.items()}
    for name, runs in results.items():
        print(f"\n{name}: where the time goes (medians of {args.repeats})\n{breakdown(runs)}\n")
    figures = [figure for name, runs in results.items() for figure in compare(name, runs)]
    sizes = {name: asdict(task) for name, task in tasks.items()}
    return finish("trainer", figures, repeats=args.repeats, tasks=sizes, runs=results)


def alternate(task: Task, repeats: int) -> Runs:
    """Returns each side's measurements; which one goes first changes from one repeat to the
    next."""
    runs: Runs = {"hone": [], "trl": []}
    for repeat in range(repeats):
        for side in sorted(runs, reverse=bool(repeat % 2)):
            given = json.dumps(asdict(task))
            runs[side].append(run("bench.trainer_side", side, given, limit_s=LIMIT_S))
    return runs


def compare(name: str, runs: Runs) -> list[Figure]:
    """Returns the figures of one task, those with a goal first."""
    goals = GOALS[name]
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
            goals["speed"],
        ),
        repeated(
            f"{name}: peak memory, Hone to TRL",
            ratios(memory["hone"], memory["trl"]),
            "x",
            goals["memory"],
            "max",
        ),
        repeated(f"{name}: difference of the losses", losses, "", 1e-5, "max"),
        repeated(f"{name}: difference of the gradients' norms", norms, "", 1e-5, "max"),
        repeated(f"{name}: CPU time, TRL to Hone", ratios(cpu["trl"], cpu["hone"]), "x"),
        *[repeated(f"{name}: {side} tokens per second", rates[side], "/s") for side in runs],
        *[repeated(f"{name}: {side} peak memory", memory[side], "MiB") for side in runs],
    ]


def breakdown(runs: Runs) -> str:
    """Returns the table of where the time goes, and of how many tokens were padding."""
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
