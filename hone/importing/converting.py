"""Conversions and reasons that several trainers share."""

from __future__ import annotations

from typing import Any

from hone.importing.table import Convert, FillIn, LacksError, Said, Values

COUNTED_BY_TOKENS = "micro-batches are bounded by memory.micro_batch_tokens"
CRITIC = "there is no value model: a completion is compared with its group"
GPUS = "the trainer takes the GPUs of its host, a sampler its own: docs/docker.md"
OTHER_PLACE = "how that trainer works inside"
SINGLE_TURN = "a job samples one completion for a prompt; agents in the loop are not there yet"
NO_ENTROPY = "there is no entropy bonus; training.clip_high keeps entropy up"
NO_ROUTERS = "there is no loss of routers"
ALL_TOKENS = "an evaluation samples from all tokens; see evaluation.temperature"
ADAMW = "the optimizer is AdamW"
KL_IN_REWARD = (
    "in the reward there, so that a token answers for the KL of all later tokens too; here in the "
    "loss, for its own alone"
)
KL_OF_TOKENS = "there the KL in the loss is a mean over tokens, here as the loss is"
BATCH_STD = "there the advantages of all tokens are divided, here by the rewards' deviation"
ACCEPTED = 'there the trainer\'s log-probs are over the whole vocabulary too, hence "accept"'
MOST_REFILLS = 10


def either(value: Any, _: Values) -> Any:
    """Returns the value for both keys, such as a clip range of both sides."""
    return value, value


def pair(value: Any, _: Values) -> Any:
    return tuple(value)


def minibatches(sampled: float, trained: float, what: str) -> Any:
    """Returns how many optimizer steps a batch is cut into, if one takes `trained` of `sampled`."""
    count = max(round(sampled / trained), 1)
    if count * trained == sampled or count == 1 == sampled:
        return count
    return Said(count, f"{sampled:g} {what} in batches of {trained:g} there")


def token_mean(num_minibatches: Any) -> str:
    """Returns the loss that is a mean over an optimizer step's tokens. With one step per batch
    "dapo" is the same."""
    count = num_minibatches.value if isinstance(num_minibatches, Said) else num_minibatches
    return "dapo" if count == 1 else "bnpo"


def one_source(value: Any, _: Values) -> Any:
    """Returns the data set, if it is one."""
    names = [value] if isinstance(value, str) else list(value)
    if len(names) == 1 and "," not in names[0]:
        return names[0]
    return FillIn(f"{value!r} are several; join them in one file, or take evaluation.sets")


def own_reward(signature: str, function: str | None = None) -> Convert:
    """Returns the conversion of a file with a reward function of another signature."""

    def convert(value: Any, _: Values) -> Any:
        if not str(value).endswith(".py"):
            raise LacksError("a reward is a grader or Python code; a grader may ask an endpoint")
        name = function or signature.partition("(")[0]
        why = f"write it as `reward(completions, **columns)`; there it is {signature}"
        return Said({"file": value, "function": name}, why)

    return convert


def overlong(buffer: Any, max_tokens: Any, penalty: Any) -> Any:
    """Returns the reward that takes DAPO's overlong penalty from long completions."""
    if max_tokens is None:
        return FillIn("the grader `overlong` needs max_tokens")
    sizes = {"max_tokens": int(max_tokens), "buffer_tokens": int(buffer)}
    params = sizes | {"penalty": float(penalty)}
    return {"grader": "overlong", "shaping": True, "params": params}


def prompt_column(name: Any, _: Values) -> Any:
    """Returns `data.columns` for the column of the prompts."""
    return None if name == "prompt" else {"prompt": name}


def positive(value: Any, _: Values) -> Any:
    return value if value > 0 else None


DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "fp32": "float32", "float32": "float32"}


def dtype(value: Any, _: Values) -> str:
    if value not in DTYPES:
        raise LacksError('training.dtype is "bfloat16", "float32" or "auto"')
    return DTYPES[value]


def modules(targets: Any) -> Any:
    """Returns LoRA's targets: a list, or "all-linear"."""
    is_one = isinstance(targets, str) and targets != "all-linear"
    return [targets] if is_one else targets


def accepted(value: Any, _: Values) -> Any:
    """Returns a bound on sampled tokens, such as top_p, and that the trainer does not follow it."""
    is_bounded = value not in (0, 1, -1)
    return value, Said("accept", ACCEPTED) if is_bounded else None


def top_k(value: Any, _: Values) -> Any:
    return accepted(max(value, 0), _)


def attention(value: Any, _: Values) -> Any:
    if value in ("auto", "eager", "sdpa", "flash_attention_2"):
        return value
    raise LacksError("memory.attention is auto, eager, sdpa or flash_attention_2")


def every(value: Any, _: Values) -> Any:
    """Returns the steps between two evaluations. Less than 1 means never, and has no key."""
    if value < 1:
        raise LacksError("leave data.eval out for no evaluation")
    return value


def only_last(value: Any, _: Values) -> int:
    """Returns the steps between two checkpoints; 0, only the last, for less than 1."""
    return max(int(value), 0)


def warmup_share(steps: str | None) -> Convert:
    """Returns the conversion of a share of the steps, whose number the key `steps` has; rounded
    down, as verl does."""

    def convert(value: Any, values: Values) -> Any:
        if not value:
            return None
        if steps is None or not values.get(steps):
            return FillIn(
                f"{value:g} of the steps there; here a number of steps, and "
                "`hone submit --dry-run` says how many steps the job has"
            )
        return int(value * values[steps])

    return convert


def least_rate(schedules: dict[str, str], ratio: str, rate: str) -> Convert:
    """Returns the conversion of a schedule's name to schedule and least rate."""

    def convert(value: Any, values: Values) -> Any:
        if value not in schedules:
            raise LacksError(f"training.schedule is one of {', '.join(schedules.values())}")
        name = schedules[value]
        least = 0.0 if name == "constant" else (values.get(ratio) or 0.0) * values[rate]
        return name, least or None

    return convert


def correct(
    method: str, low: Any = None, high: Any = None, note: str = "", ratio: str | None = None
) -> tuple[Any, ...]:
    """Returns values of correction.method, .sequence_ratio, .low and .high."""
    return Said(method, note), ratio, low, high
