"""Names that people use for GRPO, TRL's above all, each with the key that it becomes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import BadRequest
from shared.explain import shown


@dataclass
class Translation:
    """A job's keys, nested as in its file, and what became of the names that have none."""

    job: dict[str, Any] = field(default_factory=dict[str, Any])
    ignored: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    unknown: list[str] = field(default_factory=list[str])

    def set(self, key: str, value: Any) -> None:
        """Sets a key such as "training.beta"."""
        *sections, last = key.split(".")
        table = self.job
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value


SAME = {
    "name": "name",
    "run_name": "name",
    "model_revision": "model_revision",
    "num_generations": "sampling.group_size",
    "group_size": "sampling.group_size",
    "batch_size": "sampling.prompts_per_step",
    "prompts_per_step": "sampling.prompts_per_step",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "chat_template_kwargs": "sampling.template_args",
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "max_length": "max_model_len",
    "max_seq_length": "max_model_len",
    "vllm_max_model_length": "max_model_len",
    "learning_rate": "training.learning_rate",
    "lr": "training.learning_rate",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "max_grad_norm": "training.max_grad_norm",
    "minibatches": "training.minibatches",
    "beta": "training.beta",
    "kl_coef": "training.beta",
    "clip_low": "training.clip_low",
    "clip_high": "training.clip_high",
    "delta": "training.dual_clip",
    "sapo_temperature_pos": "training.tau_positive",
    "sapo_temperature_neg": "training.tau_negative",
    "importance_sampling_level": "training.importance",
    "mask_truncated_completions": "advantages.mask_truncated",
    "num_train_epochs": "data.epochs",
    "n_epochs": "data.epochs",
    "shuffle_dataset": "data.shuffle",
    "data_seed": "data.shuffle_seed",
    "system_prompt": "data.system_prompt",
    "gradient_checkpointing": "memory.gradient_checkpointing",
    "weight_sync_method": "weight_sync",
    "sync_weights_every": "sync_every",
    "save_total_limit": "checkpoints.keep_last",
}
"""Names whose value is the key's. None leaves the key at its default."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
"""A job's schedules, by the names that transformers gives them."""

STD = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
DTYPES = {name: name for name in ("auto", "float32", "bfloat16")}


def _of(known: Mapping[Any, str]) -> Callable[[Any], str]:
    """Returns the conversion of a value, or of an enum's member, by a table."""

    def convert(value: Any) -> str:
        name = getattr(value, "value", value)
        if name not in [*known]:  # a list has no hash
            raise BadRequest(f"expected one of {', '.join(map(repr, known))}")
        return known[name]

    return convert


def dtype(value: Any) -> str:
    """Returns `training.dtype` for one of torch's dtypes, or its name."""
    return _of(DTYPES)(str(value).removeprefix("torch."))


@dataclass(frozen=True)
class Conversion:
    """`of` returns the key's value, and raises BadRequest with what it expected. `note` is for
    people."""

    key: str
    of: Callable[[Any], Any]
    note: str


CONVERTED = {
    "lr_scheduler_type": Conversion(
        "training.schedule", _of(SCHEDULES), 'also "constant_with_warmup", "cosine_with_min_lr"'
    ),
    "scale_rewards": Conversion("advantages.std", _of(STD), 'True is "group", False "none"'),
    "top_p": Conversion("sampling.top_p", float, "below 1 it needs `top_k` too"),
    "top_k": Conversion("sampling.top_k", lambda value: max(value, 0), "-1 is 0: no limit"),
    "min_p": Conversion("sampling.min_p", float, "above 0 it needs `top_k` too"),
    "torch_dtype": Conversion("training.dtype", dtype, "torch's dtypes, or their names"),
    "dtype": Conversion("training.dtype", dtype, "torch's dtypes, or their names"),
}


def key_of(name: str) -> str:
    """Returns the key that a name becomes alone; "" if there is none."""
    return CONVERTED[name].key if name in CONVERTED else SAME.get(name, "")


def set_alone(name: str, value: Any, job: Translation) -> None:
    """Sets the key of a name that has one. Raises BadRequest if the value cannot be converted."""
    if name in SAME:
        job.set(SAME[name], value)
        return
    try:
        job.set(CONVERTED[name].key, CONVERTED[name].of(value))
    except (BadRequest, TypeError, ValueError) as error:
        wanted = error.detail if isinstance(error, BadRequest) else "expected a number"
        raise BadRequest(f"{name} is {shown(value)}; {wanted}") from error
