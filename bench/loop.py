"""Times whole GRPO steps of Hone and of TRL's `GRPOTrainer` on one machine.

    python -m bench.loop [--models 0.6M,40M,few-0.6M,few-40M] [--steps 4] [--repeats 3]

(TRL is in the extra `dev`.)

A figure is samples per second over whole steps: sampling, grading, the update, and the new weights
where the next step samples. Hone is a job on the stack that `hone up` starts, with two samplers: on
two cores they sample faster than one with two threads. It writes each group and batch to disk
before it trains on them and verifies weights by digest and canary. TRL is one process that stores
nothing. It runs twice: with the generation of transformers, and with vLLM colocated
(`vllm_mode="colocate"`), the same wheel that Hone has.

Both sides have the same random model, prompts, groups of 8 and completions of 64 tokens exactly
(nothing ends them, and prompts have one length, so TRL pads nothing), float32, loss "dapo" with the
same bounds, no reference model, AdamW at a constant learning rate, one optimizer step per batch in
one micro-batch, no gradient checkpointing, the same Python reward. Hone trains with `max_staleness`
0 and calls its reward in the sandbox. TRL's correction for vLLM's log-probs is off, which saves it
a forward pass: Hone's is off too at staleness 0. Hone also trains with `max_staleness` 1, where the
next step is sampled while this one trains, with its correction on; TRL has nothing like it.

The sides take turns, and only one works at a time; none spins while it waits
(`OMP_WAIT_POLICY=PASSIVE`). The first step of a turn is not counted, nor is Hone's last one, which
writes a checkpoint. A ratio is taken within a repeat, and the figure is the median of the repeats.
From Hone's own step metrics is the share of its steps that is neither generation, grading, training
nor sync. A side of TRL's that cannot run is left out, with its last line.

The tasks `few-...` have prompts as long as GSM8K's questions behind four worked examples: in words
and marks a question of its training rows has 53 in the mean and its answer 99, so 608 tokens come
before a question. Hone computes them once for all prompts, and each question once for its group.
TRL has micro-batches of 8 sequences there, its default, because all of them would not fit.

The upper bound of the ratio is shown too: as if a step were only the products of its tokens with
the model's weights, at the rate of one such product alone.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.grpo import (
    AHEAD,
    GENERATIONS,
    HONE,
    STAGES,
    Turn,
    Turns,
    better_trl,
    breakdown,
    take_turns,
)
from bench.report import Figure, count, finish, names, options, ratios, repeated
from bench.side import random_model
from bench.trl_side import Recipe
from deploy.machine import exit_on_signals

NUM_PROBLEMS = 2048

REWARD = '''\
def reward(completions, **_):
    """The share of digits in a completion."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
