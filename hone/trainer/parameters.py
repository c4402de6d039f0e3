"""The names that people use for GRPO, TRL's above all, as the job's keys.

Parameters that become a key alone or have no key are in `single.py`; those whose values
become keys together are here.

`hone.Trainer`, `hone import` and the table of docs/trainer.md are made from these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, cast, get_args

from hone.trainer.single import (
    CONVERTED,
    REFUSED,
    SAME,
    WITHOUT_EFFECT,
    Translation,
    dtype,
    key_of,
    set_alone,
)
from shared.errors import BadRequest
from shared.explain import closest, elide
from shared.job import Job
from shared.job.learning import LEARNING_RATE, LORA_LEARNING_RATE
from shared.job.running import TrackerName

Values = Mapping[str, Any]
"""What was given, by name; nothing is None."""

GROUP_SIZE, PER_DEVICE = 8, 8
"""TRL's defaults."""


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"),
            *("steps_per_generation", "generation_batch_size", "num_generations", "group_size"),
        ),
        lambda value: _is_number(value) and value >= 1 and value == int(value),
        "a whole number from 1 on",
    ),
    (("max_steps",), lambda value: _is_number(value) and value == int(value), "a whole number"),
    (
        ("eval_steps", "save_steps", "warmup_steps"),
        lambda value: _is_number(value) and value >= 0,
        "a number from 0 on",
    ),
    (("warmup_ratio",), lambda value: _is_number(value) and 0 <= value <= 1, "a share from 0 to 1"),
    (("epsilon", "epsilon_high", "delta"), _is_number, "a number"),
    (("use_lora", "use_peft"), lambda value: isinstance(value, bool), "True or False"),
    (
        ("lr_scheduler_kwargs", "model_init_kwargs"),
        lambda value: isinstance(value, Mapping),
        "a dict",
    ),
    (
        ("report_to",),
        lambda value: isinstance(value, str | list | tuple),
        "a name or a list of names",
    ),
)
"""Names whose values are calculated with or looked into, which values can be, and in words."""


def check_kinds(given: Values) -> None:
    """Raises BadRequest for each value of another kind than its name's."""
    faults = [
        f"{name} is {elide(given[name])}; expected {expected}"
        for names, can_be, expected in KINDS
        for name in names
        if name in given and not can_be(given[name])
    ]
    if faults:
        raise BadRequest("; ".join(faults))


def _batches(given: Values, job: Translation) -> None:
    """TRL counts completions: a generation batch has `per_device_train_batch_size *
    steps_per_generation` of one device, and `gradient_accumulation_steps` of its parts make one
    update."""
    if not given.keys() & BATCHES:
        return
    accumulated = given.get("gradient_accumulation_steps") or 1
    if "batch_size" in given or "prompts_per_step" in given:
        job.ignored += [name for name in BATCHES if name in given]
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
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "generation_batch_size"),
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
    _intervals(given, job, updates)
    _warmup(given, job, updates)


def _intervals(given: Values, job: Translation, updates: int) -> None:
    """A number below 1 is a share of `max_steps`, rounded up as in transformers. Only the strategy
    "steps" of transformers counts `save_steps`."""
    strategy = given.get("save_strategy", "steps")
    strategy = getattr(strategy, "value", strategy)
    if strategy in ("no", False):  # YAML 1.1 takes no for false
        job.set("checkpoints.every", 0)
    elif strategy != "steps":
        job.refused["save_strategy"] = (
            f"{elide(strategy)}; expected 'steps' with save_steps, or 'no'; a job counts the steps "
            "between checkpoints, and checkpoints.keep_best keeps the best"
        )
    for name, key in (("eval_steps", "evaluation.every"), ("save_steps", "checkpoints.every")):
        every, max_steps = given.get(name), given.get("max_steps") or 0
        if every is None or (name == "save_steps" and strategy != "steps"):
            continue
        if 0 < every < 1 and max_steps > 0:
            every = math.ceil(every * max_steps)
        if every < 1:
            job.refused[name] = f"{every}; expected 1 or more, or a share with max_steps beside it"
        else:
            job.set(key, max(round(every / updates), 1))


