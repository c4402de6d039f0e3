"""Completions to grade, and their scores (`POST /score`); graders without a job (`/graders`); and
programs in the sandbox (`POST /execute`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field

from shared.documented import Plain
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire.base import JobId, Message, Wire
from shared.wire.packed import Logprobs
from shared.wire.rollouts import FinishReason, Prompt, RolloutGroup


class ScoreItem(Wire):
    """One completion to grade. `row` holds the dataset's columns, which graders take as keyword
    arguments.

    `num_tokens` is the completion's length in tokens, for graders of length. `messages` are a
    conversation after its prompt, whose last answer is the completion, and `info` is its rollout's
    `info`, from the environment. `prompt_end` is the end of the text that the completion follows,
    as the chat template wrote it; None: not known.
    """

    prompt: str | tuple[Message, ...]
    completion: str
    prompt_end: str | None = None
    finish_reason: FinishReason = "stop"
    num_tokens: int | None = Field(default=None, ge=0)
    row: dict[str, Plain] = {}
    messages: tuple[Message, ...] = ()
    info: dict[str, Plain] = {}


MAX_SCORED_ITEMS = 4096
"""Most items of one request, four groups of the largest size: while the service reads or writes a
body, it answers no other request."""

MAX_REWARDS = 64

MAX_COLUMNS = 4096

MAX_CHECKED_PROMPTS = 64
"""Most prompts of one validate request; a job sends a handful."""

MAX_PARTS = 65_536
"""Most verdicts of one request, its items times its rewards: enough for a group of the largest size
with the most rewards."""


class ScoreRequest(Wire):
    """`POST /score`: every item graded by every reward. `job_id` names the job whose run folder may
    cache verdicts, and whose workers run its own functions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "items": [
                        {
                            "prompt": "12 47 -> 59:",
                            "completion": " 12+47",
                            "row": {"numbers": [12, 47], "target": 59},
                        }
                    ],
                    "rewards": [
                        {
                            "grader": "python_value",
                            "params": {"target": "target", "numbers": "numbers"},
                        }
                    ],
                }
            ]
        }
    )

    items: Annotated[tuple[ScoreItem, ...], FailFast()] = Field(max_length=MAX_SCORED_ITEMS)
    rewards: tuple[RewardSpec, ...] = Field(min_length=1, max_length=MAX_REWARDS)
    job_id: JobId | None = None


Verdict = Literal[
    "ok",
    "wrong",
    "runtime_error",
    "time_limit",
    "memory_limit",
    "output_limit",
    "skipped",
    "sandbox_error",
    "error",
]
"""The result of a grading. The last three have no value: not applicable, the sandbox failed, the
grader failed."""


class Part(Wire):
    """One grader's verdict on one completion. `value` None: not applicable (`verdict` "skipped") or
    missing ("sandbox_error", "error"), which is never an invented 0.

    `detail` is the reason in a few words: the program's value, or its error. `stdout` is the end of
    its output. `seconds` is the time it took, and `cached` says that the verdict is of an equal
    completion of the request, or of an earlier question to a judge. `errors` are OpenAI's names of
    grader errors ("python_grader_runtime_error", "model_grader_refusal_error", ...); together with
    a value: the grader failed on this text but not on the row's other texts, and the value is the
    lowest of theirs. `sub` are the values of a combined grader's parts, by name, and `tokens` the
    tokens that judges used, by model (0 if `cached`).
    """

    value: float | None
    verdict: Verdict = "ok"
    detail: str = ""
    stdout: str = ""
    seconds: float = 0.0
    cached: bool = False
    errors: tuple[str, ...] = ()
    sub: dict[str, float] = {}
    tokens: dict[str, int] = {}


class Score(Wire):
    """The reward of one completion: the weighted sum of its parts, or None where a part is missing
    (never an invented 0). `teacher_logprobs` are the log-probs that the job's `[teacher]`
    gives the tokens that the policy sampled, in nats, the branches' first; empty: none."""

    value: float | None
    parts: dict[str, Part]
    teacher_logprobs: Logprobs = Logprobs()


class ScoreResult(Wire):
    """One score per item, in the order of the request."""

    scores: tuple[Score, ...]


class ScoredGroup(Wire):
    """A prompt, its completions and their scores, `[G]` each. If they were sampled and scored
    elsewhere, rollouts without log-probs are taken to be the trainer's own."""

    prompt: Prompt
    group: RolloutGroup
    scores: tuple[Score, ...]


class GraderInfo(Wire):
    """A registered grader and the JSON schema of its `params`."""

    name: str
    description: str
    params: dict[str, Any]


class GraderList(Wire):
    graders: tuple[GraderInfo, ...]


class ValidateRequest(Wire):
    """`POST /graders/validate`: checks that these rewards work on rows with these `columns`; 422
    with the reasons if not. None: the columns are not known, and every column counts as present.

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
    or for an empty completion, or the reason why nothing was tried. `num_failed` of the completions
    that it was tried on failed, as by a time-out; `failure` is the first one's reason."""

    reward: str
    empty: float | None = None
    reference: float | None = None
    num_references: int = 0
    full_mark: float | None = None
    why: str = ""
    num_failed: int = 0
    failure: str = ""


class TriedRewards(Wire):
    """One entry per reward, in the order of the request."""

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
    """The errors of a grading, by OpenAI's names. All false: there was none."""

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
    """The end of a program. `verdict` "ok" means that it ran to its end; `value` is then the value
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
