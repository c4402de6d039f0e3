"""The names that people use for GRPO, TRL's above all, and the job's keys that they become.

`SAME` are other names of a key with the same value. `CONVERTED` are names whose value becomes
another one, alone. What several names say together (batches, steps, clipping, LoRA, correction) is
a function of `JOINT`. `REFUSED` would change what is learned, and the job has no such key: their
neutral value is accepted. `WITHOUT_EFFECT` say how another trainer works inside.

`hone.Trainer`, `hone import` and the table of docs/trainer.md are made from these.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from hone.trainer import training_arguments
from shared.errors import BadRequest
from shared.explain import shown
from shared.job import Job
from shared.job.learning import LEARNING_RATE, LORA_LEARNING_RATE

Values = Mapping[str, Any]
"""What was given, by name."""


@dataclass
class Translation:
    """A job's keys, nested as in its file, and what became of the names that have none."""

    job: dict[str, Any] = field(default_factory=dict[str, Any])
    ignored: dict[str, str] = field(default_factory=dict[str, str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    unknown: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

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


def _schedule(value: Any) -> str:
    name = getattr(value, "value", value)
    known = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    }
    if name not in known:
        raise BadRequest(f"expected one of {', '.join(map(repr, known))}")
    return known[name]


def _std(value: Any) -> str:
    known = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
    if value not in known:
        raise BadRequest('expected "group", "batch" or "none"; True or False')
    return known[value]


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    if name not in ("auto", "float32", "bfloat16"):
        raise BadRequest('expected "auto", "float32" or "bfloat16"')
    return name


@dataclass(frozen=True)
class Conversion:
    """`of` returns the key's value, and raises BadRequest with what it expected. `note` is for
    people."""

    key: str
    of: Callable[[Any], Any]
    note: str


CONVERTED = {
    "lr_scheduler_type": Conversion(
        "training.schedule", _schedule, 'also "constant_with_warmup", "cosine_with_min_lr"'
    ),
    "scale_rewards": Conversion("advantages.std", _std, 'True is "group", False "none"'),
    "top_p": Conversion("sampling.top_p", float, "below 1 it needs `top_k` too"),
    "top_k": Conversion("sampling.top_k", lambda value: max(value, 0), "-1 is 0: no limit"),
    "min_p": Conversion("sampling.min_p", float, "above 0 it needs `top_k` too"),
    "torch_dtype": Conversion("training.dtype", _dtype, "torch's dtypes, or their names"),
    "dtype": Conversion("training.dtype", _dtype, "torch's dtypes, or their names"),
}

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **training_arguments.REFUSED,
    "repetition_penalty": ((1.0,), "the trainer's log-probs would not be the sampler's"),
    "top_entropy_quantile": ((1.0,), "all tokens are trained"),
    "entropy_coef": ((0, 0.0), "there is no entropy bonus; training.clip_high keeps entropy up"),
    "use_adaptive_entropy": ((False,), "there is no entropy bonus"),
    "sync_ref_model": ((False,), "the reference is the model that the job began with"),
    "off_policy_mask_threshold": ((None,), "see [correction]"),
    "router_aux_loss_coef": ((None, 0, 0.0, 0.001), "there is no loss of routers"),
    "adam_epsilon": ((1e-8,), "AdamW's epsilon is 1e-8"),
    "fp16": ((False,), 'training.dtype is "bfloat16" or "float32"'),
    "trust_remote_code": ((False,), "code of a model is not run"),
    "disable_dropout": ((False, True), "a job's only dropout is lora.dropout"),
    "neftune_noise_alpha": ((None,), "no noise is added to embeddings"),
    "label_smoothing_factor": ((0, 0.0), "labels are sampled tokens"),
    "vllm_structured_outputs_regex": ((None,), "what a regex cuts off, the trainer cannot see"),
    "max_prompt_length": ((None,), "max_model_len bounds prompt and completion together"),
    "cast_lm_head_to_fp32": ((False,), "logits are always computed in float32"),
    "resume_from_checkpoint": (
        (None, False),
        "a job resumes by itself; to begin with a checkpoint, make it the model",
    ),
    "load_best_model_at_end": (
        (False,),
        "the best checkpoint is kept beside the last (checkpoints.keep_best)",
    ),
}
"""Name, its neutral values, and why it has no key."""

