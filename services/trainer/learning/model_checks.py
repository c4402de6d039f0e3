"""Checks the trainer's assumptions about a model when a job starts: without them, training would
continue with silently wrong log-probs.

- The output head and the model's `LogitRule` give its logits, and padding on the right changes no
  hidden state (`check_head`).
- In the layout that is chosen, no sequence changes another's hidden states (`choose_layout`).
- Gradient checkpointing changes no hidden state (`checkpoint_body`).

Hidden states are compared on three short probe sequences.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.learning import attention
from services.trainer.learning.batch import Layout, MicroBatch, collate
from services.trainer.learning.head import rule_of
from services.trainer.learning.policy import causal_lm, hidden_states
from shared.errors import BadRequest, first_line
from shared.job.running import MemorySpec
from shared.wire import Example, TokenIds

LOUD_LOGIT = 60.0
"""Magnitude of the logits with which a model's `LogitRule` is checked: a cap of 30 hardly changes a
logit of 1."""

PROBE_LENGTHS = (5, 24, 5, 8)
"""Tokens of the first probe, of the prefix that the other two share, and of their rests."""

MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Most difference by rounding between two computations of a hidden state, relative to its norm. A
token that attends to a wrong position differs by more."""


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raises BadRequest unless the output head and the model's `LogitRule` give the model's own
    logits from its last hidden states, and padding on the right leaves hidden states as they
    are."""
    model = causal_lm(model)
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) has no output head apart from its body; "
            "one is needed"
        )
    batch = _probe_batch(model, "padded")
    ids_1T = batch.input_ids_BT[-1:]
    hidden_1TH = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    rule = rule_of(model.config)
    factor = LOUD_LOGIT / max(1e-6, head(hidden_1TH).abs().max().item())
    with head.register_forward_pre_hook(lambda _, inputs: (factor * inputs[0], *inputs[1:])):
        ours_1TV = rule.logits(head(hidden_1TH))
        theirs_1TV = model(
            input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False
        ).logits.float()
    difference = (ours_1TV - theirs_1TV).abs().max().item()
    if difference > 1e-2 * theirs_1TV.abs().max().item():
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) changes its logits after the output head "
            f"(by up to {difference:.3g}) in another way than by the scale or "
            "the cap of its config.json; expected logits that these give"
        )
    difference = _difference(model, batch, _states_alone(model))
    if difference > _max_difference(model):
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) lets a token see what comes after it: "
            f"padding to its right changes its hidden state by {difference:.2g} of its norm; "
            "expected a causal model"
        )


class ChosenLayout(NamedTuple):
    """The layout of micro-batches. `without` says which optimization of "auto" the model cannot
    use, and why ("": it uses all)."""

    layout: Layout
    without: str = ""


@torch.no_grad()
def choose_layout(model: Any, name: str, memory: MemorySpec) -> ChosenLayout:
    """Returns the layout of micro-batches, and gives the model the attention that it needs, for all
    passes from then on. Raises BadRequest if a key is "on" and the model cannot."""
    model = causal_lm(model)
    if memory.packing == "off" and memory.shared_prefix != "on":
        return ChosenLayout("padded")
    why = _why_not_forest(model, memory.attention)
    if why is None:
        return ChosenLayout("packed" if memory.shared_prefix == "off" else "shared")
    if memory.shared_prefix == "on":
        raise _cannot(model, name, why, "shared_prefix")
    without = (
        f"prompts are computed again for each completion, because the model {why}"
        if memory.shared_prefix == "auto"
        else ""
    )
    if memory.packing == "auto" and "flash" not in _implementation(model):
        # Any other attention would compute the pairs of all tokens of a row, and mask most.
        return ChosenLayout("padded", without)
    why = _why_not_packed(model)
    if why is None:
        return ChosenLayout("packed", without)
    if memory.packing == "on":
        raise _cannot(model, name, why, "packing")
    return ChosenLayout("padded", f"sequences are padded and not packed, because the model {why}")


def _implementation(model: Any) -> str:
    return getattr(model.config.get_text_config(), "_attn_implementation", None) or ""


def _cannot(model: Any, name: str, why: str, key: str) -> BadRequest:
    return BadRequest(
        f"the model {name!r} ({type(model).__name__}) {why}; "
        f'memory.{key} is "on", expected "off" or "auto" here'
    )


def _why_not_forest(model: Any, setting: str) -> str | None:
    """Returns why the model's attention cannot be computed over a forest. None: it can, and the
    model now uses forest attention. `setting` is the job's `memory.attention`."""
    why = _why_no_positions(model) or attention.why_not(model.config.get_text_config(), setting)
    if why is not None:
        return why
    alone, batch = _states_alone(model), _probe_batch(model, "shared")
    try:
        attention.use(model)
        difference = _difference(model, batch, alone)
        if not difference <= _max_difference(model):
            why = _mixes(difference)
        elif not attention.passes_its_windows(model, batch.forest):
            why = "does not pass its sliding window to its attention"
    except (MemoryError, torch.OutOfMemoryError):  # which does not depend on the model
        attention.restore(model)
        raise
    except Exception as error:  # a model's code may raise any class
        why = f"cannot compute a forest of sequences: {first_line(error)}"
    if why is not None:
        attention.restore(model)
    return why


