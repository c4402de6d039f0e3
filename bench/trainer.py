"""Hone's forward and backward passes side by side with TRL's own, on the same model and the same
sequences.

    python -m bench.trainer [--quick] [--repeats 3]      (TRL is in the extra `dev`)

One figure is a step: the batch's passes, as each side cuts it into micro-batches, up to the
gradient of every weight; no optimizer. The model is random, of Qwen2.5's shape with a small body
(so what is compared is mostly the output head, the loss and the batching, which are what differs),
float32, on this machine's CPU. Sequences are groups of 8 with a prompt in common and completions of
log-normal lengths. Tokens per second count prompt and completion tokens, without padding.

What each side is given:

- TRL: `GRPOTrainer` with its defaults of 8 sequences a micro-batch and its own tiles in the output head, its own `_compute_loss`,
  entropies and metrics included. Padded as it pads: the whole batch to its longest prompt and longest completion.
- Hone: a token budget equal to one of those micro-batches; `Policy`, loss and metrics as an update calls them, `chunk_tokens` at
  its default; padded, not packed.
- Neither: gradient checkpointing (TRL's default is on), bfloat16, a reference model. On a GPU, TRL scores only completion
  tokens, with Triton kernels; on a CPU, where this runs, every position of the padded rows. So these ratios are of CPUs.

Each measurement is a process of its own, the sides alternate, and figures are medians. Peak memory
is the process's largest resident size during the step less that before it. Losses and gradients of
both are compared too: it is the same step. A last task, `same length`, has nothing to pad: what is
left there is the head's and the passes' own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from bench.report import Figure, finish, table
from bench.trainer_side import Task

GOALS = {"speed": 1.3, "memory": 0.5}
LIMIT_S = 1800.0
Runs = dict[str, list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer sequences, one repeat, no `same length`: about two minutes",
    )
    parser.add_argument("--repeats", type=int, help="default: 3, or 1 with --quick")
    args = parser.parse_args()
    num_prompts, repeats = (2, args.repeats or 1) if args.quick else (4, args.repeats or 3)
    tasks = {
        f"{vocab // 1000}k": Task(vocab_size=vocab, num_prompts=num_prompts)
        for vocab in (32_000, 152_000)
    }
    if not args.quick:
        tasks["same length"] = replace(tasks["32k"], same_length=True)
    results = {name: alternate(task, repeats) for name, task in tasks.items()}
    for name, runs in results.items():
        print(f"\n{name}: where the time goes (medians of {repeats})\n{breakdown(runs)}\n")
    figures = [figure for name, runs in results.items() for figure in compare(name, runs)]
    sizes = {name: asdict(task) for name, task in tasks.items()}
    return finish("trainer", figures, repeats=repeats, tasks=sizes, runs=results)


def alternate(task: Task, repeats: int) -> Runs:
    """Returns each side's measurements; which one goes first changes from one repeat to the
    next."""
    runs: Runs = {"hone": [], "trl": []}
    for repeat in range(repeats):
        for side in sorted(runs, reverse=bool(repeat % 2)):
            runs[side].append(run(side, task))
    return runs


def run(side: str, task: Task) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.trainer_side", side, json.dumps(asdict(task))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, runs: Runs) -> list[Figure]:
    """Returns the figures of one task, those with a goal first."""
    hone, trl = (
        {key: middle(runs[side], key) for key in runs[side][0]} for side in ("hone", "trl")
    )
    goals = GOALS if name != "same length" else {}
    memory_goal = goals.get("memory") if name == "152k" else None
    rates = {side: of["num_tokens"] / of["seconds"] for side, of in (("hone", hone), ("trl", trl))}
    return [
        Figure(
            f"{name}: tokens per second, Hone to TRL",
            rates["hone"] / rates["trl"],
            "x",
            goals.get("speed"),
        ),
        Figure(
            f"{name}: peak memory, Hone to TRL",
            hone["peak_bytes"] / trl["peak_bytes"],
            "x",
            memory_goal,
            "max",
        ),
        Figure(
            f"{name}: difference of the losses", abs(hone["loss"] - trl["loss"]), "", 1e-5, "max"
        ),
        Figure(
            f"{name}: difference of the gradients' norms",
            abs(hone["grad_norm"] / trl["grad_norm"] - 1),
            "",
            1e-5,
            "max",
        ),
        Figure(f"{name}: CPU time, TRL to Hone", trl["cpu_s"] / hone["cpu_s"], "x"),
        *[Figure(f"{name}: {side} tokens per second", rate, "/s") for side, rate in rates.items()],
        *[
            Figure(f"{name}: {side} peak memory", of["peak_bytes"] / 2**20, "MiB")
            for side, of in (("hone", hone), ("trl", trl))
        ],
    ]


def breakdown(runs: Runs) -> str:
    """Returns the table of where the time goes, and of how much was computed to no end."""
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
