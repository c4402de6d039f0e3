"""The model as the loss needs it: log-probs and entropies of sampled tokens, never the logits of
everything.

The base model runs once over `[B, T]` and gives hidden states; the output head scores the states
that predict a completion token, `[N, H]`, in tiles (`head.py`). A head that is not a plain linear
layer, for example with an adapter, is called chunk by chunk instead, and each chunk is recomputed
in the backward pass: as little memory, about twice the time.

The body gets no attention mask. Attention is causal and padding is on the right, so no real token
sees padding; and without a mask attention takes its fast path. In a row of several sequences, the
forest says what each token sees (`attention.py`), or, to flash attention, `position_ids` that
restart.

Its assumptions about a model are checked when a job starts, because training would go on with
silently wrong log-probs: that the head and the model's `LogitRule` give its logits, that neither
padding nor what is beside a sequence changes a hidden state (`check_head`, `choose_layout`), that
recomputing its layers does not either (`checkpoint_body`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.learning import attention
from services.trainer.learning.batch import Layout, MicroBatch, collate
from services.trainer.learning.head import AS_THEY_ARE, Kept, LogitRule, as_scoring_head, rule_of
from shared.errors import BadRequest, first_line
from shared.job.running import MemorySpec
from shared.wire import Example
from shared.wire.packed import TokenIds

MAX_CHUNK_LOGITS = 1 << 26
"""Logits of a chunk if the head is called as it is: 256 MiB in float32, for any vocabulary."""

LOUD = 60.0
"""Magnitude of the logits for checking a model's rule: a cap of 30 hardly shows at 1."""

CANARY_LENGTHS = (5, 24, 5, 8)
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""How much two computations of the same hidden state may differ, relative to its norm, by rounding
through all layers. A token that attends to a wrong position changes by more."""

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
    """Returns the Hugging Face model itself, with PEFT's adapters in it. PEFT's wrapper means
    something else by `base_model`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """Returns the body's last hidden states `[B, T, H]`; states at padding are meaningless."""
    row: dict[str, Any] = {}
    if batch.position_ids_BT is not None:
        row["position_ids"] = batch.position_ids_BT
    if attention.is_used_by(model):
        row["forest"] = batch.forest
    return model.base_model(input_ids=batch.input_ids_BT, use_cache=False, **row).last_hidden_state


