"""One side of `bench.trainer`, in a process of its own: a step's forward and backward passes, by
Hone's parts, with or without shared prefixes, or by TRL's.

    python -m bench.trainer_side hone|off|trl '{"vocab_size": 32768, ...}'

prints one JSON object: seconds, peak memory above the loaded model, the loss, the gradient's norm,
and what was computed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.side import random_model, resident_bytes
from bench.trl_side import CLIP_HIGH, CLIP_LOW, CONFIG
from shared.job import Job
from shared.wire import Example, Logprobs, TokenIds

PAD, EOS = 0, 1


@dataclass(frozen=True)
class Task:
    """The input of all sides. `rows` sequences are one of TRL's micro-batches (its default is 8).
    Each prompt has `prompt` tokens of its own, from the least to the most, after `in_common` tokens
    that all prompts share. Completions have a log-normal length of median `completion` and this
    `spread`, at most `max_tokens`. `shared`: Hone computes a shared prefix once."""

    vocab_size: int
    num_prompts: int
    group_size: int = 8
    rows: int = 8
    hidden_size: int = 256
    num_layers: int = 4
    prompt: tuple[int, int] = (32, 96)
    in_common: int = 0
    completion: int = 90
    spread: float = 0.7
    max_tokens: int = 256
    shared: bool = False
    seed: int = 0


@dataclass
class Work:
    """The work of a side: tokens through the body and positions through the head (forward), the
    seconds in the head, and the micro-batches."""

    body_tokens: int = 0
    head_positions: int = 0
    head_forward_s: float = 0.0
    head_backward_s: float = 0.0
    micro_batches: int = 0


@dataclass(frozen=True)
class Step:
    """A step that is ready to run. `run` adds the step's gradients to the model's and returns its
    loss; `work` counts its work."""

    run: Callable[[], float]
    work: Work = field(default_factory=Work)


def make_model(task: Task) -> Any:
    """Returns a random float32 model of Qwen2.5's architecture, with tied embeddings and a small
    body."""
    return random_model(
        task.hidden_size,
        seed=task.seed,
        vocab_size=task.vocab_size,
        intermediate_size=task.hidden_size * 11 // 2,
        num_hidden_layers=task.num_layers,
        max_position_embeddings=4096,
    ).eval()


def make_examples(task: Task) -> list[Example]:
    """Returns groups that share a prompt. The sampler's log-probs are near a random model's,
    `-log V`, so that ratios are near 1 and some are clipped."""
    random = torch.Generator().manual_seed(task.seed + 1)

    def ids(count: int) -> TokenIds:
        return TokenIds(torch.randint(2, task.vocab_size, (count,), generator=random).tolist())

    examples: list[Example] = []
    least, most = task.prompt
    in_common = [*ids(task.in_common)]
    for _ in range(task.num_prompts):
        drawn = int(torch.randint(least, most + 1, (1,), generator=random))
        prompt = TokenIds([*in_common, *ids(drawn)])
        for _ in range(task.group_size):
            normal = task.spread * float(torch.randn((), generator=random))
            length = int(min(max(task.completion * math.exp(normal), 8), task.max_tokens))
            noise = 0.1 * torch.randn(length, generator=random)
            examples.append(
                Example(
                    prompt_token_ids=prompt,
                    token_ids=ids(length),
                    old_logprobs=Logprobs((noise - math.log(task.vocab_size)).tolist()),
                    advantage=float(torch.randn((), generator=random)),
                )
            )
    return examples


def hone_step(task: Task, model: Any, examples: list[Example]) -> Step:
    """Returns the work of `services/trainer/zero/update.py` between two optimizer steps, without
    DeepSpeed."""
    from services.trainer.learning.batch import plan
    from services.trainer.learning.correction import loss_inputs, resolve
    from services.trainer.learning.head import _Score  # pyright: ignore[reportPrivateUsage]
    from services.trainer.learning.loss import total_loss
    from services.trainer.learning.metrics import StepMetrics
    from services.trainer.learning.model_checks import choose_layout
    from services.trainer.learning.policy import Policy

    budget = task.rows * (longest(examples, "prompt_token_ids") + longest(examples, "token_ids"))
    job = Job.model_validate(
        {
            "name": "bench",
            "model": "random/qwen2",
            "steps": 1,
            "data": {"train": "none"},
            "rewards": [{"grader": "none"}],
            "sampling": {"max_tokens": task.max_tokens},
            "training": {"loss": "dapo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
            "correction": {"ratio_base": "sampler"},
            "memory": {
                "micro_batch_tokens": budget,
                "shared_prefix": "on" if task.shared else "off",
            },
        }
    )
    work = Work()
    correction = resolve(job.correction, 0)
    policy = Policy(model, 1.0)
    layout = choose_layout(model, "random", job.memory).layout
    time_head(_Score, work)

    def run() -> float:
        metrics = StepMetrics(torch.device("cpu"), job.training, correction)
        total = 0.0
        (minibatch,) = plan(examples, None, job, rank=0, num_ranks=1, layout=layout)
        for batch in minibatch.micro_batches:
            logprobs_N, entropies_N = policy(batch)
            x = loss_inputs(
                batch,
                logprobs_N,
                correction=correction,
                denominators=minibatch.denominators,
                spec=job.training,
            )
            loss = total_loss(x)
            metrics.add(batch, x, entropies_N, loss)
            metrics.add_mismatch(batch, logprobs_N.detach())
            loss.backward()
            total += loss.item()
            work.body_tokens += batch.input_ids_BT.numel()
            work.micro_batches += 1
        return total

    return Step(run, work)


def trl_step(task: Task, model: Any, examples: list[Example]) -> Step:
    """Returns TRL's own loss and backward pass for each micro-batch of a generation batch, padded
    as its `_generate_and_score_completions` pads: prompts on the left and completions on the right,
    to the longest of the batch."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    words = Tokenizer(WordLevel({"<pad>": PAD, "<eos>": EOS}, unk_token="<pad>"))
    num_steps = len(examples) // task.rows
    # TRL needs a folder, and writes nothing before it trains.
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=task.rows,
                gradient_accumulation_steps=num_steps,
                num_generations=max(2, task.group_size),  # TRL takes no groups of one
                max_completion_length=task.max_tokens,
                **CONFIG,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * len(examples)}),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
            ),
        )
    trainer.current_gradient_accumulation_steps = num_steps
    model.train()
    inputs = trl_inputs(examples)
    work = Work()
    time_head(ChunkedLogProbFunction, work)

    def run() -> float:
        total = 0.0
        for start in range(0, len(examples), task.rows):
            part = {name: value[start : start + task.rows] for name, value in inputs.items()}
            part["num_items_in_batch"] = inputs["completion_mask"].sum()
            loss = trainer._compute_loss(model, part)
            loss.backward()
            total += loss.item()
            work.body_tokens += part["prompt_ids"].numel() + part["completion_ids"].numel()
            work.micro_batches += 1
        return total

    return Step(run, work)


