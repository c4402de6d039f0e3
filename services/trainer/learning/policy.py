"""The model as the loss needs it: log-probs and entropies of sampled tokens, never the logits of
everything.

The base model runs once over `[B, T]` and gives hidden states; the output head scores the states
that predict a completion token, `[N, H]`, in tiles (`head.py`). A head that is not a plain linear
layer, for example with an adapter, is called chunk by chunk instead, and each chunk is recomputed
in the backward pass: as little memory, about twice the time.

The body gets no attention mask. Attention is causal and padding is on the right, so no real token
sees padding; and without a mask attention takes its fast path. In a row of several sequences the
forest says what each token sees (`attention.py`); flash attention takes that from `position_ids`,
which begin again with each sequence.

What this assumes about a model is checked when a job starts (`model_checks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.learning import attention
from services.trainer.learning.batch import MicroBatch
from services.trainer.learning.head import (
    PLAIN_LOGITS,
    CandidateTokens,
    LogitRule,
    as_scoring_head,
    rule_of,
)

MAX_CHUNK_LOGITS = 1 << 26
"""Most logits of a chunk if the head is called chunk by chunk: 256 MiB in float32."""

Reference = Callable[[MicroBatch], Tensor]
"""The model that the job began with, for the KL term: returns the log-probs `[N]` of a
micro-batch's completion tokens, in nats, without gradient. With LoRA it is the policy with its
adapters off, which costs no memory. Without LoRA it is a second copy, partitioned over the ranks if
the policy is."""


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM, with or without PEFT. `temperature` divides the logits, as at
    sampling. `chunk_tokens` bounds the tokens whose logits exist at a time."""

    def __init__(self, model: Any, temperature: float, chunk_tokens: int = 1024) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.rule = rule_of(causal_lm(model).config)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns the log-probs `[N]` and, without gradient, the entropies `[N]` of the batch's
        sampled tokens, in nats, under the distribution that they were sampled from."""
        model = causal_lm(self.model)
        hidden_NH = hidden_states(model, batch)[batch.rows_N, batch.columns_N]
        head = model.get_output_embeddings()
        scoring = as_scoring_head(head)
        if scoring is not None:
            return scoring(
                hidden_NH,
                batch.targets_N,
                self.temperature / self.rule.scale,
                self.chunk_tokens,
                batch.kept,
                self.rule.cap,
            )
        return chunked_logprobs(
            head,
            hidden_NH,
            batch.targets_N,
            self.temperature,
            self.chunk_tokens,
            batch.kept,
            self.rule,
        )


def causal_lm(model: Any) -> Any:
    """Returns the Hugging Face model, with PEFT's adapters in it and without PEFT's wrapper, whose
    `base_model` is something else."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """Returns the body's last hidden states `[B, T, H]`; states at padding are meaningless."""
    layout: dict[str, Any] = {}
    if batch.position_ids_BT is not None:
        layout["position_ids"] = batch.position_ids_BT
    if attention.is_used_by(model):
        again = bool(model.is_gradient_checkpointing)
        layout["forest"] = batch.forest and replace(batch.forest, is_recomputed=again)
    output = model.base_model(input_ids=batch.input_ids_BT, use_cache=False, **layout)
    return output.last_hidden_state


def chunked_logprobs(
    head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk_tokens: int,
    kept: CandidateTokens | None = None,
    rule: LogitRule = PLAIN_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies `[N]` by any head. It is called chunk by chunk, and again
    for each chunk in the backward pass. Logits are rounded as the head rounds them."""
    size = min(chunk_tokens, max(1, MAX_CHUNK_LOGITS // _vocab_size(head)))
    parts = [
        checkpoint(
            chunk_logprobs,
            head,
            hidden_NH[start : start + size],
            targets_N[start : start + size],
            temperature,
            None if kept is None else kept.chunk(start, start + size),
            rule,
            use_reentrant=False,
        )
        for start in range(0, len(hidden_NH), size)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def chunk_logprobs(
    head: nn.Module,
    hidden_CH: Tensor,
    targets_C: Tensor,
    temperature: float,
    kept: CandidateTokens | None = None,
    rule: LogitRule = PLAIN_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(logits / temperature) at the targets `[C]`, and the distribution's
    entropies `[C]`."""
    logits_CV = rule.logits(head(hidden_CH)) / temperature
    if kept is not None:
        kept.apply(logits_CV, slice(0, logits_CV.shape[1]))
    all_logprobs_CV = logits_CV.log_softmax(-1)
    with torch.no_grad():
        entropies_C = -(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1)
    return all_logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropies_C


def _vocab_size(head: nn.Module) -> int:
    """Returns the head's number of logits; if it is not known, more than any vocabulary has."""
    return int(getattr(head, "out_features", 0)) or 1 << 18


def adapters_off(wrapped: Any, policy: Policy) -> Reference:
    """Returns the reference of a policy with adapters. `wrapped` is PEFT's wrapper of its model."""

    @torch.no_grad()
    def logprobs(batch: MicroBatch) -> Tensor:
        with wrapped.disable_adapter():
            return policy(batch)[0]

    return logprobs


def frozen_copy(policy: Policy) -> Reference:
    """Freezes `policy`, and returns it as the reference."""
    policy.requires_grad_(False)

    @torch.no_grad()
    def logprobs(batch: MicroBatch) -> Tensor:
        return policy(batch)[0]

    return logprobs


# --- rounding noise -------------------------------------------------------------------------------


@torch.no_grad()
def rounding_noise(model: Any, batch: MicroBatch, logprobs_N: Tensor, chunk_tokens: int) -> float:
    """Returns by how many nats log-probs at temperature 1, computed with other rounding, differ on
    average from `logprobs_N`, the trainer's own: an estimate of the difference of another correct
    implementation. The same weights always give the same value, on any device.

    The result of each of the model's modules is moved by up to half a unit in the last place and
    rounded again, so that it often comes out as the next number of its dtype, and logits are
    rounded to that dtype, as vLLM's are. The log-probs then contain the rounding errors of all
    layers.

    Random Qwen2 models in bfloat16, of width 128 (the last one 256), logits of deviation 3; mean
    over 63 tokens in nats, on a CPU:

        layers    this     Hugging Face, eager attention    vLLM
        2         0.036    0.020                            0.017
        8         0.044    0.041                            0.034
        24        0.062    0.061                            0.045
        48        0.102    0.087                            0.080
        24        0.063    0.052                            0.062
    """
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
    with ExitStack() as hooks:
        for module in computing:
            hooks.enter_context(module.register_forward_hook(rounded))
        yield


def perturb(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns each element x as x (1 + e u), rounded to its dtype: u is uniform in [-1/2, 1/2), and
    e the dtype's distance from 1 to the next number."""
    wide = torch.float64 if tensor.dtype is torch.float32 else torch.float32
    shift = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=wide) - 0.5
    return (tensor * shift.mul_(torch.finfo(tensor.dtype).eps).add_(1)).to(tensor.dtype)