def chunked_logprobs(
    head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk_tokens: int,
    kept: Kept | None = None,
    rule: LogitRule = AS_THEY_ARE,
) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies `[N]` by any head, called chunk by chunk, and again for each
    chunk in the backward pass. Logits have the head's rounding."""
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
    kept: Kept | None = None,
    rule: LogitRule = AS_THEY_ARE,
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


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raises BadRequest unless the output head on the last hidden state, by the model's
    `LogitRule`, gives the model's own logits, and unless padding to the right leaves hidden states
    as they are."""
    model = causal_lm(model)
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) has no output head apart from its body; "
            "one is needed"
        )
    batch = _canary(model, "padded")
    ids_1T = batch.input_ids_BT[-1:]
    hidden_1TH = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    rule, loudness = rule_of(model.config), LOUD / max(1e-6, head(hidden_1TH).abs().max().item())
    with _multiplied_input(head, loudness):
        ours_1TV = rule.logits(head(hidden_1TH))
        theirs_1TV = model(
            input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False
        ).logits.float()
    difference = (ours_1TV - theirs_1TV).abs().max().item()
    if difference > 1e-2 * theirs_1TV.abs().max().item():
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) changes its logits after the output head "
            f"(by up to {difference:.3g}) otherwise than by the scale or the cap that its "
            "config.json says; this trainer takes models whose logits these give"
        )
    padded = _difference(model, batch, _states_alone(model))
    if padded > CLOSE.get(model.dtype, 1e-3):
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) lets a token see what comes after it: "
            "padding to its right changes its "
            f"hidden state by {padded:.2g} of its norm; this trainer takes causal models"
        )


@contextmanager
def _multiplied_input(module: nn.Module, factor: float) -> Iterator[None]:
    hook = module.register_forward_pre_hook(lambda _, inputs: (factor * inputs[0], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


class Chosen(NamedTuple):
    """A layout, and what the model cannot do that "auto" would have it do ("": nothing)."""

    layout: Layout
    without: str = ""


@torch.no_grad()
def choose_layout(model: Any, name: str, memory: MemorySpec) -> Chosen:
    """Returns how sequences go into a micro-batch, and gives the model the attention for it, from
    then on for all its passes. Raises BadRequest for "on" if the model cannot."""
    model = causal_lm(model)
    if memory.packing == "off" and memory.shared_prefix != "on":
        return Chosen("padded")
    why = _why_not_forest(model)
    if why is None:
        return Chosen("packed" if memory.shared_prefix == "off" else "shared")
    if memory.shared_prefix == "on":
        raise _cannot(model, name, why, "shared_prefix")
    without = (
        f"each completion's prompt is computed with it, because the model {why}"
        if memory.shared_prefix == "auto"
        else ""
    )
    if memory.packing == "auto" and "flash" not in _implementation(model):
        return Chosen("padded", without)  # others compute and mask all pairs, at quadratic cost
    why = _why_not_packed(model)
    if why is None:
        return Chosen("packed", without)
    if memory.packing == "on":
        raise _cannot(model, name, why, "packing")
    return Chosen("padded", f"sequences are padded and not packed, because the model {why}")


def _implementation(model: Any) -> str:
    return getattr(model.config.get_text_config(), "_attn_implementation", None) or ""


def _cannot(model: Any, name: str, why: str, key: str) -> BadRequest:
    return BadRequest(
        f"the model {name!r} ({type(model).__name__}) {why}; "
        f'memory.{key} is "on", expected "off" or "auto" here'
    )


def _why_not_forest(model: Any) -> str | None:
    """Returns why the model's attention cannot be computed over a forest; None, with that attention
    in the model, if it can."""
    why = _why_no_positions(model) or attention.why_not(model.config.get_text_config())
    if why is not None:
        return why
    alone, batch = _states_alone(model), _canary(model, "shared")
    try:
        attention.use(model)
        difference = _difference(model, batch, alone)
        if not difference <= CLOSE.get(model.dtype, 1e-3):
            why = _mixes(difference)
        elif not attention.has_its_windows(model, batch.forest):
            why = "does not tell its attention of its sliding window"
    except (MemoryError, torch.OutOfMemoryError):  # which says nothing of the model
        attention.leave(model)
        raise
    except Exception as error:  # whatever a model's own code makes of it
        why = f"cannot compute a forest of sequences: {first_line(error)}"
    if why is not None:
        attention.leave(model)
    return why


def _why_not_packed(model: Any) -> str | None:
    """Returns why restarting positions do not keep the sequences of a row apart; None if they
    do."""
    if why := _why_no_positions(model):
        return why
    difference = _difference(model, _canary(model, "packed"), _states_alone(model))
    return None if difference <= CLOSE.get(model.dtype, 1e-3) else _mixes(difference)


def _why_no_positions(model: Any) -> str | None:
    if "position_ids" in inspect.signature(model.base_model.forward).parameters:
        return None
    return "takes no position_ids, by which the sequences of a row are told apart"


def _mixes(difference: float) -> str:
    return (
        "mixes the sequences of a row: a neighbour changes a token's hidden state by "
        f"{difference:.2g} of its norm"
    )


@torch.no_grad()
def checkpoint_body(model: Any, name: str) -> None:
    """Makes the body keep each layer's input only and compute the layer again in the backward pass.
    Call it after the last `train()` or `eval()`.

    Hugging Face does so only for layers in training mode, where dropout is active, and this trainer
    has none but LoRA's. So the layers' own flag is set, and their parts stay as they are. A model
    whose layers use dropout by that flag is refused.
    """
    model = causal_lm(model)
    if not model.supports_gradient_checkpointing:
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) cannot do memory.gradient_checkpointing; "
            "expected false"
        )
    batch = _canary(model, "shared" if attention.is_used_by(model) else "padded")
    before = hidden_states(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    after = hidden_states(model, batch)
    if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):  # NaN: a step refuses it
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) drops out in its layers while "
            "memory.gradient_checkpointing is on; "
            "expected a model with its dropout set to 0 in config.json, or "
            "memory.gradient_checkpointing = false"
        )


def _canary(model: Any, layout: Layout) -> MicroBatch:
    """Returns a micro-batch of three sequences, of which the longer two begin alike."""
    return collate(_canaries(model), layout=layout).to(model.device)


def _canaries(model: Any) -> list[Example]:
    vocab_size = model.config.get_text_config().vocab_size
    alone, shared, rest, other = (
        [(7 * length + position) % vocab_size for position in range(length)]
        for length in CANARY_LENGTHS
    )
    return [
        Example(prompt_token_ids=TokenIds(ids[:2]), token_ids=TokenIds(ids[2:]), advantage=0.0)
        for ids in (alone, shared + rest, shared + other)
    ]


def _states_alone(model: Any) -> list[Tensor]:
    """Returns the hidden states that predict the canaries' completions, of each computed alone."""
    return [
        model.base_model(
            input_ids=torch.tensor(
                [[*example.prompt_token_ids, *example.token_ids]], device=model.device
            ),
            use_cache=False,
        ).last_hidden_state[0, 1:-1]
        for example in _canaries(model)
    ]


def _difference(model: Any, batch: MicroBatch, alone: list[Tensor]) -> float:
    """Returns the largest difference, relative to the norm, between hidden states of the batch's
    sequences together and of each alone. A state that is NaN in both does not differ: a step
    refuses it."""
    together_NH = hidden_states(model, batch)[batch.rows_N, batch.columns_N].float()
    alone_NH = torch.cat(alone).float()
    norms_N = alone_NH.norm(dim=-1).clamp(min=1e-9)
    differences_N = (together_NH - alone_NH).norm(dim=-1) / norms_N
    in_both_N = together_NH.isnan().any(-1) & alone_NH.isnan().any(-1)
    return float(torch.where(in_both_N, 0.0, differences_N).max())


def _vocab_size(head: nn.Module) -> int:
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
