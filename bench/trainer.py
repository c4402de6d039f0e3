"""Hone's forward and backward passes side by side with TRL's own, on the same model and the same
sequences.

    python -m bench.trainer [--quick | --real] [--repeats 5]      (TRL is in the extra `dev`)

One measurement is a step without its optimizer: the passes over the batch, as each side cuts it
into micro-batches, up to the gradient of every weight. The model is random, in float32, on this
machine's CPU, with the architecture of Qwen2.5. Tokens per second count prompt and completion
tokens, without padding.

In the first three tasks most of the time goes to the output head, the loss and the batching.
`equal lengths` needs no padding: the sides differ in the head, the shared prompt and the passes. In
the next two, groups of 8 share a prompt and completions have log-normal lengths, so much of the
difference is TRL's padding. A third of the measured speed, or more than half of TRL's peak memory,
misses a goal.

The workloads resemble common training data: mathematics, code after a long prompt, few-shot
prompts, conversations, with 40 M parameters and a small vocabulary, so that most of the time goes
to the body. Hone is also compared with itself under `memory.shared_prefix = "off"`, which packs the
same sequences without padding. The goal is 0.85 of the ratio of computed tokens. In the last
workload nothing is shared, and sharing may cost 3 % at most.

The settings of each side:

- TRL: `GRPOTrainer` with its default of 8 sequences per micro-batch, its own `_compute_loss`,
  entropies and metrics included, padded as it pads. Its head is `ChunkedLogProbFunction` on its
  path without Triton, which it takes wherever there is no GPU: these ratios say nothing about GPUs.
- Hone: a token budget equal to one such micro-batch; `Policy`, loss and metrics as an update
  calls them, `chunk_tokens` and `shared_prefix` at their defaults.
- Neither: gradient checkpointing (TRL's default is on), bfloat16, a reference model.

With `--real` SmolLM2-135M-Instruct takes whole steps, the optimizer's included, in Hone's trainer
and in plain transformers with torch's AdamW (`plain_side.py`), which computes each prompt for each
completion. The figure is tokens through the model per second: 1 says that Hone's own code costs
nothing, and what sharing saves comes on top. Plain transformers has the faster of two sizes of
micro-batches, no gradient checkpointing, and the logits of all positions; Hone has its defaults,
and the logits of completions.

Each measurement is a process of its own, and a ratio is taken within a repeat. Peak memory is the
process's largest resident size during the step less its size before. All sides compute the same
step, so losses are compared too, and gradients with TRL's. The last figures simulate how long
ranks wait for one another (`trainer_ranks.py`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from itertools import product
from statistics import median
from typing import Any

from bench import trainer_ranks
from bench.plan_side import AS_SET, REPEATS, STEP
from bench.report import Figure, finish, in_turns, options, ratios, repeated, table
from bench.side import run
from bench.trainer_side import Task
from deploy.real_model import fetch

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


VARIED = Task(vocab_size=32_000, num_prompts=2)
TASKS = {
    "equal lengths": replace(VARIED, prompt=(64, 64), completion=128, spread=0),
    "32k": VARIED,
    "152k": replace(VARIED, vocab_size=152_000),
}
WORKLOADS = {
    "math 128/512 x 16": workload(128, 512, 16),
    "code 512/256 x 8": workload(512, 256, 8),
    "few-shot 1,024/128 x 8": workload(100, 128, 8, num_prompts=2, in_common=924),
    "agent 3,072/256 x 8": workload(3072, 256, 8),
    "nothing shared": workload(256, 256, 1, num_prompts=8),
}
"""Tasks in which Hone is also compared with itself: prompt / completion x group."""

GOALS = {"equal lengths": (1.5, 0.5), "32k": (3.5, 0.5), "152k": (4.0, 0.5)}
"""Hone relative to TRL: least tokens per second, and most peak memory."""

MIN_OF_PROMISED, MIN_UNSHARED = 0.85, 0.97
"""Least speed relative to `off`, divided by the ratio of computed tokens: with shared prefixes, and
without any."""

COLUMNS = {
    "seconds": "step s",
    "head_forward_s": "head forward",
    "head_backward_s": "head backward",
    "micro_batches": "micro-batches",
    "body_tokens": "tokens run",
    "num_tokens": "of them real",
    "head_positions": "positions scored",
    "num_completion_tokens": "completion tokens",
}
"""The columns of the table of seconds per part, by the key of a measurement."""

REAL_STEPS = ((24, 8, 37, 8), (8, 8, 37, 128))
"""Groups, completions of each, and tokens of a prompt and of a completion."""

PLAIN_TOKENS = (512, 2048)
MIN_OF_PLAIN = 0.9

LIMIT_S = 1800.0
SIDES = ("hone", "trl")
Runs = dict[str, list[dict[str, Any]]]


def main() -> int:
    quick = "only `equal lengths`: about four minutes"
    parser = options(__doc__, repeats=5, quick=quick)
    parser.add_argument("--real", action="store_true", help="beside plain transformers instead")
    args = parser.parse_args()
    if args.real:
        return measure_real(args.repeats)
    tasks = dict(list(TASKS.items())[:1]) if args.quick else TASKS | WORKLOADS
    results = {
        name: alternate(task, args.repeats, ("hone", "off", "trl") if name in WORKLOADS else SIDES)
        for name, task in tasks.items()
    }
    for name, runs in results.items():
        print(f"\n{name}: where the time goes (medians of {args.repeats})\n{breakdown(runs)}\n")
    figures = [figure for name, runs in results.items() for figure in compare(name, runs)]
    figures += trainer_ranks.figures()
    sizes = {name: asdict(task) for name, task in tasks.items()}
    return finish("trainer", figures, repeats=args.repeats, tasks=sizes, runs=results)


def measure_real(repeats: int) -> int:
    folder = str(fetch())
    figures: list[Figure] = []
    results: dict[str, Runs] = {}
    for sizes, dtype in product(REAL_STEPS, ("float32", "bfloat16")):
        step = dict(zip(("groups", "group_size", "prompt", "completion"), sizes, strict=True))
        case = {STEP: step, AS_SET: True, REPEATS: 1, "training": {"dtype": dtype}}
        sides: dict[str, tuple[str, ...]] = {"hone": ("bench.plan_side", folder, json.dumps(case))}
        for tokens in PLAIN_TOKENS:
            given = (folder, dtype, str(tokens), json.dumps(step))
            sides[f"plain {tokens}"] = ("bench.plain_side", *given)
        runs: Runs = {side: [] for side in sides}
        for side in in_turns(sides, repeats):
            runs[side].append(run(*sides[side], limit_s=LIMIT_S))
        name = f"{' x '.join(map(str, sizes))}, {dtype}"
        rates = {side: [one["num_tokens"] / one["train_s"] for one in runs[side]] for side in runs}
        plain = [
            max(pair)
            for pair in zip(*(rates[side] for side in sides if side != "hone"), strict=True)
        ]
        of_plain = ratios(rates["hone"], plain)
        figures.append(
            repeated(f"{name}: tokens per second, Hone to plain", of_plain, "x", MIN_OF_PLAIN)
        )
        figures += [repeated(f"{name}: {side}, tokens/s", rates[side], "/s") for side in rates]
        results[name] = runs
    return finish("trainer", figures, repeats=repeats, runs=results)


def alternate(task: Task, repeats: int, sides: tuple[str, ...]) -> Runs:
    """Returns each side's measurements."""
    runs: Runs = {side: [] for side in sides}
    given = json.dumps(asdict(task))
    for side in in_turns(sides, repeats):
        runs[side].append(run("bench.trainer_side", side, given, limit_s=LIMIT_S))
    return runs


