"""Conversions of verl's values that look at several of its keys."""

from __future__ import annotations

from typing import Any

from hone.importing import converting
from hone.importing.converting import (
    BATCH_STD,
    KL_IN_REWARD,
    KL_OF_TOKENS,
    MOST_REFILLS,
    correct,
    own_reward,
    token_mean,
)
from hone.importing.table import LacksError, Said, Values

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))

ESTIMATORS = {
    "grpo": ("mean", "group"),
    "grpo_vectorized": ("mean", "group"),
    "gdpo": ("mean", "group"),
    "rloo": ("leave_one_out", "none"),
    "rloo_vectorized": ("leave_one_out", "none"),
    "reinforce_plus_plus_baseline": ("mean", Said("batch", BATCH_STD)),
}


WHITENED = "there the sum's mean and deviation are over all tokens, here over completions"


def estimator(value: Any, values: Values) -> Any:
    if value not in ESTIMATORS:
        raise LacksError(f"the estimators here are {', '.join(ESTIMATORS)}")
    baseline, std = ESTIMATORS[value]
    if std == "group" and not values["algorithm.norm_adv_by_std_in_grpo"]:
        std = "none"
    return baseline, std, Said("normalize_then_sum", WHITENED) if value == "gdpo" else None


def minibatches(_: Any, values: Values) -> Any:
    return converting.minibatches(
        values["data.train_batch_size"], values[f"{ACTOR}ppo_mini_batch_size"], "prompts"
    )


def averaged(mode: Any, values: Values) -> Any:
    if mode == "token-mean":
        return token_mean(minibatches(None, values))
    if mode == "seq-mean-token-sum":
        return Said("dr_grpo", "here divided by sampling.max_tokens, there not")
    known = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
    if mode not in known:
        raise LacksError("no loss is averaged so; nearest is 'dapo'")
    return known[mode]


def loss(mode: Any, values: Values) -> Any:
    averages = averaged(values[f"{ACTOR}loss_agg_mode"], values)
    if mode == "vanilla":
        return averages
    if mode == "cispo":
        return Said("cispo", "there the weight has a lower bound too, and loss_agg_mode counts")
    if mode in ("gspo", "sapo"):
        differs = values.get(f"{ACTOR}use_kl_loss") and averages != "grpo"
        return Said(mode, KL_OF_TOKENS if differs else "")
    raise LacksError("the losses here are vanilla, gspo, sapo and cispo of them")


def clip_low(value: Any, values: Values) -> Any:
    return None if values[f"{ACTOR}policy_loss.loss_mode"] == "cispo" else value


def dual_clip(value: Any, values: Values) -> Any:
    return value if values[f"{ACTOR}policy_loss.loss_mode"] == "vanilla" else None


KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_loss(value: Any, values: Values) -> Any:
    if not value:
        return None
    kind = values[f"{ACTOR}kl_loss_type"]
    straight = kind.endswith("+")
    if kind.removesuffix("+") not in KL:
        raise LacksError(f"the estimates are {', '.join(KL)}, not {kind!r}")
    return values[f"{ACTOR}kl_loss_coef"], "k3_true" if straight else KL[kind]


KL_SCORED = f"{KL_IN_REWARD}, and not divided by the group's deviation as there"


def kl_reward(value: Any, values: Values) -> Any:
    if not value:
        return None
    if values.get(f"{ACTOR}use_kl_loss"):
        raise LacksError("a job has one KL divergence: see use_kl_loss")
    return values["algorithm.kl_ctrl.kl_coef"], Said("k3_true", KL_SCORED)


def correction(value: Any, values: Values) -> Any:
    bounds = str(values.get("algorithm.rollout_correction.rollout_is_threshold") or 2.0)
    *low, high = (float(part) for part in bounds.split("_"))
    if low and value == "sequence":
        return correct("sequence_mask", low[0], high)
    if low:
        return correct("icepop", low[0], high)
    return correct({"token": "token_tis", "sequence": "sequence_tis"}[value], None, high)


def max_model_len(value: Any, values: Values) -> Any:
    return value + values["data.max_response_length"]


CUT = {"left": "truncate", "error": "error"}


def cut(value: Any, values: Values) -> Any:
    if values.get("data.filter_overlong_prompts"):
        return "drop"
    if value not in CUT:
        raise LacksError(f"prompts are cut off at the left, not {value!r}")
    return CUT[value]


def overlong(value: Any, values: Values) -> Any:
    prefix = next(
        f"{name}.reward_kwargs.overlong_buffer_cfg."
        for name in ("reward", "reward_model")
        if f"{name}.reward_kwargs.overlong_buffer_cfg.enable" in values
    )
    if not value:
        return None
    penalty = values.get(f"{prefix}penalty_factor", 1.0)
    return converting.overlong(values[f"{prefix}len"], values["data.max_response_length"], penalty)


SIGNATURE = "compute_score(data_source, solution_str, ground_truth, extra_info)"


def reward(path: Any, values: Values) -> Any:
    key = "custom_reward_function.name"
    return own_reward(SIGNATURE, values.get(f"reward.{key}") or values.get(key))(path, values)


def packing(value: Any, values: Values) -> Any:
    """PrefixGrouper there computes prompts once in padded rows; here padded rows share none."""
    if value or values.get(f"{ACTOR}use_prefix_grouper"):
        return None
    return Said("off", "padded rows share no prompts")


def lora(value: Any, values: Values) -> Any:
    if not value:
        return None
    modules = converting.modules(values[f"{MODEL}target_modules"])
    return value, float(values[f"{MODEL}lora_alpha"]), modules


def megatron_lora(value: Any, values: Values) -> Any:
    if not value:
        return None
    alpha, dropout = (values.get(f"{MODEL}lora.{name}") for name in ("alpha", "dropout"))
    return value, float(alpha or 32), dropout or None


def megatron_schedule(value: Any, values: Values) -> Any:
    if value not in ("constant", "linear", "cosine"):
        raise LacksError("training.schedule is constant, linear or cosine")
    return value, None if value == "constant" else values.get(f"{ACTOR}optim.min_lr") or None


def staleness(value: Any, values: Values) -> Any:
    if value == "sync":
        return None
    note = "the versions that a completion may span there; older ones are dropped"
    most = Said(min(values["trainer.v1.sampler.max_off_policy_threshold"], 64), note)
    corrects = values.get("algorithm.rollout_correction.rollout_is")
    return most, None if corrects else Said("none", "as there, where rollout_is is not set")


def evaluated(value: Any, values: Values) -> Any:
    return float(value) if values[f"{ROLLOUT}val_kwargs.do_sample"] else 0.0


def wandb(value: Any, values: Values) -> Any:
    used = "wandb" in ([value] if isinstance(value, str) else value)
    if not used:
        return None
    return values["trainer.project_name"], values.get("trainer.experiment_name")


def refills(value: Any, values: Values) -> Any:
    if not value:
        return None
    rounds = values.get("algorithm.filter_groups.max_num_gen_batches") or MOST_REFILLS
    return Said(
        min(rounds, MOST_REFILLS), "a group without signal is one whose rewards are all equal"
    )
