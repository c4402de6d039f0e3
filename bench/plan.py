"""What `hone plan` says of the trainer's memory beside what the trainer takes.

    python -m bench.plan [--quick] [--only LoRA]

One figure is a ratio, planned to measured, of one job: the peak of a rank of the trainer, in a
process of its own, above what it held before the model was loaded (the interpreter, torch and
DeepSpeed). The rank loads a random model of Qwen2.5's shape (39 million parameters, vocabulary
32,000), as a job's, and does two updates: one of short sequences, from which on there are Adam's
moments, and one of two micro-batches that are full to the last token. On this machine's CPU, so the
peak is the process's largest resident size, with memory given back as where it is short
(`services/trainer/zero/host_memory.py`). What the numbers say of a GPU follows as far as the
same tensors are there. The goal of each is 0.8 to 1.2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.plan_side import ROWS, SHARED, TOKENS, write_model
from bench.report import Figure, finish, table
from bench.side import run

CASES: dict[str, dict[str, Any]] = {
    "ZeRO-2, float32": {},
    "ZeRO-2, bfloat16": {"training": {"dtype": "bfloat16"}},
    "without gradient checkpointing": {"memory": {"gradient_checkpointing": False}},
    "ZeRO-0": {"memory": {"zero_stage": 0}},
    "ZeRO-0, a sequence at a time": {
        "memory": {"zero_stage": 0, "micro_batch_tokens": TOKENS // ROWS}
    },
    "a prompt of half the tokens, shared": {SHARED: TOKENS // 2},
    "the same without gradient checkpointing": {
        SHARED: TOKENS // 2,
        "memory": {"gradient_checkpointing": False},
    },
    "ZeRO-3": {"memory": {"zero_stage": 3}},
    "reference model": {"training": {"beta": 0.01}},
    "LoRA": {"lora": {"rank": 16}},
    "LoRA without gradient checkpointing": {
        "lora": {"rank": 16},
        "memory": {"gradient_checkpointing": False},
    },
}
"""What each changes of a job with ZeRO-2 in float32. In small micro-batches the update decides."""
LIMIT_S = 600.0

PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "logits", "update")
PARTS += ("buffers", "overhead")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the first two: about a minute")
    parser.add_argument("--only", choices=CASES, help="this job alone")
    args = parser.parse_args()
    cases = {args.only: CASES[args.only]} if args.only else CASES
    if args.quick:
        cases = dict(list(cases.items())[:2])
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        results = {
            name: run("bench.plan_side", folder, json.dumps(case), limit_s=LIMIT_S)
            for name, case in cases.items()
        }
    print(f"\nMiB, micro-batches of {TOKENS} tokens\n{rows(results)}\n")
    figures = [figure for name, found in results.items() for figure in figures_of(name, found)]
    return finish("plan", figures, cases=cases, runs=results)


def figures_of(name: str, found: dict[str, Any]) -> list[Figure]:
    """Returns the ratio of a job, once with the goal that it reaches and once with that it does not
    exceed."""
    ratio = found["planned_mib"] / found["measured_mib"]
    return [
        Figure(f"{name}: planned to measured, at least", ratio, "x", 0.8, "min"),
        Figure(f"{name}: planned to measured, at most", ratio, "x", 1.2, "max"),
    ]


def rows(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of what was planned, part by part, and what was measured at which
    moment."""
    cells = [
        (
            name,
            *(f"{found['parts'][part]:.0f}" for part in PARTS),
            f"{found['planned_mib']:.0f}",
            f"{found['measured_mib']:.0f}",
            f"{found['loaded_mib']:.0f}",
            f"{found['settled_mib']:.0f}",
        )
        for name, found in results.items()
    ]
    header = ("job", *PARTS, "planned", "measured", "loaded", "after a step")
    return table(cells, header)


if __name__ == "__main__":
    sys.exit(main())