def compare(name: str, runs: Runs) -> list[Figure]:
    """Returns the figures of one task; figures with a goal come first."""
    min_speed, max_memory = GOALS.get(name, (None, None))
    rates = {side: [run["num_tokens"] / run["seconds"] for run in runs[side]] for side in runs}
    memory = {side: [run["peak_bytes"] / 2**20 for run in runs[side]] for side in runs}
    cpu = {side: [run["cpu_s"] for run in runs[side]] for side in runs}
    pairs = list(zip(runs["hone"], runs["trl"], strict=True))
    speeds, sizes = ratios(rates["hone"], rates["trl"]), ratios(memory["hone"], memory["trl"])
    losses = [abs(hone["loss"] - trl["loss"]) for hone, trl in pairs]
    norms = [abs(hone["grad_norm"] / trl["grad_norm"] - 1) for hone, trl in pairs]
    return [
        repeated(f"{name}: tokens per second, Hone to TRL", speeds, "x", min_speed),
        repeated(f"{name}: peak memory, Hone to TRL", sizes, "x", max_memory, "max"),
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
    pairs = zip(runs["hone"], runs["off"], strict=True)
    losses = [abs(on["loss"] - off["loss"]) for on, off in pairs]
    share = f"{name}: speed, Hone to off, as a share of {promised:.2f} x"
    goal = MIN_UNSHARED if promised < 1.01 else MIN_OF_PROMISED
    return [
        repeated(share, of_promise, "", goal),
        repeated(f"{name}: speed, Hone to off", speeds, "x"),
        repeated(f"{name}: peak memory, Hone to off", ratios(memory["hone"], memory["off"]), "x"),
        repeated(f"{name}: difference of the losses, Hone to off", losses, "", 1e-5, "max"),
    ]


def breakdown(runs: Runs) -> str:
    """Returns the table of seconds by part of the step, and of the tokens of each kind."""
    rows = [
        (side, *(f"{middle(of_side, key):.6g}" for key in COLUMNS))
        for side, of_side in runs.items()
    ]
    return table(rows, ("side", *COLUMNS.values()))


def middle(runs: list[dict[str, Any]], key: str) -> float:
    return median(run[key] for run in runs)


if __name__ == "__main__":
    sys.exit(main())
