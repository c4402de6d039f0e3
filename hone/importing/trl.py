"""TRL's GRPO: a YAML file or the arguments of `trl grpo`, by the tables of
hone/trainer/parameters.py. Here are what surrounds a GRPOConfig, and TRL's own defaults, which
count where a configuration has no value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from hone.importing import table as t
from hone.importing.table import Draft, NoCounterpart, Values, default, flat
from hone.trainer.parameters import JOINT_NAMES, NO_BOUND, translate
from hone.trainer.single import CONVERTED, REFUSED, SAME, WITHOUT_EFFECT, key_of
from shared.errors import BadRequest
from shared.job import TrainingSpec

TARGETS = "peft takes its own list for the model there, mostly q_proj and v_proj"
OVERLONG = {"max_tokens": 1280, "buffer_tokens": 256}
REWARDS: dict[str, Any] = {
    "accuracy_reward": {"grader": "math", "params": {"answer": "solution"}},  # a column, as there
    "think_format_reward": {"grader": "think_format", "shaping": True},
    "get_soft_overlong_punishment": {"grader": "overlong", "shaping": True, "params": OVERLONG},
}
"""TRL's own rewards, as `trl grpo` names them."""
BOUNDS = ("top_p", "top_k", "min_p")


def _rewards(value: Any, values: Values) -> Any:
    named = cast(list[Any], [value] if isinstance(value, str) else list(value))
    tables = [_reward(str(each)) for each in named]
    weights: Sequence[float] = values.get("reward_weights") or []
    for table, weight in zip(tables, weights, strict=False):
        table["weight"] = weight
    return tables


def _reward(name: str) -> dict[str, Any]:
    if name in REWARDS:
        return dict(REWARDS[name])
    module, dot, function = name.rpartition(".")
    if not dot or "/" in name:
        raise NoCounterpart(f"{name!r} is a reward model, or not known; `score_model` asks a model")
    return {"file": f"{module.replace('.', '/')}.py", "function": function}


def _held_out(split: Any, values: Values) -> Any:
    has = values.get("eval_strategy", "no") != "no"
    return (values.get("dataset_name"), split) if has else None


def _evaluates(value: Any, _: Values) -> None:
    if value not in ("no", "steps"):
        raise NoCounterpart("a job counts steps between evaluations: set evaluation.every")


def _max_model_len(value: Any, values: Values) -> Any:
    return value + values["max_completion_length"], "truncate"


TABLE: dict[t.Convert | str, str] = {
    t.same: """model_name_or_path=model model=model seed=seed dataset_name=data.train
    dataset_config=data.config dataset_train_split=data.train_split
    dataset_streaming=data.streaming vllm_tensor_parallel_size=HONE_TENSOR_PARALLEL_SIZE
    vllm_gpu_memory_utilization=HONE_GPU_MEMORY_UTILIZATION""",
    t.attention: "attn_implementation=memory.attention",
    _held_out: "dataset_test_split=data.eval,data.eval_split",
    _rewards: "reward_funcs=rewards",
    _evaluates: "eval_strategy=evaluation.every",
    _max_model_len: "max_prompt_length=max_model_len,sampling.overlong_prompts",
    t.NO_MODEL: "reward_model_name_or_path",
    "see [environment]": "environment_factory rollout_func tools",
    "base weights are not quantized": "load_in_4bit=false load_in_8bit=false",
    "adapters are LoRA's plain ones": """lora_target_parameters lora_modules_to_save bias=none/null
    use_rslora=false use_dora=false modules_to_save=null layers_to_transform=null
    exclude_modules=null rank_pattern={} alpha_pattern={} init_lora_weights=true""",
}
IGNORED = """config config_file num_processes lora_task_type task_type bnb_4bit_quant_*
use_bnb_nested_quant ignore_bias_buffers accelerate_config num_machines mixed_precision
use_deepspeed zero_stage main_process_port machine_rank multi_gpu"""
AROUND = """dataset_train_split=train dataset_test_split=test seed=42 max_completion_length=512
reward_weights=null"""
TRL = t.framework("TRL", TABLE, IGNORED, AROUND, "", "trl grpo", "grpo.py")

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
    "save_steps": 500,
    "use_vllm": False,
    "use_bias_correction_kl": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
"""TRL 1.16's, where a job's are others or the conversion needs them."""

NOTES = {
    "sampling.prompts_per_step": "times --processes, else 1",
    "steps": "updates there, of which a step here has minibatches x epochs",
}
MODEL_CONFIG = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""The defaults of `trl grpo --use_peft`."""


def translate_arguments(given: Values) -> Draft:
    """Returns the job for the arguments of a GRPO run."""
    draft = t.convert(TRL, {name: given[name] for name in given if TRL.knows(name)})
    own = {
        name: value
        for name, value in given.items()
        if (not TRL.knows(name) or name in DEFAULTS) and (value is not None or name in NO_BOUND)
    }
    unresolved = {name for name in own if t.UNRESOLVED.search(str(own[name]))}
    for name in unresolved:
        draft.lacks(name, own[name], t.NOT_REPLACED)
    values = DEFAULTS | (MODEL_CONFIG if own.get("use_peft") else {}) | own
    values = {name: value for name, value in values.items() if name not in unresolved}
    if "per_device_train_batch_size" in values:
        values["per_device_train_batch_size"] *= given.get("num_processes") or 1
    if "data.eval" in draft.entries:
        evaluates = {"num_generations_eval": values.get("num_generations")}
        values = evaluates | {"eval_steps": given.get("logging_steps") or 10} | values
    if given.get("eval_strategy") not in (None, "no", "steps"):
        values.pop("eval_steps", None)
    losses = get_args(TrainingSpec.model_fields["loss"].annotation)
    if values.get("loss_type") not in (None, *losses):
        draft.lacks("loss_type", values.pop("loss_type"), f"the losses are {', '.join(losses)}")
    found = translate(values)
    job = dict(flat(found.job))
    if bounds := [name for name in BOUNDS if f"sampling.{name}" in job]:
        draft.set("correction.truncated_sampling", "accept", ", ".join(bounds), t.ACCEPTED)
    for key, value in job.items():
        if value == {}:
            continue
        origin = ", ".join(name for name in own if _makes(name, key, values, job))
        if origin or value != default(key):
            draft.set(key, value, origin or "TRL's default", NOTES.get(key, ""))
    if "lora" in found.job and "target_modules" not in found.job["lora"]:
        draft.fill_in["lora.target_modules"] = TARGETS
    for name, why in found.refused.items():
        draft.lacks(name, values.get(name), why.partition(": ")[2] or why)
    for name in found.unknown:
        draft.lacks(name, values[name], "not in the table of TRL's names")
    draft.ignored += [name for name in found.ignored if name in own]
    return draft


def _makes(name: str, key: str, values: Values, job: Values) -> bool:
    """Returns whether a key of the job has its value by this name."""
    try:
        others = translate({each: values[each] for each in values if each != name})
    except BadRequest:  # the others need it
        return key_of(name) == key
    return key_of(name) == key or dict(flat(others.job)).get(key) != job[key]


def knows(name: str) -> bool:
    """Returns whether a name is TRL's."""
    tables = (SAME, CONVERTED, REFUSED, WITHOUT_EFFECT, JOINT_NAMES)
    return TRL.knows(name) or any(name in table for table in tables)
