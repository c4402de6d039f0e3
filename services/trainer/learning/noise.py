"""How far another right implementation's log-probs may be from the trainer's, by rounding alone.

The model computes a batch again, in another way: the result of each of its modules is moved by
up to half a unit in the last place and rounded again, so that it often comes out as the next number
of its dtype, and logits are rounded to that dtype, as vLLM's are. What rounding comes to after all
layers, through all that makes it grow or vanish in these weights, is then in the log-probs. It is
the same on any device, also where the same kernels would give two passes the same bits.

Random Qwen2 models in bfloat16, of width 128 (the last one 256), logits of deviation 3; mean over
63 tokens in nats, on a CPU:

    layers    this     Hugging Face, eager attention    vLLM
    2         0.036    0.020                            0.017
    8         0.044    0.041                            0.034
    24        0.062    0.061                            0.045
    48        0.102    0.087                            0.080
    24        0.063    0.052                            0.062
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.policy import causal_lm, chunked_logprobs, hidden_states, rule_of


@torch.no_grad()
def rounding_noise(model: Any, batch: MicroBatch, logprobs_N: Tensor, chunk_tokens: int) -> float:
    """Returns by how many nats log-probs at temperature 1, computed in another way, differ on
    average from `logprobs_N`, the trainer's own. The same weights always give the same."""
    model = causal_lm(model)
    with _rounded_otherwise(model):
        hidden_NH = hidden_states(model, batch)[batch.rows_N, batch.columns_N]
        others_N, _ = chunked_logprobs(
            model.get_output_embeddings(),
            hidden_NH,
            batch.targets_N,
            1.0,
            chunk_tokens,
            rule=rule_of(model.config),
        )
    return (others_N - logprobs_N).abs().mean().item()


@contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(_: nn.Module, __: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        return perturb(output, generators[output.device])

    computing = [
        module
        for module in model.modules()
        if not any(module.children()) or any(True for _ in module.parameters(recurse=False))
    ]
    hooks = [module.register_forward_hook(rounded) for module in computing]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def perturb(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns each element x as x (1 + e u), rounded to its dtype: u is uniform in [-1/2, 1/2), and
    e the dtype's distance from 1 to the next number."""
    wide = torch.float64 if tensor.dtype is torch.float32 else torch.float32
    shift = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=wide) - 0.5
    return (tensor * shift.mul_(torch.finfo(tensor.dtype).eps).add_(1)).to(tensor.dtype)
