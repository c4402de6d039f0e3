"""TRL's GRPO: the arguments of a script or of `trl grpo`, by the tables of
hone/trainer/parameters.py. Here are what surrounds a GRPOConfig, and TRL's own defaults, for these
count where a script says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from hone.importing.converting import ACCEPTED, attention
from hone.importing.table import (
    UNREAD,
    Draft,
    FillIn,
    Framework,
    Lacking,
    LacksError,
    Row,
    Said,
    Values,
    convert,
    default,
    inside,
    none,
    say_unread,
    setting,
    to,
)
from hone.trainer.joint import BATCHES, JOINT_NAMES, LORA, LORA_NEUTRAL, NO_BOUND
from hone.trainer.parameters import translate
from hone.trainer.single import CONVERTED, SAME, key_of
from hone.trainer.training_arguments import REFUSED, WITHOUT_EFFECT
from shared.job import TrainingSpec

SOLUTION = "the column `solution`, as there"
ADAPTERS = "adapters are LoRA's plain ones"
BOUNDS = ("top_p", "top_k", "min_p")
TARGETS = "peft takes its own list for the model there, mostly q_proj and v_proj"


def overlong(max_completion_len: int, soft_punish_cache: int) -> dict[str, Any]:
    """Returns the reward of TRL's `get_soft_overlong_punishment`."""
    params = {"max_tokens": max_completion_len, "buffer_tokens": soft_punish_cache}
    return {"grader": "overlong", "shaping": True, "params": params}


REWARDS: dict[str, Any] = {
    "accuracy_reward": Said({"grader": "math", "params": {"answer": "solution"}}, SOLUTION),
    "think_format_reward": {"grader": "think_format", "shaping": True},
    "get_soft_overlong_punishment": overlong(1280, 256),
}
"""TRL's own rewards, as `trl grpo` names them."""


def _rewards(value: Any, values: Values) -> Any:
    """Returns the rewards: each a table already, or a name."""
    named = cast(list[Any], [value] if isinstance(value, str | dict) else list(value))
    tables: list[dict[str, Any]] = [
        each if isinstance(each, dict) else _named(str(each)) for each in named
    ]
    weights: Sequence[float] = values.get("reward_weights") or []
    for table, weight in zip(tables, weights, strict=False):
        table["weight"] = weight
    return tables


def _named(name: str) -> dict[str, Any]:
    if name in REWARDS:
        known = REWARDS[name]
        return dict(known.value if isinstance(known, Said) else known)
    module, dot, function = name.rpartition(".")
    if not dot or "/" in name:
        raise LacksError(f"{name!r} is a reward model, or not known; `score_model` asks a model")
    return {"file": f"{module.replace('.', '/')}.py", "function": function}


def _held_out(value: Any, values: Values) -> Any:
    return None if values.get("eval_strategy", "no") == "no" else value