def _warmup(given: Values, job: Translation, updates: int) -> None:
    """The schedule "constant" of transformers has no warm-up, whatever these say."""
    name = given.get("lr_scheduler_type")
    if getattr(name, "value", name) == "constant":
        return
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
    ratio itself by `epsilon_high`, a job's by 1 + clip_high. Its `delta` bounds the ratio where the
    advantage is positive too, which changes nothing from 1 + `epsilon_high` on."""
    loss, low = given.get("loss_type"), given.get("epsilon")
    if loss is not None:
        job.set("training.loss", loss)
    if low is not None and loss != "cispo":
        job.set("training.clip_low", low)
    if (high := given.get("epsilon_high", low)) is None:
        return
    if loss == "cispo":
        if high < 1:
            job.refused["epsilon_high"] = (
                f'{high:g} would bound the ratio of "cispo" below 1; expected 1 or more, 4 to 5 is '
                "usual"
            )
            return
        high = round(high - 1, 12)
    elif given.get("delta", 1 + high) < 1 + high:
        job.refused["delta"] = f"{given['delta']:g}; expected 1 + epsilon_high or more"
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


NO_BOUND = {"vllm_importance_sampling_clip_max": 1e9}
"""What None says of the names of which it says something."""


def _correction(given: Values, job: Translation) -> None:
    """TRL's bounds are 3 and none unless they are given; a job's depend on the method."""
    mode = given.get("vllm_importance_sampling_mode")
    if given.get("vllm_importance_sampling_correction") is False:
        job.set("correction.method", "none")
        return
    if mode is None or given.get("use_vllm") is False:
        return
    if mode not in [*CORRECTIONS]:
        raise BadRequest(
            f"vllm_importance_sampling_mode is {mode!r}; expected one of "
            f"{', '.join(map(repr, CORRECTIONS))}"
        )
    job.set("correction.method", CORRECTIONS[mode])
    job.set("correction.high", 3.0)
    if mode == "token_mask":
        job.set("correction.low", 0.0)
    for name, key in (
        ("vllm_importance_sampling_clip_max", "correction.high"),
        ("vllm_importance_sampling_cap", "correction.high"),  # its older name
        ("vllm_importance_sampling_clip_min", "correction.low"),
    ):
        if name in given:
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
LORA_NEUTRAL: dict[str, Any] = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "exclude_modules": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
}
"""Fields of peft's LoraConfig whose other values change what is learned."""


def _lora(given: Values, job: Translation) -> None:
    config = given.get("peft_config")
    if given.get("use_lora") is False or given.get("use_peft") is False:
        return
    fields = {name: given[name] for name in LORA if name in given}
    if config is not None:
        if not hasattr(config, "r") or getattr(config, "peft_type", "LORA") != "LORA":
            raise BadRequest(f"peft_config is {elide(config)}; expected a peft.LoraConfig")
        own = {name: getattr(config, name, None) for name in LORA}
        fields |= {name: value for name, value in own.items() if value is not None}
        for name, neutral in LORA_NEUTRAL.items():
            if (value := getattr(config, name, neutral)) != neutral:
                job.refused[f"peft_config.{name}"] = f"{elide(value)}; expected {neutral!r}"
    if not (fields or config is not None or given.get("use_lora") or given.get("use_peft")):
        return
    lora = {
        LORA[name]: sorted(cast(set[str], value)) if isinstance(value, set) else value
        for name, value in fields.items()
    }
    job.set("lora", job.job.get("lora", {}) | lora)


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
            job.set(names[name], dtype(value) if "dtype" in name else value)
        elif value not in (None, False):
            job.refused[f"model_init_kwargs.{name}"] = f"{elide(value)} has no key of the job"


def _least_rate(given: Values, job: Translation) -> None:
    options = dict(given.get("lr_scheduler_kwargs") or {})
    if "min_lr" in options:
        job.set("training.min_learning_rate", options.pop("min_lr"))
    rate = options.pop("min_lr_rate", None)
    if rate is not None and not _is_number(rate):
        options["min_lr_rate"] = rate
    elif rate is not None:
        usual = LORA_LEARNING_RATE if "lora" in job.job else LEARNING_RATE
        peak = job.job.get("training", {}).get("learning_rate", usual)
        if _is_number(peak):
            job.set("training.min_learning_rate", rate * peak)
    if options:
        wanted = "expected the number min_lr or min_lr_rate"
        job.refused["lr_scheduler_kwargs"] = f"{elide(options)}; {wanted}"


