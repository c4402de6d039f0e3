"""TRL's GRPO: a YAML file or the arguments of `trl grpo`, by the tables of
hone/trainer/parameters.py. Here are what surrounds a GRPOConfig, and TRL's own defaults, which
count where a configuration has no value."""

from __future__ import annotations

from typing import Any, cast

from hone.importing import table as t
from hone.importing.table import ImportedJob, NoCounterpart, Row, Values, flat
from hone.trainer.parameters import JOINT_NAMES, NO_BOUND, translate
from hone.trainer.single import CONVERTED, REFUSED, SAME, WITHOUT_EFFECT, key_of
from shared.errors import BadRequest

OVERLONG = {"max_tokens": 1280, "buffer_tokens": 256}
REWARDS: dict[str, Any] = {
    "accuracy_reward": {"grader": "math", "params": {"answer": "solution"}},  # a column, as there
    "think_format_reward": {"grader": "think_format", "shaping": True},
    "get_soft_overlong_punishment": {"grader": "overlong", "shaping": True, "params": OVERLONG},
}
"""TRL's own rewards, as `trl grpo` names them."""


def _rewards(value: Any, values: Values) -> Any:
    names = cast(list[Any], value if isinstance(value, list) else [value])
    tables = [_reward(str(name)) for name in names]
    for table, weight in zip(tables, values.get("reward_weights") or [], strict=False):
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
    is_off = values.get("eval_strategy") in (None, "no", False)  # YAML 1.1 takes no for false
    return None if is_off else (values.get("dataset_name"), split)


TRL = t.framework(
    "TRL",
    unchanged="""
        model_name_or_path=model model=model seed=seed dataset_name=data.train
        dataset_config=data.config dataset_train_split=data.train_split
        dataset_streaming=data.streaming attn_implementation=memory.attention""",
    converted={
        "dataset_test_split": Row("data.eval,data.eval_split", _held_out),
        "reward_funcs": Row("rewards", _rewards),
        "max_prompt_length": Row(
            "max_model_len,sampling.overlong_prompts",
            lambda most, values: (most + values["max_completion_length"], "truncate"),
        ),
    },
    missing={
        t.NO_MODEL: "reward_model_name_or_path",
        t.SINGLE_TURN: "environment_factory rollout_func tools",
        t.OF_STACK: "vllm_tensor_parallel_size vllm_gpu_memory_utilization",
        "a job counts steps: set evaluation.every": "eval_strategy=no/steps/false",
        "base weights are not quantized": "load_in_4bit=false load_in_8bit=false",
        "adapters are LoRA's plain ones": """lora_target_parameters lora_modules_to_save
            use_rslora=false use_dora=false""",
    },
    ignored="""
        config config_file num_processes lora_task_type task_type *bnb_* accelerate_config
        num_machines mixed_precision use_deepspeed zero_stage main_process_port machine_rank
        multi_gpu""",
    defaults="""
        dataset_train_split=train dataset_test_split=test seed=42 max_completion_length=512
        reward_weights=null per_device_train_batch_size=8 gradient_accumulation_steps=1
        num_generations=8 num_train_epochs=3.0 learning_rate=1e-6 lr_scheduler_type=linear
        loss_type=dapo epsilon=0.2 save_steps=500 use_vllm=false use_bias_correction_kl=true
        vllm_importance_sampling_mode=sequence_mask vllm_importance_sampling_clip_max=3.0""",
    others=frozenset({*SAME, *CONVERTED, *REFUSED, *WITHOUT_EFFECT, *JOINT_NAMES}),
)

TARGETS = "peft's own list there, mostly q_proj and v_proj; here every linear layer is adapted"
MODEL_CONFIG = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""The defaults of `trl grpo --use_peft`."""


def translate_arguments(given: Values) -> ImportedJob:
    """Returns the job for the arguments of a GRPO run."""
    job = t.convert(TRL, given)
    own = {
        name: value
        for name, value in given.items()
        if name in TRL.others and name not in TRL.rows and (value is not None or name in NO_BOUND)
    }
    unresolved = [name for name in own if t.UNRESOLVED.search(str(own[name]))]
    for name in unresolved:
        job.lacks(name, own[name], t.NOT_REPLACED)
    values = {**TRL.defaults, **(MODEL_CONFIG if own.get("use_peft") else {}), **own}
    values = {name: values[name] for name in values if name in TRL.others.difference(unresolved)}
    if "per_device_train_batch_size" in values:
        values["per_device_train_batch_size"] *= given.get("num_processes") or 1
    if "data.eval" in job.keys:
        evaluates = {"num_generations_eval": values.get("num_generations")}
        values = evaluates | {"eval_steps": given.get("logging_steps") or 10} | values
    if given.get("eval_strategy") not in (None, "no", "steps"):
        values.pop("eval_steps", None)
    found = translate(values)
    keys = {key: value for key, value in flat(found.job) if value != {} or key == "lora"}
    for key, value in keys.items():
        origin = ", ".join(name for name in own if _makes(name, key, values, keys))
        job.set(key, value, origin or "TRL's default")
    for name, why in found.refused.items():
        job.lacks(name, values.get(name), why.partition(": ")[2] or why)
    if own.get("use_peft") and "lora.target_modules" not in job.keys:
        job.lacks("lora_target_modules", None, TARGETS)
    job.ignored += [name for name in found.ignored if name in own]
    return job


def _makes(name: str, key: str, values: Values, keys: Values) -> bool:
    """Returns whether a key of the job has its value by this name."""
    try:
        others = translate({each: values[each] for each in values if each != name})
    except BadRequest:  # the others need it
        return key_of(name) == key
    return key_of(name) == key or dict(flat(others.job)).get(key) != keys[key]
