"""What tests/gpu measures of the trainer, with the model's size as a parameter, so that it also
runs tiny on a CPU."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from shared.wire import Example
from tests.support.engine_ranks import a_job

PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}
"""Dense bfloat16, as the makers state them (H100 and H200: SXM), by a part of the device's name."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model by its sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    def config(self) -> transformers.Qwen2Config:
        return transformers.Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=self.tied,
            use_cache=False,
        )


TINY = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocab=512, tied=True)
QWEN_05B = Shape(
    hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocab=151_936, tied=True
)
QWEN_7B = Shape(
    hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, vocab=152_064, tied=False
)


@dataclass(frozen=True)
class Speed:
    """A training step, warm. Tokens are of prompts and completions; `mfu` is None where the
    device's peak is not known."""

    seconds: float
    tokens_per_s: float
    peak_bytes: int
    static_bytes: int
    whole_logits_bytes: int
    mfu: float | None

    def __str__(self) -> str:
        mfu = "unknown on this device" if self.mfu is None else f"{self.mfu:.1%}"
        return (
            f"{self.tokens_per_s:,.0f} tokens/s ({self.seconds:.2f} s a step), peak "
            f"{self.peak_bytes / 2**30:.1f} GiB, of which "
            f"{self.static_bytes / 2**30:.1f} GiB between steps, model FLOPs utilization {mfu}"
        )


def random_examples(shape: Shape, num: int, prompt: int, completion: int) -> tuple[Example, ...]:
    """Returns `num` examples with completions of a half to the whole of `completion` tokens."""
    random = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, shape.vocab, (count,), generator=random).tolist())

    lengths = torch.randint(completion // 2, completion + 1, (num,), generator=random).tolist()
    return tuple(
        Example(
            prompt_token_ids=ids(prompt),
            token_ids=ids(length),
            old_logprobs=(-math.log(shape.vocab),) * length,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, length in enumerate(lengths)
    )


def model_flops(shape: Shape, examples: tuple[Example, ...], *, lora: bool) -> float:
    """Returns the floating point operations that a step needs, recomputation not counted.

    2 for each weight of the body and token, and of the head and completion token; 4 per query-key
    pair and channel, of T (T + 1) / 2 pairs. The backward pass is twice that; with LoRA the frozen
    weights have no gradient, which spares half of it for them (the adapters themselves are left
    out).
    """
    head_dim = shape.hidden // shape.heads
    attention = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * head_dim)
    body_weights = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    lengths = [len(example.prompt_token_ids) + len(example.token_ids) for example in examples]
    num_completion = sum(len(example.token_ids) for example in examples)
    by_weights = 2.0 * (body_weights * sum(lengths) + shape.vocab * shape.hidden * num_completion)
    by_attention = sum(
        4.0 * shape.layers * shape.hidden * length * (length + 1) / 2 for length in lengths
    )
    return by_weights * (2 if lora else 3) + by_attention * 3


def peak_flops(device_name: str) -> float | None:
    return next((flops for name, flops in PEAK_BF16_FLOPS.items() if name in device_name), None)


@contextlib.contextmanager
def one_process(context: BaseContext | None = None) -> Iterator[ProcessPoolExecutor]:
    """One process for `train_speed`: DeepSpeed takes one process group in the life of a process,
    and pytest's is not ours alone. On a CPU it may come from `engine_ranks.warm()`."""
    with ProcessPoolExecutor(1, context or multiprocessing.get_context("spawn")) as process:
        yield process


def join_alone(device: torch.device) -> None:
    """Has torch.distributed with this process as its only rank, by what the device needs."""
    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )


