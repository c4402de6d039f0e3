"""Graders by themselves (`/graders`), and programs in their sandbox (`POST /execute`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from shared.documented import Plain
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire.base import Wire
from shared.wire.rewards import MAX_CHECKED_PROMPTS, MAX_COLUMNS, MAX_REWARDS, Part
from shared.wire.rollouts import Prompt


class GraderInfo(Wire):
    """A registered grader and the JSON schema of its `params`."""

    name: str
    description: str
    params: dict[str, Any]


class GraderList(Wire):
    graders: tuple[GraderInfo, ...]


class ValidateRequest(Wire):
    """`POST /graders/validate`: would these rewards work on rows with these `columns`? 422 with
    sentences if not. None: the columns are not known, and every column counts as present.

    `prompts` are a handful of the job's; a row with which no completion could be graded is refused
    too.
    """

    rewards: tuple[RewardSpec, ...] = Field(max_length=MAX_REWARDS)
    columns: tuple[str, ...] | None = Field(default=None, max_length=MAX_COLUMNS)
    prompts: tuple[Prompt, ...] = Field(default=(), max_length=MAX_CHECKED_PROMPTS)


class Validated(Wire):
    rewards: tuple[str, ...]


class TryRequest(Wire):
    """`POST /graders/try`: these rewards' values for an empty completion of each of the `prompts`,
    and for the row's own reference answer."""

    rewards: tuple[RewardSpec, ...] = Field(min_length=1, max_length=MAX_REWARDS)
    prompts: tuple[Prompt, ...] = Field(min_length=1, max_length=MAX_CHECKED_PROMPTS)


class TriedReward(Wire):
    """A reward's mean value for empty completions, and for the reference answers of the
    `num_references` rows that have one. None: no value. `full_mark` is the value of a right
    completion, if known. `why` is the grader's detail for the first reference below the full mark
    or for an empty completion, or says why nothing was tried."""

    reward: str
    empty: float | None = None
    reference: float | None = None
    num_references: int = 0
    full_mark: float | None = None
    why: str = ""


class Tried(Wire):
    """One entry per reward, in the order asked."""

    rewards: tuple[TriedReward, ...]


class GraderRunRequest(Wire):
    """`POST /graders/run`, in OpenAI's shape: one completion (`model_sample`) of the row `item`,
    graded by one grader.

    `grader` has a `type` (any grader's name), perhaps a `name`, and its params beside them.
    """

    grader: dict[str, Plain]
    model_sample: str
    item: dict[str, Plain] = {}


class GraderErrors(Wire):
    """What went wrong, by OpenAI's names. All false: nothing did."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False


class GraderRunMetadata(Wire):
    """`execution_time` is in seconds. `part` is Hone's own verdict; OpenAI has none."""

    name: str
    type: str
    execution_time: float
    errors: GraderErrors
    part: Part
    scores: dict[str, float] = {}
    token_usage: int | None = None
    sampled_model_name: str | None = None


class GraderRun(Wire):
    """`reward` None: missing or not applicable, as `metadata` says."""

    reward: float | None
    metadata: GraderRunMetadata
    sub_rewards: dict[str, float] = {}
    model_grader_token_usage_per_model: dict[str, Any] = {}


class ExecuteRequest(Wire):
    """`POST /execute`: runs `code` in the sandbox. `expression`, if given, is evaluated after it
    and its value returned.

    `inputs` are bound as globals first. Limits: seconds of CPU time (`cpu_s`), of wall clock
    (`timeout_s`), and of wall clock without work (`idle_s`: otherwise programs that sleep would
    keep others waiting), MiB of memory.
    """

    code: str = ""
    expression: str | None = None
    inputs: dict[str, Plain] = {}
    stdin: str = ""
    cpu_s: float = Field(default=4.0, gt=0, le=600)
    timeout_s: float = Field(default=30.0, gt=0, le=600)
    idle_s: float = Field(default=3.0, gt=0, le=600)
    memory_mib: int = Field(default=512, ge=16, le=8192)


class Execution(Wire):
    """How a program ended. `verdict` "ok" means that it ran to its end; `value` is then the value
    of `expression`, as plain data."""

    verdict: Literal[
        "ok", "runtime_error", "time_limit", "memory_limit", "output_limit", "sandbox_error"
    ]
    value: Any = None
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0


def reward_of(grader: Mapping[str, Any]) -> RewardSpec:
    """Returns the object as a reward of a job. Raises BadRequest if `type` cannot be a grader's
    name: a job's own code is a file, not an object."""
    kind, name = grader.get("type"), grader.get("name")
    if not isinstance(kind, str) or kind == "function":
        raise BadRequest(
            f"'grader.type' is {kind!r:.80}; expected the name of a grader, for example "
            "'string_check'"
        )
    if not isinstance(name, str | None):
        raise BadRequest(f"'grader.name' is {name!r:.80}; expected text")
    params = {key: value for key, value in grader.items() if key not in ("type", "name")}
    return RewardSpec(grader=kind, name=name or None, params=params)