'''


@dataclass(frozen=True, kw_only=True)
class Task(Recipe):
    """A model of Qwen2's shape, and the steps of its training. Every prompt has the same length,
    and every completion `max_tokens`: the token that would end it is beyond the vocabulary. All
    prompts begin with the same `worked` tokens of examples, before a question of `question`;
    without, a prompt is a sum."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    worked: int = 0
    question: int = 0

    @property
    def longest(self) -> int:
        """The tokens of a prompt with its completion."""
        return 512 if not self.worked else self.worked + self.question + self.max_tokens + 8


TASKS = {
    "0.6M": Task(num_layers=4, hidden_size=128, intermediate_size=256, num_prompts=16),
    "40M": Task(num_layers=12, hidden_size=512, intermediate_size=1664, num_prompts=4),
}
TASKS |= {
    f"few-{name}": replace(task, worked=608, question=53, rows=8) for name, task in TASKS.items()
}

STALENESS = {HONE: 0, AHEAD: 1}
"""Hone's sides, and the `max_staleness` of their jobs."""

MOST_OVERHEAD = 0.05
NUM_PRODUCTS = 50
LEAST_RATIO = {"0.6M": 2.0, "40M": 2.0, "few-0.6M": 1.5, "few-40M": 3.0}


def main() -> int:
    parser = options(__doc__, repeats=3)
    models = ["0.6M", "40M"]
    parser.add_argument("--models", type=names(TASKS), default=models, help="default: 0.6M,40M")
    parser.add_argument("--steps", type=count, default=4, help="that count, in a turn (default: 4)")
    args = parser.parse_args()
    exit_on_signals(signal.SIGTERM)  # so that the stack is stopped too
    figures: list[Figure] = []
    facts: dict[str, Any] = {"steps": args.steps, "repeats": args.repeats}
    facts |= {"tasks": {}, "turns": {}, "missing": {}}
    for name in args.models:
        task = TASKS[name]
        with tempfile.TemporaryDirectory() as folder:
            num_parameters = write_task(Path(folder), task)
            turns, missing = take_turns(
                Path(folder), task, STALENESS, args.steps, args.repeats, samplers=2
            )
        check(task, turns)
        least_s = products_s(task, num_parameters)
        for side, why in missing.items():
            print(f"{name}: {side} could not run: {why}")
        print(f"\n{name}: seconds of a step (medians of {args.repeats})\n{breakdown(turns)}\n")
        figures += compare(name, task, turns, least_s)
        sizes = {"num_parameters": num_parameters, "products_s": least_s}
        facts["tasks"][name] = asdict(task) | sizes
        facts["missing"] |= missing
        facts["turns"][name] = {side: [asdict(one) for one in turns[side]] for side in turns}
    return finish("loop", figures, **facts)


def check(task: Task, turns: Turns) -> None:
    """Raises ValueError if a side sampled or trained another number of tokens than the others."""
    for side, of_side in turns.items():
        for step in (step for turn in of_side for step in turn.steps):
            found = (step.num_trained, step.mean_length)
            if found != (task.num_samples, task.max_tokens):
                raise ValueError(
                    f"{side} trained on {found[0]} completions of {found[1]:g} tokens, expected "
                    f"{task.num_samples} of {task.max_tokens}"
                )


# --- the model and its problems ------------------------------------------------------------------


def write_task(folder: Path, task: Task) -> int:
    """Writes the model, with random weights in float32, `train.jsonl` and `reward.py`. Returns how
    many parameters the model has."""
    from transformers import GenerationConfig

    from deploy.tiny_model import PAD_ID, make_tokenizer

    tokenizer: Any = make_tokenizer()
    tokenizer.model_max_length = task.longest
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    ends = {"pad_token_id": PAD_ID, "eos_token_id": tokenizer.eos_token_id}
    model = random_model(
        task.hidden_size,
        vocab_size=tokenizer.eos_token_id,
        intermediate_size=task.intermediate_size,
        num_hidden_layers=task.num_layers,
        max_position_embeddings=task.longest,
        tie_word_embeddings=False,
        **ends,
    )
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in _prompts(task))
    )
    (folder / "reward.py").write_text(REWARD)
    return model.num_parameters()


def _prompts(task: Task) -> list[str]:
    rng = random.Random(0)
    if not task.worked:
        return [f"{rng.randint(10, 99)}+{rng.randint(10, 99)}=" for _ in range(NUM_PROBLEMS)]

    def text(length: int) -> str:
        return "".join(rng.choices("0123456789+-*", k=length))

    examples = text(task.worked)
    return [f"{examples}{text(task.question)}" for _ in range(NUM_PROBLEMS)]


# --- figures -------------------------------------------------------------------------------------


def compare(name: str, task: Task, turns: Turns, least_s: float) -> list[Figure]:
    """Returns the figures of one model, those with a goal first."""
    rates = {
        side: [task.num_samples / turn.step_s for turn in of_side]
        for side, of_side in turns.items()
    }
    trls = [side for side in GENERATIONS if side in rates]
    better = [task.num_samples / step_s for step_s in better_trl(turns)]
    to_trl, ahead = ratios(rates[HONE], better), ratios(rates[AHEAD], better)
    most = [task.num_samples / least_s / rate for rate in better]
    least = LEAST_RATIO[name]
    overheads = [overhead(turn) for turn in turns[HONE]]
    return [
        repeated(f"{name}: samples per second, Hone to the better TRL", to_trl, "x", least),
        repeated(f"{name}: share of a step beside its work", overheads, "", MOST_OVERHEAD, "max"),
        repeated(f"{name}: {AHEAD}, to the better TRL", ahead, "x"),
        repeated(f"{name}: only the products of a step, to the better TRL", most, "x"),
        *[
            repeated(f"{name}: Hone to {side}", ratios(rates[HONE], rates[side]), "x")
            for side in trls
        ],
        *[repeated(f"{name}: {side}", rates[side], "samples/s") for side in rates],
    ]


def products_s(task: Task, num_parameters: int) -> float:
    """Returns the seconds that the products of a step's completion tokens with the weights take on
    this machine, in float32: 2 operations per token and weight to sample them, and 6 to train on
    them (arXiv 2001.08361, 2.1)."""
    num_tokens = task.num_samples * task.max_tokens
    rate = product_rate(num_tokens, task.hidden_size, task.intermediate_size)
    return 8 * num_parameters * num_tokens / rate


def product_rate(num_tokens: int, hidden_size: int, intermediate_size: int) -> float:
    """Returns the operations per second of a float32 product of a model's own shape."""
    import torch

    tokens = torch.randn(num_tokens, hidden_size)
    weights = torch.randn(hidden_size, intermediate_size)
    seconds = []
    for _ in range(NUM_PRODUCTS):
        began = time.perf_counter()
        torch.mm(tokens, weights)
        seconds.append(time.perf_counter() - began)
    return 2 * num_tokens * weights.numel() / min(seconds)


def overhead(turn: Turn) -> float:
    """Returns the share of Hone's steps that is neither generation, grading, training nor sync."""
    return 1 - sum(turn.stage_s(stage) for stage in STAGES) / turn.step_s


if __name__ == "__main__":
    sys.exit(main())
