"""The update in plain torch: whole logits, one sequence at a time, torch's own AdamW. And examples
to train on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.wire import Example
from tests.support.tiny_models import make_tiny_model

TEMPERATURE = 0.8
MAX_RATIO = (1 - 0.2, 1 + 0.28)

LEARNING_RATE, MAX_GRAD_NORM = 1e3, 1e-9
"""With gradients clipped far below Adam's epsilon (1e-8) its first step is linear in the gradient:
-lr * g / (|g| + eps). Then a relative error of the update is one of the gradient, and not the sign
of elements whose gradient is rounding noise."""


def some_examples(
    model: Path, num: int = 12, seed: int = 5, prefix: tuple[int, ...] = ()
) -> tuple[Example, ...]:
    """Examples of very different lengths, which all begin with `prefix`; old log-probs are the
    model's own, disturbed, so that some ratios are clipped."""
    rng = random.Random(seed)
    policy = load(model)
    examples = []
    for _ in range(num):
        prompt = [*prefix, *(rng.randrange(64) for _ in range(rng.randrange(1, 9)))]
        completion = [rng.randrange(64) for _ in range(rng.randrange(1, 24))]
        old = [value + rng.gauss(0, 0.2) for value in logprobs(policy, prompt, completion).tolist()]
        examples.append(
            Example(
                prompt_token_ids=prompt,
                token_ids=completion,
                old_logprobs=old,
                advantage=rng.gauss(0, 1),
            )
        )
    return tuple(examples)


def model_with_a_nan(folder: Path) -> Path:
    """Writes a tiny model whose embedding of token 63, and nothing else, is NaN."""
    import torch

    make_tiny_model(folder, tie_word_embeddings=False)
    policy = load(folder)
    with torch.no_grad():
        policy.get_input_embeddings().weight[63] = math.nan
    policy.save_pretrained(folder)
    return folder


def batch_without_a_nan() -> tuple[Example, ...]:
    return tuple(
        Example(
            prompt_token_ids=(1, 2, index),
            token_ids=(3, 4),
            old_logprobs=(-4.0, -4.0),
            advantage=index - 5.0,
        )
        for index in range(11)
    )


EXAMPLE_WITH_A_NAN = Example(
    prompt_token_ids=(63,), token_ids=(3,), old_logprobs=(-4.0,), advantage=1.0
)
"""For `model_with_a_nan`."""


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logprobs(policy, prompt, completion, temperature: float = TEMPERATURE, read=None):
    """Log-probs of one unpadded sequence's completion, from the model's whole logits. `read`: the
    tokens that the model reads in place of the completion's."""
    import torch

    ids = torch.tensor([[*prompt, *(read or completion)]])
    logits = policy(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[range(len(completion)), list(completion)]


def clipped(ratio, advantage: float):
    import torch

    return -torch.min(ratio * advantage, ratio.clip(*MAX_RATIO) * advantage)


def reference_loss(policy, examples: Sequence[Example], loss: str = "dapo"):
    """The loss of one optimizer step over `examples`."""
    import torch

    total = torch.zeros(())
    total_tokens = sum(len(example.token_ids) for example in examples)
    for example in examples:
        new = logprobs(policy, example.prompt_token_ids, example.token_ids)
        log_ratio = new - torch.tensor(example.old_logprobs)
        if loss == "dapo":
            total = total + clipped(log_ratio.exp(), example.advantage).sum() / total_tokens
        elif loss == "grpo":
            total = total + clipped(log_ratio.exp(), example.advantage).mean() / len(examples)
        else:  # gspo: the ratio of the whole sequence
            total = total + clipped(log_ratio.mean().exp(), example.advantage) / len(examples)
    return total


def optimizer(policy, learning_rate: float, weight_decay: float = 0.0, **constants: Any):
    import torch

    matrices = [parameter for parameter in policy.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in policy.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, **constants)


def step(policy, adamw, loss, max_grad_norm: float) -> float:
    """One optimizer step; returns the gradient's norm before clipping."""
    import torch

    adamw.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    adamw.step()
    return norm.item()


def named(policy) -> dict:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def weights(folder: str | Path) -> dict:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def difference(after: dict, before: dict) -> dict:
    return {name: after[name] - before[name] for name in before}


def relative(update: dict, expected: dict) -> float:
    """The distance of two updates, relative to the length of the expected one."""
    distance = math.sqrt(
        sum(((update[name] - expected[name]).double() ** 2).sum().item() for name in expected)
    )
    return distance / math.sqrt(
        sum((value.double() ** 2).sum().item() for value in expected.values())
    )
