"""Compares the trainer's memory as planned by `hone plan` with the measured memory.

    python -m bench.plan [--quick] [--real | --only LoRA]

One figure is a ratio, planned to measured, of one job: the peak of a rank of the trainer, in a
process of its own, above what it held before the model was loaded (the interpreter, torch and
DeepSpeed). The rank does two updates: one of a few short sequences, from which on there are Adam's
moments, and a whole one. It runs on this machine's CPU, so the peak is the process's largest
resident size. The numbers hold for a GPU as far as it has the same tensors. The goal of each is 0.8
to 1.2.

Without `--real` the model is a random one of Qwen2.5's shape (39 million parameters, vocabulary
32,000), and the last update has two micro-batches that are full to the last token. With it the
model is SmolLM2-135M-Instruct, and its steps are groups of 8 whose prompt is computed once. Memory
is given back as where it is short (`services/trainer/zero/host_memory.py`), which a plan assumes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.plan_side import STEP, TOKENS, write_model
from bench.report import Figure, finish, options, table
from bench.side import run
from deploy.real_model import fetch

PLAIN = {"gradient_checkpointing": False}
CASES: dict[str, dict[str, Any]] = {
    "ZeRO-2, float32": {},
    "ZeRO-2, bfloat16": {"training": {"dtype": "bfloat16"}},
    "without gradient checkpointing": {"memory": PLAIN},
    "ZeRO-0": {"memory": {"zero_stage": 0}},
    "ZeRO-0, a sequence at a time": {
        "memory": {"zero_stage": 0, "micro_batch_tokens": TOKENS // 4}
    },
    "ZeRO-3": {"memory": {"zero_stage": 3}},
    "reference model": {"training": {"beta": 0.01}},
    "LoRA": {"lora": {"rank": 16}},
    "LoRA without gradient checkpointing": {"lora": {"rank": 16}, "memory": PLAIN},
}
"""The changes of each case to a job with ZeRO-2 in float32. With few tokens the update is the
peak."""

STEPS: dict[str, dict[str, int]] = {
    "24 x 8 x 8": {"groups": 24, "group_size": 8, "prompt": 37, "completion": 8},
    "8 x 8 x 128": {"groups": 8, "group_size": 8, "prompt": 37, "completion": 128},
}
REAL: dict[str, dict[str, Any]] = {
    f"{size}, {dtype}{'' if checkpoints else ', without checkpointing'}": {
        STEP: step,
        "training": {"dtype": dtype},
        "memory": {"gradient_checkpointing": checkpoints},
    }
    for size, step in STEPS.items()
    for dtype in ("float32", "bfloat16")
    for checkpoints in (True, False)
    if checkpoints or (size, dtype) != ("8 x 8 x 128", "float32")
}
"""Jobs of SmolLM2-135M-Instruct: groups x completions x tokens of each, after prompts of 37. The
combination that is left out takes 14 GiB, more than a laptop has free."""
LIMIT_S = 1200.0

PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "logits", "update")
PARTS += ("buffers", "overhead")
COLUMNS = {
    "planned_mib": "planned",
    "measured_mib": "measured",
    "loaded_mib": "loaded",
    "settled_mib": "after a step",
    "train_s": "update, s",
}


def main() -> int:
    parser = options(__doc__, quick="only the first two: about a minute")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--real", action="store_true", help="jobs of SmolLM2-135M-Instruct")
    which.add_argument("--only", choices=[*CASES, *REAL], metavar="JOB", help="this job alone")
    args = parser.parse_args()
    jobs = CASES | REAL
    cases = {args.only: jobs[args.only]} if args.only else REAL if args.real else CASES
    if args.quick:
        cases = dict(list(cases.items())[:2])
    with tempfile.TemporaryDirectory() as written:
        folder = fetch() if cases.keys() <= REAL.keys() else Path(written)
        if str(folder) == written:
            write_model(folder)
        results = {
            name: run("bench.plan_side", str(folder), json.dumps(case), limit_s=LIMIT_S)
            for name, case in cases.items()
        }
    print(f"\nMiB\n{rows(results)}\n")
    figures = [figure for name, found in results.items() for figure in figures_of(name, found)]
    return finish("plan", figures, cases=cases, runs=results)


def figures_of(name: str, found: dict[str, Any]) -> list[Figure]:
    """Returns the ratio of a job twice: with its lower and with its upper goal."""
    ratio = found["planned_mib"] / found["measured_mib"]
    return [
        Figure(f"{name}: planned to measured, at least", ratio, "x", 0.8, "min"),
        Figure(f"{name}: planned to measured, at most", ratio, "x", 1.2, "max"),
    ]


def rows(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of the planned memory, part by part, and of the measured memory at several
    moments."""
    cells = [
        (
            name,
            *(f"{found['parts'][part]:.0f}" for part in PARTS),
            *(f"{found[key]:.{key.endswith('_s'):d}f}" for key in COLUMNS),
        )
        for name, found in results.items()
    ]
    return table(cells, ("job", *PARTS, *COLUMNS.values()))


if __name__ == "__main__":
    sys.exit(main())
