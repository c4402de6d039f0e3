"""Attention over a forest on a GPU: log-probs and gradients compared with padded rows, by torch's
kernel for sequences of unequal length and by dense batches; timings; and a pass in which the host
never waits for the GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from services.trainer.learning import attention
from services.trainer.learning.batch import Layout, MicroBatch, collate
from services.trainer.learning.model_checks import choose_layout
from services.trainer.learning.policy import Policy
from shared.job.running import MemorySpec
from shared.wire import Example, TokenIds

DEVICE = torch.device("cuda:0")
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "full": lambda: transformers.Qwen2Config(**SIZES),
    "sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=128),
}


def a_group(prompt: int, completion: int, size: int, turns: int = 1) -> list[Example]:
    """Returns a group, and for each further turn another group, which continues the first member
    of the group before it."""
    torch.manual_seed(prompt)

    def ids(count: int) -> list[int]:
        return torch.randint(4096, (count,)).tolist()

    examples: list[Example] = []
    context = ids(prompt)
    for _ in range(turns):
        members = [
            Example(
                prompt_token_ids=TokenIds(context),
                token_ids=TokenIds(ids(completion)),
                advantage=1.0,
            )
            for _ in range(size)
        ]
        examples += members
        context = [*context, *members[0].token_ids, *ids(16)]
    return examples


def model_of(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return (
        transformers.AutoModelForCausalLM.from_config(
            CONFIGS[kind](), attn_implementation="sdpa", dtype=dtype
        )
        .to(DEVICE)
        .eval()
    )


def trained(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probs, and the gradient of their mean by one matrix."""
    logprobs_N, _ = Policy(model, 1.0)(batch)
    weight = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    (gradient,) = torch.autograd.grad(logprobs_N.mean(), weight)
    return logprobs_N.detach().float(), gradient.float()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("turns", [1, 3])
def test_a_forest_gives_what_padded_rows_give(kind: str, turns: int) -> None:
    examples = a_group(200, 60, 4, turns)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        padded = model_of(kind, dtype)
        shared = copy.deepcopy(padded)
        assert choose_layout(shared, kind, MemorySpec(shared_prefix="on")).layout == "shared"
        expected_N, expected = trained(padded, collate(examples).to(DEVICE))
        found_N, found = trained(shared, collate(examples, layout="shared").to(DEVICE))
        assert (found_N - expected_N).abs().mean() < close
        assert (found - expected).norm() < 3 * close * expected.norm()


def test_the_gradient_is_the_same_each_time() -> None:
    model = model_of("full", torch.bfloat16)
    choose_layout(model, "full", MemorySpec(shared_prefix="on"))
    batch = collate(a_group(500, 100, 8), layout="shared").to(DEVICE)
    first = trained(model, batch)[1]
    assert all(torch.equal(first, trained(model, batch)[1]) for _ in range(3))


def test_a_pass_does_not_wait_for_the_gpu() -> None:
    model = model_of("full", torch.bfloat16)
    choose_layout(model, "full", MemorySpec(shared_prefix="on"))
    batch = collate(a_group(200, 60, 4), layout="shared")
    trained(model, batch.to(DEVICE))  # loads what torch loads late
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained(model, batch.to(DEVICE))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("prompt", "completion", "size"), [(128, 512, 16), (512, 256, 8), (3072, 256, 8)]
)
def test_the_time_of_each_shape(prompt: int, completion: int, size: int) -> None:
    examples = a_group(prompt, completion, size)
    layouts: tuple[Layout, ...] = ("shared", "packed", "padded")
    for layout in layouts:
        model = model_of("full", torch.bfloat16)
        if layout != "padded":
            attention.use(model)
        batch = collate(examples, layout=layout).to(DEVICE)
        trained(model, batch)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            trained(model, batch)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / 5
        print(f"{prompt}/{completion} x {size}, {layout}: {1e3 * seconds:.1f} ms")