ROWS: dict[str, Row] = {
    "model_name_or_path": to("model"),
    "model": to("model"),
    "attn_implementation": to("memory.attention", attention),
    "seed": to("seed"),
    "rows_changed_by": to(
        "data.messages",
        lambda value, _: FillIn(f"{value}: write it as data.messages, template or filter"),
        "what a script does with rows, by map and filter",
    ),
    "dataset_name": to("data.train"),
    "train_dataset": to("data.train"),
    "eval_dataset": to("data.eval", _held_out),
    "dataset_config": to("data.config"),
    "dataset_train_split": to("data.train_split"),
    "dataset_test_split": to(
        "data.eval, data.eval_split",
        lambda value, values: (
            (values.get("dataset_name"), value) if _held_out(value, values) else None
        ),
        "held out where eval_strategy is set",
    ),
    "dataset_streaming": to("data.streaming"),
    "reward_funcs": to("rewards", _rewards),
    "reward_weights": inside("each of the [[rewards]] has its weight"),
    "reward_model_name_or_path": none("no reward model is hosted; `score_model` asks one"),
    "reward_processing_classes": inside("belongs to reward models"),
    "processing_class": none("the model's own tokenizer is used"),
    "callbacks": none("see `hone logs -f`, and the client's `events`"),
    "rollout_func": none("the sampler samples; what follows an answer is an `[environment]`"),
    "environment_factory": none("`[environment]` with the class's file and name"),
    "tools": none('`[environment]` of kind "tools" with the functions\' file and names'),
    "max_prompt_length": to(
        "max_model_len, sampling.overlong_prompts",
        lambda value, values: (
            value + values.get("max_completion_length", DEFAULTS["max_completion_length"]),
            "truncate",
        ),
        "longer prompts lose their first tokens there too",
    ),
    "vllm_tensor_parallel_size": setting("HONE_TENSOR_PARALLEL_SIZE"),
    "vllm_gpu_memory_utilization": setting("HONE_GPU_MEMORY_UTILIZATION"),
    "lora_target_parameters": none(ADAPTERS),
    "lora_modules_to_save": none(ADAPTERS),
    "load_in_4bit": none("base weights are not quantized", False),
    "load_in_8bit": none("base weights are not quantized", False),
    **dict.fromkeys(
        (
            *("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
            *("config", "config_file", "num_processes", "ignore_bias_buffers", "lora_task_type"),
            *("task_type", "args", "accelerate_config", "num_machines", "mixed_precision"),
            *("use_deepspeed", "zero_stage", "main_process_port", "machine_rank", "multi_gpu"),
        ),
        inside("how a run is launched"),
    ),
    **{name: none(ADAPTERS, neutral) for name, neutral in LORA_NEUTRAL.items()},
}

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 512,
    "num_train_epochs": 3.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "loss_type": "dapo",
    "epsilon": 0.2,
    "seed": 42,
    "save_steps": 500,
    "use_vllm": False,
    "use_bias_correction_kl": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
"""TRL 1.16's, where a job's are others or the conversion needs them."""

CORRECTION = "vllm_importance_sampling_"
TRL_DEFAULT = "TRL's default"

ORIGINS = {
    "steps": ("max_steps", "num_iterations"),
    "sampling.prompts_per_step": (*BATCHES, "num_generations", "num_processes"),
    "training.minibatches": ("steps_per_generation", "gradient_accumulation_steps"),
    "training.epochs": ("num_iterations",),
    "training.warmup_steps": ("warmup_ratio", "warmup_steps"),
    "training.loss": ("loss_type",),
    "training.clip_low": ("epsilon",),
    "training.clip_high": ("epsilon", "epsilon_high"),
    "training.kl": ("use_bias_correction_kl",),
    "advantages.combine": ("multi_objective_aggregation",),
    "evaluation.samples": ("num_generations_eval", "num_generations"),
    "evaluation.temperature": ("temperature",),
    "training.dtype": ("bf16",),
    "training.min_learning_rate": ("lr_scheduler_kwargs",),
    "correction.method": (f"{CORRECTION}mode", f"{CORRECTION}correction"),
    "correction.high": (f"{CORRECTION}clip_max", f"{CORRECTION}cap"),
    "correction.low": (f"{CORRECTION}clip_min",),
    "evaluation.every": ("eval_steps",),
    "checkpoints.every": ("save_steps", "save_strategy"),
    "wandb.project": ("report_to", "project"),
    **{f"lora.{key}": tuple(name for name in LORA if LORA[name] == key) for key in LORA.values()},
}
"""The names that a key is made of, where they are several or one of several."""

NOTES = {
    "sampling.prompts_per_step": "completions of a device; times --processes, else 1",
    "steps": "updates there; a step here is a batch, with minibatches x epochs updates",
}

MODEL_CONFIG = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""The defaults of `trl grpo --use_peft`."""

TRL = Framework(
    name="trl",
    title="TRL",
    rows=ROWS,
    defaults={"dataset_train_split": "train", "dataset_test_split": "test", "seed": 42},
    marks=("trl grpo", "grpo.py"),
)


def translated(given: Values) -> Draft:
    """Returns the job for the arguments of a GRPO script."""
    beside = {"eval_strategy", "max_completion_length"}
    draft = convert(TRL, {name: given[name] for name in given if name in ROWS.keys() | beside})
    draft.unknown.clear()
    rest = {
        name: value
        for name, value in given.items()
        if name not in ROWS and (value is not None or name in NO_BOUND)
    }
    unread = {name: _key(name) for name in rest if _is_unread(name, rest[name])}
    values: dict[str, Any] = DEFAULTS | {
        name: value for name, value in rest.items() if name not in unread
    }
    values["per_device_train_batch_size"] *= given.get("num_processes") or 1
    if values.get("use_peft"):
        values = MODEL_CONFIG | values
    if "data.eval" in draft.entries:
        values = {"num_generations_eval": values["num_generations"]} | values
    _drop_unknown_loss(values, draft)
    found = translate(values)
    _take(found.job, "", given, draft)
    _drop_unread(unread, draft)
    if bounds := [name for name in BOUNDS if f"sampling.{name}" in draft.entries]:
        draft.set("correction.truncated_sampling", "accept", ", ".join(bounds), ACCEPTED)
    if "lora" in found.job and "target_modules" not in found.job["lora"]:
        draft.fill_in["lora.target_modules"] = TARGETS
    draft.lacking += [
        Lacking(name=name, value=values.get(name), why=why.partition(": ")[2] or why)
        for name, why in found.refused.items()
    ]
    draft.inside += [
        Lacking(name=name, value=given[name], why=why)
        for name, why in found.ignored.items()
        if name in given
    ]
    draft.unknown |= {name: values[name] for name in found.unknown}
    return draft


def _key(name: str) -> str:
    """Returns the key that a name becomes, alone or with others; "" if there is none."""
    return key_of(name) or next((key for key, names in ORIGINS.items() if name in names), "")


def _is_unread(name: str, value: Any) -> bool:
    return UNREAD in str(value) and (bool(_key(name)) or name in JOINT_NAMES)


def _drop_unread(unread: Mapping[str, str], draft: Draft) -> None:
    for name, key in unread.items():
        draft.entries.pop(key, None)
        say_unread(name, to(key) if key else None, draft)
    epochs = draft.entries.get("data.epochs")
    if "max_steps" in unread and epochs and epochs.origin == TRL_DEFAULT:
        del draft.entries["data.epochs"]


def _drop_unknown_loss(values: dict[str, Any], draft: Draft) -> None:
    known = get_args(TrainingSpec.model_fields["loss"].annotation)
    if values["loss_type"] not in known:
        why = f"the losses are {', '.join(known)}"
        draft.lacking.append(Lacking(name="loss_type", value=values.pop("loss_type"), why=why))


def _take(table: Mapping[str, Any], prefix: str, given: Values, draft: Draft) -> None:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in ("sampling.template_args", "data.columns"):
            _take(cast(Values, value), f"{key}.", given, draft)
        elif (origin := _origin(key, given)) or value != default(key):
            said = draft.fill_in.get(key)
            draft.set(key, value, origin or TRL_DEFAULT, NOTES.get(key, ""))
            draft.fill_in |= {} if said is None else {key: said}


def _origin(key: str, given: Values) -> str:
    return ", ".join(name for name in given if key_of(name) == key or name in ORIGINS.get(key, ()))


def knows(name: str) -> bool:
    """Returns whether a name is TRL's."""
    tables = (ROWS, SAME, CONVERTED, REFUSED, WITHOUT_EFFECT, JOINT_NAMES)
    return any(name in table for table in tables)