def random_model(shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the model, made on the device itself: a 7B model is 15 GB, which need not go through
    a file."""
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, attn_implementation="sdpa"
        ).eval()


def train_speed(
    shape: Shape,
    examples: tuple[Example, ...],
    device: torch.device,
    memory: dict[str, Any],
    lora: dict[str, Any] | None = None,
) -> Speed:
    """Returns what the engine's second step took, in a process of its own; only reading the model's
    file is left out."""
    from services.trainer.zero import deepspeed_engine as engine_module

    engine_module.load_on_all_ranks = lambda job, dtype, device, spread: random_model(
        shape, dtype, device
    )
    sections = {"lora": lora} if lora else {}
    job = a_job(Path("random"), memory=memory, training={"dtype": "bfloat16"}, **sections)
    join_alone(device)
    engine = engine_module.start_engine(job, device)
    engine.update(examples, 1e-6)
    static_bytes = _start_peak(device)
    started = time.perf_counter()
    update = engine.update(examples, 1e-6)  # ends with a metric's value, so with the device at rest
    seconds = time.perf_counter() - started
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    engine.close()
    assert math.isfinite(update.loss) and math.isfinite(update.grad_norm) and update.grad_norm > 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = peak_flops(name)
    tokens = sum(len(example.prompt_token_ids) + len(example.token_ids) for example in examples)
    return Speed(
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        peak_bytes=peak_bytes,
        static_bytes=static_bytes,
        whole_logits_bytes=4 * shape.vocab * job.memory.micro_batch_tokens,
        mfu=None
        if peak is None
        else model_flops(shape, examples, lora=lora is not None) / seconds / peak,
    )


def step_gap(model: Path, folder: Path, device: torch.device, stage: int) -> float:
    """Returns how far the engine's update of a model in float32 is from plain torch's on the same
    device, relative to its length. In a process of its own."""
    from services.trainer.zero.deepspeed_engine import start_engine
    from tests.support import trainer_reference as plain

    job = a_job(
        model,
        memory={"zero_stage": stage, "micro_batch_tokens": 64},
        training={"max_grad_norm": plain.MAX_GRAD_NORM},
        correction={"ratio_base": "sampler"},
    )
    examples, before = plain.some_examples(model), plain.weights(model)
    join_alone(device)
    engine = start_engine(job, device)
    engine.update(examples, plain.LEARNING_RATE)
    engine.save_weights(folder)
    engine.close()
    policy = plain.load(model).to(device)
    with torch.device(device):
        loss = plain.reference_loss(policy, examples)
    plain.step(policy, plain.optimizer(policy, plain.LEARNING_RATE), loss, plain.MAX_GRAD_NORM)
    after = {name: tensor.cpu() for name, tensor in plain.named(policy).items()}
    return plain.relative(
        plain.difference(plain.weights(folder), before), plain.difference(after, before)
    )


@dataclass(frozen=True)
class Parity:
    """bfloat16 against float32, from the same weights: mean and largest difference of log-probs
    (nats), cosine of the gradients."""

    mean: float
    largest: float
    cosine: float


def bf16_parity(shape: Shape, examples: tuple[Example, ...], device: torch.device) -> Parity:
    """Returns how a pass in bfloat16 differs from one in float32 on weights that both hold
    exactly."""
    from services.trainer.learning.batch import collate
    from services.trainer.learning.policy import Policy

    rounded = random_model(shape, torch.bfloat16, device)
    exact = random_model(shape, torch.float32, device)
    exact.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    batch = collate(examples).to(device)
    logprobs, gradients = [], []
    for model in (rounded, exact):
        values_N, _ = Policy(model, 1.0)(batch)
        (values_N * batch.advantages_N).mean().backward()
        logprobs.append(values_N.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    difference_N = (logprobs[0] - logprobs[1]).abs()
    dot, squares = 0.0, [0.0, 0.0]
    for pair in zip(*gradients, strict=True):
        one, other = (gradient.float().flatten() for gradient in pair)
        dot += float(one @ other)
        squares = [squares[0] + float(one @ one), squares[1] + float(other @ other)]
    return Parity(
        float(difference_N.mean()),
        float(difference_N.max()),
        dot / math.sqrt(squares[0] * squares[1]),
    )


def _start_peak(device: torch.device) -> int:
    """Returns the bytes that are held between steps, and resets the peak."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
