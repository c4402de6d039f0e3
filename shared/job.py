"""The job: what to train, as one TOML file. Where it runs is in `config.py`; the two never mix.

`load_job` reads a file, applies `--set a.b=c`, inlines the reward functions it names, and explains every mistake with the
key, the value and the nearest valid key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import BadRequest
from shared.explain import sentences

JOB_ID = r"^[a-z0-9][a-z0-9_-]{0,62}$"
"""Ids and names end up in paths and URLs, so they are made of these characters only."""

MAX_SOURCE_BYTES = 1 << 20


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSpec(Section):
    """Training and held-out problems: a `.jsonl`, `.json`, `.csv` or `.parquet` file on the orchestrator's host, or a
    Hugging Face dataset id with its split.

    `prompt_column` holds a string, or a list of chat messages, which the model's chat template renders. A string is sent as
    it is unless `system_prompt` is set, which makes a system and a user message of it.
    """

    train: str
    train_split: str = "train"
    eval: str | None = None
    eval_split: str = "test"
    config: str | None = None
    revision: str | None = None
    prompt_column: str = "prompt"
    system_prompt: str | None = None


class SamplingSpec(Section):
    """A step samples `group_size` completions for each of `prompts_per_step` prompts, of up to `max_tokens` tokens."""

    prompts_per_step: int = Field(default=32, ge=1)
    group_size: int = Field(default=8, ge=1, le=1024)
    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()


class RewardSpec(Section):
    """One reward. `grader` names a registered one, which takes `params`; or `file` and `function` name your own.

    Your own is a Python function as TRL has it: `def reward(completions, **kwargs) -> list[float]`, with the dataset's
    columns as keyword arguments. `load_job` sends the file's text along as `source`.
    """

    grader: str = "function"
    name: str | None = None
    weight: float = 1.0
    params: dict[str, Any] = {}
    file: str | None = None
    function: str = "reward"
    source: str | None = Field(default=None, max_length=MAX_SOURCE_BYTES)

    @property
    def label(self) -> str:
        """What metrics and stored rollouts call this reward."""
        return self.name or (self.function if self.grader == "function" else self.grader)

    @model_validator(mode="after")
    def _function_needs_source(self) -> RewardSpec:
        if self.grader == "function" and self.file is None and self.source is None:
            raise ValueError('a reward needs either grader = "..." or file = "your_rewards.py"')
        return self


class TrainingSpec(Section):
    """The update. Defaults are the usual ones for 0.5B to 8B models.

    `loss`: "dapo" (mean over all tokens of the step, arXiv 2503.14476) or "grpo" (mean over sequences of each one's token
    mean, arXiv 2402.03300). `clip_low`, `clip_high` bound the importance ratio to `[1 - low, 1 + high]`. `advantage_std`
    "group" divides a group's advantages by its standard deviation, "none" does not. `micro_batch_tokens` bounds the padded
    tokens of one forward pass, and so memory; it never changes the result.
    """

    loss: Literal["dapo", "grpo"] = "dapo"
    learning_rate: float = Field(default=1e-6, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0)
    advantage_std: Literal["group", "none"] = "group"
    micro_batch_tokens: int = Field(default=16384, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class EvaluationSpec(Section):
    """Held-out accuracy: `num_prompts` problems of `data.eval` every `every` steps, and always before and after training.

    `temperature` 0 is greedy decoding. `num_prompts` None takes all of them.
    """

    every: int = Field(default=50, ge=1)
    num_prompts: int | None = Field(default=None, ge=1)
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)


class CheckpointSpec(Section):
    """Checkpoints every `every` steps; 0 writes only the last one."""

    every: int = Field(default=0, ge=0)


class WandbSpec(Section):
    """Log to Weights & Biases. The key comes from the orchestrator's WANDB_API_KEY; "offline" needs none."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    tags: tuple[str, ...] = ()


class Job(Section):
    """Everything that is trained, by one name. `max_staleness` (steps) 0 samples and trains in turn; k >= 1 lets sampling
    run ahead, so that a batch is sampled by weights at most k steps old.
    """

    name: str = Field(pattern=JOB_ID, max_length=40)
    model: str
    model_revision: str | None = None
    steps: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    max_model_len: int | None = Field(default=None, gt=0)
    max_staleness: int = Field(default=0, ge=0, le=64)
    weight_sync: Literal["shm", "disk"] = "shm"
    data: DataSpec
    sampling: SamplingSpec = SamplingSpec()
    rewards: tuple[RewardSpec, ...] = Field(min_length=1)
    training: TrainingSpec = TrainingSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoints: CheckpointSpec = CheckpointSpec()
    wandb: WandbSpec | None = None

    @model_validator(mode="after")
    def _reward_names_differ(self) -> Job:
        labels = [reward.label for reward in self.rewards]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f'two rewards are called {twice[0]!r}; give one of them another name = "..."')
        return self


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job in the TOML file `path` with `overrides` ("a.b=c") applied and paths made absolute.

    Paths of data and model that exist relative to the working directory become absolute; others are taken as Hugging Face
    ids. Raises BadRequest with one sentence a fault.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadRequest(f"no job file at {str(path)!r}") from error
    except OSError as error:
        raise BadRequest(f"the job file {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(document, override)
    rewards: Any = document.get("rewards")
    for reward in rewards if _is_list(rewards) else []:
        if _is_table(reward) and reward.get("file") and reward.get("source") is None:
            reward["source"] = _source(Path(str(reward["file"])), path.parent)
    _absolute(document)
    return parse_job(document, where=str(path))


def parse_job(document: dict[str, Any], where: str = "job") -> Job:
    """Returns the job that `document` describes; raises BadRequest naming each fault and the nearest valid key."""
    try:
        return Job.model_validate(document)
    except ValidationError as error:
        faults = sentences(error, Job, where)
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def _apply(document: dict[str, Any], override: str) -> None:
    """Sets `a.b=c` in the document. The value is read as TOML (1e-4, true, [1, 2]) and else taken as text; a whole-number
    key steps into a list (`rewards.0.weight=2`)."""
    key, separator, text = override.partition("=")
    if not separator or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise BadRequest(f"--set {override!r}: expected KEY=VALUE, for example --set training.learning_rate=1e-5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.split(".")
    target: Any = document
    for part in parents:
        target = _child(target, part, override)
    if _is_list(target):
        target[_position(target, last, override)] = value
    else:
        target[last] = value


def _child(target: Any, part: str, override: str) -> Any:
    child: Any = target[_position(target, part, override)] if _is_list(target) else target.setdefault(part, {})
    if not _is_table(child) and not _is_list(child):
        raise BadRequest(f"--set {override!r}: {part!r} is {json.dumps(child, default=str)}, not a section")
    return child


def _position(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise BadRequest(f"--set {override!r}: {part!r} is not a position in a list of {len(items)}")
    return int(part)


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _source(file: Path, folder: Path) -> str:
    for candidate in (folder / file, file):
        if candidate.is_file():
            try:
                return candidate.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadRequest(f"the reward file {str(candidate)!r} cannot be read as text: {error}") from error
    raise BadRequest(f"no reward file at {str(file)!r}, looked for it in {str(Path.cwd())!r} and {str(folder)!r}")


def _absolute(document: dict[str, Any]) -> None:
    data = document.get("data")
    for section, key in ((document, "model"), (data, "train"), (data, "eval")):
        if _is_table(section) and isinstance(section.get(key), str) and Path(section[key]).exists():
            section[key] = str(Path(section[key]).resolve())