def _reports(given: Values, job: Translation) -> None:
    wanted = given.get("report_to")
    to = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if "wandb" in to:
        job.set("wandb", {"project": given.get("project") or "hone"})
    if trackers := [name for name in to if name in get_args(TrackerName)]:
        job.set("trackers", trackers)
    if not {*to} <= {"wandb", "none", "all", *trackers}:
        job.ignored.append("report_to")


JOINT: dict[Callable[[Values, Translation], None], tuple[tuple[str, ...], str]] = {
    _batches: (
        BATCHES,
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
        "`training.warmup_steps`: they count updates; a step is a batch, which may have several; "
        'the schedule "constant" has no warm-up, "constant_with_warmup" has',
    ),
    _clipping: (
        ("loss_type", "epsilon", "epsilon_high"),
        "`training.loss`, `clip_low`, `clip_high`; without `epsilon_high` both are `epsilon`; for "
        '"cispo" `epsilon_high` - 1; "bnpo" is a mean over the tokens of an update, in TRL of each '
        "of its parts",
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
    _reports: (("report_to", "project"), '`[wandb]`, where it names "wandb"; `trackers`'),
}

JOINT_NAMES = {name: text for names, text in JOINT.values() for name in names}


# --- all names -----------------------------------------------------------------------------------

SECTIONS_AND_KEYS = frozenset(Job.model_fields) - {"request"}
"""Keys of the job itself, and its sections as dicts."""


def translate(given: Values) -> Translation:
    """Returns the job's keys for these parameters; None says nothing. The job's own sections go
    over what other names say. Raises BadRequest for a value that cannot be converted."""
    said = {name: NO_BOUND.get(name) if each is None else each for name, each in given.items()}
    given = {name: value for name, value in said.items() if value is not None}
    check_kinds(given)
    job = Translation()
    for name, value in given.items():
        _translate_one(name, value, job)
    for function, (names, _) in JOINT.items():
        try:
            function(given, job)
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            said = ", ".join(f"{name} {elide(given[name])}" for name in names if name in given)
            raise BadRequest(f"{said} cannot be converted together: {error}") from error
    _merge(job.job, {name: given[name] for name in given.keys() & SECTIONS_AND_KEYS - SAME.keys()})
    return job


def _translate_one(name: str, value: Any, job: Translation) -> None:
    if key_of(name):
        set_alone(name, value, job)
    elif name in REFUSED:
        neutral, why = REFUSED[name]
        if value not in neutral:
            job.refused[name] = f"{elide(value)}: {why}"
    elif name in WITHOUT_EFFECT:
        job.ignored.append(name)
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


OWN = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "reward_weights", "mode")
"""Parameters of the Trainer beside these."""


def _nearest(name: str) -> str:
    whole = next((own for own in OWN if f"_{name}" in own), None)
    known = whole or closest(
        name, [*OWN, *SAME, *CONVERTED, *REFUSED, *JOINT_NAMES, *SECTIONS_AND_KEYS]
    )
    return f"; did you mean {known!r}?" if known else ""


def explicit_parameters(config: Any) -> dict[str, Any]:
    """Returns the parameters of a dataclass of arguments, such as a `trl.GRPOConfig`: the names
    that say what is learned, and refused names where they are not at their defaults."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise BadRequest(
            f"args is {elide(config)}; expected a trl.GRPOConfig, or parameters by name"
        )
    known = {*SAME, *CONVERTED, *JOINT_NAMES, "seed", "use_vllm"}
    values = {each.name: (getattr(config, each.name), each) for each in dataclasses.fields(config)}
    return {
        name: value
        for name, (value, each) in values.items()
        if (value is not None or name in NO_BOUND)
        and (name in known or (name in REFUSED and value != each.default))
    }