def trl_inputs(examples: list[Example]) -> dict[str, Tensor]:
    """Returns the generation batch in the form of TRL's trainer."""

    def padded(rows: Sequence[Sequence[Any]], side: str, dtype: torch.dtype) -> Tensor:
        tensors = [torch.tensor(list(row), dtype=dtype) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_side=side)

    prompts, completions = [e.prompt_token_ids for e in examples], [e.token_ids for e in examples]
    return {
        "prompt_ids": padded(prompts, "left", torch.long),
        "prompt_mask": padded([(1,) * len(row) for row in prompts], "left", torch.long),
        "completion_ids": padded(completions, "right", torch.long),
        "completion_mask": padded([(1,) * len(row) for row in completions], "right", torch.long),
        "old_per_token_logps": padded([e.old_logprobs for e in examples], "right", torch.float32),
        "advantages": torch.tensor([e.advantage for e in examples]),
    }


def time_head(function: Any, work: Work) -> None:
    """Makes a head's autograd function add its hidden states (its first argument) and its seconds,
    forward and backward, to `work`."""
    forward, backward = function.forward, function.backward

    def timed_forward(*args: Any) -> Any:
        started = time.perf_counter()
        out = forward(*args)
        work.head_forward_s += time.perf_counter() - started
        work.head_positions += len(args[1])
        return out

    def timed_backward(*args: Any) -> Any:
        started = time.perf_counter()
        out = backward(*args)
        work.head_backward_s += time.perf_counter() - started
        return out

    function.forward, function.backward = staticmethod(timed_forward), staticmethod(timed_backward)


def longest(examples: list[Example], name: str) -> int:
    return max(len(getattr(example, name)) for example in examples)


def settle() -> None:
    """Returns freed memory to the system and resets the peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(side: str, task: Task) -> dict[str, Any]:
    """Returns the measurements of one step. A step on a few short sequences comes first, so that
    everything that is loaded lazily is loaded."""
    model = make_model(task)
    make_step = trl_step if side == "trl" else hone_step
    task = replace(task, shared=side == "hone")
    few = max(task.rows, task.group_size)
    make_step(task, model, make_examples(replace(task, max_tokens=8))[:few]).run()
    if side != "trl":
        model.set_attn_implementation("sdpa")  # the next step chooses its layout again
    model.zero_grad(set_to_none=True)
    examples = make_examples(task)
    step = make_step(task, model, examples)
    settle()
    before, work = resident_bytes("VmRSS"), step.work
    started, cpu_started = time.perf_counter(), time.process_time()
    loss = step.run()
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "peak_bytes": resident_bytes("VmHWM") - before,
        "loss": loss,
        "grad_norm": math.sqrt(
            sum(float(gradient.double().square().sum()) for gradient in gradients)
        ),
        "num_tokens": sum(len(e.prompt_token_ids) + len(e.token_ids) for e in examples),
        "num_completion_tokens": sum(len(e.token_ids) for e in examples),
        **asdict(work),
    }


def main() -> None:
    side, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    transformers.utils.logging.set_verbosity_error()
    with redirect_stdout(sys.stderr):  # TRL prints too; the last line is this side's
        measured = measure(side, task)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