WITHOUT_EFFECT = {
    **training_arguments.WITHOUT_EFFECT,
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "log_completions"),
        "every step is logged, with its completions",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "dataloader_num_workers", "dataloader_pin_memory"),
        "evaluation and data are batched by the services",
    ),
    **dict.fromkeys(
        ("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
        "sampling is always by vLLM; its place and size are settings of the stack",
    ),
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
        "the stack knows its samplers",
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "ddp_backend", "optim_args"),
        "the trainer is DeepSpeed ZeRO-2; see [memory]",
    ),
    **dict.fromkeys(
        ("remove_unused_columns", "push_to_hub", "disable_tqdm", "ds3_gather_for_generation"),
        "how TRL works inside",
    ),
}

GROUP_SIZE, PER_DEVICE = 8, 8
"""TRL's defaults."""


def _batches(given: Values, job: Translation) -> None:
    """TRL counts completions: a generation batch has `per_device_train_batch_size *
    steps_per_generation` of one device, and `gradient_accumulation_steps` of its parts make one
    update."""
    if not any(given.get(name) is not None for name in BATCHES[:-1]):
        return
    accumulated = given.get("gradient_accumulation_steps") or 1
    if "batch_size" in given or "prompts_per_step" in given:
        job.ignored |= {name: "batch_size says it" for name in BATCHES[:-1] if name in given}
        return
    group = given.get("num_generations") or given.get("group_size") or GROUP_SIZE
    per_device = given.get("per_device_train_batch_size") or PER_DEVICE
    parts = given.get("steps_per_generation") or accumulated
    completions = given.get("generation_batch_size") or per_device * parts
    parts = given.get("steps_per_generation") or max(completions // per_device, 1)
    if completions % group:
        raise BadRequest(
            f"a batch has {completions} completions (per_device_train_batch_size "
            f"{per_device} x {parts}), and num_generations is {group}; expected a multiple of it, "
            "or batch_size, which counts prompts"
        )
    job.set("sampling.prompts_per_step", completions // group)
    if parts % accumulated:
        raise BadRequest(
            f"steps_per_generation is {parts} and gradient_accumulation_steps {accumulated}; "
            "expected a multiple of it"
        )
    if parts > accumulated:
        job.set("training.minibatches", parts // accumulated)


BATCHES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
)


def _steps(given: Values, job: Translation) -> None:
    """TRL counts updates; a step of a job is a batch, with `minibatches * num_iterations`
    updates."""
    training = job.job.get("training", {})
    if (iterations := given.get("num_iterations")) is not None:
        job.set("training.epochs", iterations)
    updates = training.get("minibatches", 1) * (iterations or 1)
    if (max_steps := given.get("max_steps")) is not None and max_steps > 0:
        job.set("steps", math.ceil(max_steps / updates))
        job.job.get("data", {}).pop("epochs", None)
    for name, key in (("eval_steps", "evaluation.every"), ("save_steps", "checkpoints.every")):
        if (every := given.get(name)) is None:
            continue
        if every < 1:
            job.ignored[name] = f"{every} is a share of the steps, expected a number of them"
        else:
            job.set(key, max(round(every / updates), 1))
    if given.get("save_strategy") == "no":
        job.set("checkpoints.every", 0)
    _warmup(given, job, updates)


def _warmup(given: Values, job: Translation, updates: int) -> None:
    share, warmup = given.get("warmup_ratio") or 0, given.get("warmup_steps") or 0
    if 0 < warmup < 1:
        share, warmup = warmup, 0
    if share and not warmup:
        if not (steps := job.job.get("steps")):
            job.refused["warmup_ratio"] = (
                f"{share:g} of a number of steps that is not known before the rows are counted; "
                "expected warmup_steps, or max_steps beside it"
            )
            return
        job.set("training.warmup_steps", math.ceil(share * steps))
    elif warmup:
        job.set("training.warmup_steps", math.ceil(warmup / updates))


def _clipping(given: Values, job: Translation) -> None:
    """TRL clips on both sides by `epsilon` unless `epsilon_high` is set. Its "cispo" bounds the
    ratio itself by `epsilon_high`, a job's by 1 + clip_high."""
    loss, low = given.get("loss_type"), given.get("epsilon")
    high = given.get("epsilon_high")
    if loss is not None:
        job.set("training.loss", loss)
    if low is not None and loss != "cispo":
        job.set("training.clip_low", low)
    high = low if high is None else high
    if high is None:
        return
    if loss == "cispo":
        if high < 1:
            job.refused["epsilon_high"] = (
                f'{high:g} would bound the ratio of "cispo" below 1; expected 1 or more, 4 to 5 is '
                "usual"
            )
            return
        high = round(high - 1, 12)
    job.set("training.clip_high", high)


def _normalized(given: Values, job: Translation) -> None:
    """TRL's "normalize_then_sum" divides by deviations, whatever `scale_rewards` is."""
    if (combine := given.get("multi_objective_aggregation")) is None:
        return
    job.set("advantages.combine", combine)
    if combine == "normalize_then_sum":
        job.set("advantages.std", "group")


def _evaluated(given: Values, job: Translation) -> None:
    """TRL evaluates at the temperature of training. At 0, a job's default, all samples would be
    the same."""
    if (samples := given.get("num_generations_eval")) is not None:
        job.set("evaluation.samples", samples)
        job.set("evaluation.temperature", given.get("temperature", 1.0))


def _kl(given: Values, job: Translation) -> None:
    if given.get("beta") and given.get("use_bias_correction_kl"):
        job.set("training.kl", "k3_true")


CORRECTIONS = {
    "token_truncate": "token_tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mask",
}


def _correction(given: Values, job: Translation) -> None:
    """TRL has no lower bound unless one is given; a job's "icepop" has."""
    mode = given.get("vllm_importance_sampling_mode")
    if given.get("vllm_importance_sampling_correction") is False:
        job.set("correction.method", "none")
        return
    if mode is None or given.get("use_vllm") is False:
        return
    if mode not in CORRECTIONS:
        raise BadRequest(
            f"vllm_importance_sampling_mode is {mode!r}; expected one of "
            f"{', '.join(map(repr, CORRECTIONS))}"
        )
    job.set("correction.method", CORRECTIONS[mode])
    if mode == "token_mask":
        job.set("correction.low", 0.0)
    for name, key in (
        ("vllm_importance_sampling_clip_max", "correction.high"),
        ("vllm_importance_sampling_cap", "correction.high"),  # as it was called
        ("vllm_importance_sampling_clip_min", "correction.low"),
    ):
        if given.get(name) is not None:
            job.set(key, given[name])


LORA = {
    "r": "rank",
    "lora_r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "lora_target_modules": "target_modules",
}
LORA_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "modules_to_save": (None,),
    "layers_to_transform": (None,),
    "exclude_modules": (None,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "init_lora_weights": (True,),
}
"""Fields of peft's LoraConfig whose other values change what is learned."""


def _lora(given: Values, job: Translation) -> None:
    config = given.get("peft_config")
    if given.get("use_lora") is False or given.get("use_peft") is False:
        return
    fields = {name: given[name] for name in LORA if given.get(name) is not None}
    if config is not None:
        own = {name: getattr(config, name, None) for name in LORA}
        fields |= {name: value for name, value in own.items() if value is not None}
        for name, neutral in LORA_NEUTRAL.items():
            if (value := getattr(config, name, neutral[0])) not in neutral:
                job.refused[f"peft_config.{name}"] = f"{shown(value)}; expected {neutral[0]!r}"
    if not (fields or config is not None or given.get("use_lora") or given.get("use_peft")):
        return
    lora = {LORA[name]: _modules(value) for name, value in fields.items()}
    job.set("lora", job.job.get("lora", {}) | lora)


def _modules(value: Any) -> Any:
    return sorted(cast(set[str], value)) if isinstance(value, set) else value


def _precision(given: Values, job: Translation) -> None:
    if given.get("bf16"):
        job.set("training.dtype", "auto")
    options = dict(given.get("model_init_kwargs") or {})
    names = {
        "torch_dtype": "training.dtype",
        "dtype": "training.dtype",
        "revision": "model_revision",
        "attn_implementation": "memory.attention",
    }
    for name, value in options.items():
        if name in names:
            job.set(names[name], _dtype(value) if "dtype" in name else value)
        elif value not in (None, False):
            job.refused[f"model_init_kwargs.{name}"] = f"{shown(value)} has no key of the job"


def _least_rate(given: Values, job: Translation) -> None:
    options = dict(given.get("lr_scheduler_kwargs") or {})
    if "min_lr" in options:
        job.set("training.min_learning_rate", options.pop("min_lr"))
    rate = options.pop("min_lr_rate", None)
    if rate is not None:
        usual = LORA_LEARNING_RATE if "lora" in job.job else LEARNING_RATE
        peak = job.job.get("training", {}).get("learning_rate", usual)
        job.set("training.min_learning_rate", rate * peak)
    if options:
        job.refused["lr_scheduler_kwargs"] = f"{shown(options)}; expected min_lr or min_lr_rate"


def _generation(given: Values, job: Translation) -> None:
    for name, value in dict(given.get("generation_kwargs") or {}).items():
        if key_of(name).startswith("sampling."):
            _translate_one(name, value, job)
        else:
            job.refused[f"generation_kwargs.{name}"] = f"{shown(value)} has no key of [sampling]"


def key_of(name: str) -> str:
    """Returns the key that a name becomes alone; "" if there is none."""
    return CONVERTED[name].key if name in CONVERTED else SAME.get(name, "")


def _reports(given: Values, job: Translation) -> None:
    wanted = given.get("report_to")
    to = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if "wandb" in to:
        job.set("wandb", {"project": given.get("project") or "hone"})
    for other in to:
        if other not in ("wandb", "none", "all"):
            job.ignored["report_to"] = f"{other!r}; metrics are in the run folder, or in W&B"


def _optimizer(given: Values, job: Translation) -> None:
    name = getattr(given.get("optim"), "value", given.get("optim"))
    if name is not None and not str(name).startswith("adamw"):
        job.refused["optim"] = f"{name!r}; the optimizer is AdamW"


JOINT: dict[Callable[[Values, Translation], None], tuple[tuple[str, ...], str]] = {
    _batches: (
        BATCHES[:-1],
        "`sampling.prompts_per_step`, `training.minibatches`: they count completions, as in TRL "
        "with one device; `batch_size` counts prompts",
    ),
    _steps: (
        (
            "max_steps",
            "num_iterations",
            "eval_steps",
            "save_steps",
            "save_strategy",
            "warmup_steps",
            "warmup_ratio",
        ),
        "`steps`, `training.epochs`, `evaluation.every`, `checkpoints.every`, "
        "`training.warmup_steps`: they count updates; a step is a batch, which may have several",
    ),
    _clipping: (
        ("loss_type", "epsilon", "epsilon_high"),
        "`training.loss`, `clip_low`, `clip_high`; without `epsilon_high` both are `epsilon`; for "
        '"cispo" `epsilon_high` - 1',
    ),
    _normalized: (
        ("multi_objective_aggregation",),
        '`advantages.combine`; "normalize_then_sum" has `advantages.std` "group", as in TRL',
    ),
    _evaluated: (
        ("num_generations_eval",),
        "`evaluation.samples`, at `temperature` (`evaluation.temperature`), as in TRL",
    ),
    _kl: (("use_bias_correction_kl",), '`training.kl` = "k3_true", if `beta` is above 0'),
    _correction: (
        (
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_min",
        ),
        "`correction.method`, `high`, `low`",
    ),
    _lora: (
        ("use_lora", "use_peft", "peft_config", *LORA),
        "`[lora]`; without `target_modules` every linear layer, where peft takes a few, mostly "
        "q_proj and v_proj",
    ),
    _precision: (
        ("bf16", "model_init_kwargs"),
        '`training.dtype` ("auto": bfloat16 where the hardware computes in it), `model_revision`, '
        "`memory.attention`",
    ),
    _least_rate: (("lr_scheduler_kwargs",), "`training.min_learning_rate`"),
    _generation: (("generation_kwargs",), "`[sampling]`"),
    _reports: (("report_to", "project"), '`[wandb]`, where it names "wandb"'),
    _optimizer: (("optim",), "none: it is AdamW"),
}

JOINT_NAMES = {name: text for names, text in JOINT.values() for name in names}

SECTIONS_AND_KEYS = frozenset(Job.model_fields) - {"request"}
"""Keys of the job itself, and its sections as dicts."""


def translate(given: Values) -> Translation:
    """Returns the job's keys for these parameters; None says nothing. The job's own sections go
    over what other names say. Raises BadRequest for a value that cannot be converted."""
    given = {name: value for name, value in given.items() if value is not None}
    job = Translation()
    for name, value in given.items():
        _translate_one(name, value, job)
    for function in JOINT:
        function(given, job)
    for name in given.keys() & SECTIONS_AND_KEYS - SAME.keys():
        _merge(job.job, {name: given[name]})
    return job


def _translate_one(name: str, value: Any, job: Translation) -> None:
    if name in SAME:
        job.set(SAME[name], value)
    elif name in CONVERTED:
        try:
            job.set(CONVERTED[name].key, CONVERTED[name].of(value))
        except (BadRequest, TypeError, ValueError) as error:
            wanted = error.detail if isinstance(error, BadRequest) else "expected a number"
            raise BadRequest(f"{name} is {shown(value)}; {wanted}") from error
    elif name in REFUSED:
        neutral, why = REFUSED[name]
        if value not in neutral:
            job.refused[name] = f"{shown(value)}: {why}"
    elif name in WITHOUT_EFFECT:
        job.ignored[name] = WITHOUT_EFFECT[name]
    elif name not in JOINT_NAMES and name not in SECTIONS_AND_KEYS:
        job.unknown.append(name)


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            into[name] = value


def check(job: Translation, what: str) -> None:
    """Raises BadRequest for each name that is unknown, with the nearest, or refused. `what` is who
    was given them."""
    faults = [f"{name!r} is unknown{_nearest(name)}" for name in job.unknown]
    faults += [f"{name} is {why}" for name, why in job.refused.items()]
    if faults:
        raise BadRequest(f"{what}: {'; '.join(faults)}")


def _nearest(name: str) -> str:
    known = {*SAME, *CONVERTED, *REFUSED, *JOINT_NAMES, *SECTIONS_AND_KEYS}
    found = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def given_by(config: Any) -> dict[str, Any]:
    """Returns the parameters of a dataclass of arguments, such as a `trl.GRPOConfig`: the names
    that say what is learned, and refused names where they are not at their defaults."""
    if not dataclasses.is_dataclass(config):
        raise BadRequest(
            f"args is {shown(config)}; expected a trl.GRPOConfig, or parameters by name"
        )
    known = {*SAME, *CONVERTED, *JOINT_NAMES, "seed", "use_vllm"}
    values = {each.name: (getattr(config, each.name), each) for each in dataclasses.fields(config)}
    return {
        name: value
        for name, (value, each) in values.items()
        if value is not None and (name in known or (name in REFUSED and value != each.default))
    }