def _why_not_packed(model: Any) -> str | None:
    """Returns why the model cannot keep the sequences of a row apart by positions that begin again
    with each; None if it can."""
    if why := _why_no_positions(model):
        return why
    difference = _difference(model, _probe_batch(model, "packed"), _states_alone(model))
    return None if difference <= _max_difference(model) else _mixes(difference)


def _why_no_positions(model: Any) -> str | None:
    if "position_ids" in inspect.signature(model.base_model.forward).parameters:
        return None
    return "takes no position_ids, which tell the sequences of a row apart"


def _mixes(difference: float) -> str:
    return (
        "mixes the sequences of a row: a neighbour changes a token's hidden state by "
        f"{difference:.2g} of its norm"
    )


@torch.no_grad()
def checkpoint_body(model: Any, name: str) -> None:
    """Turns on gradient checkpointing: the body keeps only each layer's input, and computes the
    layer again in the backward pass. Call it after the last `train()` or `eval()`. Raises
    BadRequest if the model cannot, or if its hidden states change; then it is off again.

    Transformers checkpoints only layers in training mode, and dropout is active in that mode too.
    This trainer allows no dropout but LoRA's. So only the flags of the layers are set, and not the
    flags of the modules in them. A layer that applies dropout by its own flag is then refused.
    """
    model = causal_lm(model)
    if not model.supports_gradient_checkpointing:
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) cannot do memory.gradient_checkpointing; "
            "expected false"
        )
    batch = _probe_batch(model, "shared" if attention.is_used_by(model) else "padded")
    before = hidden_states(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    after = hidden_states(model, batch)
    if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
        # NaN is refused at the step
        model.gradient_checkpointing_disable()
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = False
        raise BadRequest(
            f"the model {name!r} ({type(model).__name__}) applies dropout in its layers while "
            "memory.gradient_checkpointing is on; expected a dropout of 0 in its config.json, or "
            "memory.gradient_checkpointing = false"
        )


def set_recomputing(model: Any, is_on: bool) -> None:
    """Turns the gradient checkpointing of a model for which `checkpoint_body` turned it on off, or
    on again. Hidden states and gradients are the same, to the bit."""
    for module in causal_lm(model).modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = is_on


def _probe_batch(model: Any, layout: Layout) -> MicroBatch:
    """Returns the probes as a micro-batch on the model's device."""
    return collate(_probes(model), layout=layout).to(model.device)


def _probes(model: Any) -> list[Example]:
    """Returns three sequences, of which the longer two share a prefix."""
    vocab_size = model.config.get_text_config().vocab_size
    alone, prefix, one, other = (
        [(7 * length + position) % vocab_size for position in range(length)]
        for length in PROBE_LENGTHS
    )
    return [
        Example(prompt_token_ids=TokenIds(ids[:2]), token_ids=TokenIds(ids[2:]), advantage=0.0)
        for ids in (alone, prefix + one, prefix + other)
    ]


def _states_alone(model: Any) -> list[Tensor]:
    """Returns the hidden states that predict each probe's completion, computed without the other
    probes."""
    return [
        model.base_model(
            input_ids=torch.tensor(
                [[*example.prompt_token_ids, *example.token_ids]], device=model.device
            ),
            use_cache=False,
        ).last_hidden_state[0, 1:-1]
        for example in _probes(model)
    ]


def _max_difference(model: Any) -> float:
    return MAX_DIFFERENCE.get(model.dtype, 1e-3)


def _difference(model: Any, batch: MicroBatch, alone: list[Tensor]) -> float:
    """Returns the largest difference between the probes' hidden states computed together and alone,
    relative to the norm. States that are NaN in both do not differ: NaN is refused at the step."""
    together_NH = hidden_states(model, batch)[batch.rows_N, batch.columns_N].float()
    alone_NH = torch.cat(alone).float()
    norms_N = alone_NH.norm(dim=-1).clamp(min=1e-9)
    differences_N = (together_NH - alone_NH).norm(dim=-1) / norms_N
    in_both_N = together_NH.isnan().any(-1) & alone_NH.isnan().any(-1)
    return float(torch.where(in_both_N, 0.0, differences_N).max())
