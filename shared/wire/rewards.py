"""Completions to grade, and their scores: `POST /score`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, FailFast, Field

from shared.documented import Plain
from shared.job import RewardSpec
from shared.wire.base import JobId, Message, Wire
from shared.wire.packed import Logprobs
from shared.wire.rollouts import FinishReason, Prompt, RolloutGroup


class ScoreItem(Wire):
    """One completion to grade. `row` holds the dataset's columns, which graders take as keyword
    arguments.

    `num_tokens` is the completion's length in tokens, for graders of length. `messages` are a
    conversation after its prompt, whose last answer is the completion, and `info` is what its
    environment said. `prompt_end` is the end of the text that the completion follows, as the chat
    template wrote it; None: not known.
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
body, it does nothing else."""

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
"""How a grading went. The last three have no value: not applicable, the sandbox failed, the grader
failed."""


class Part(Wire):
    """One grader's verdict on one completion. `value` None: not applicable (`verdict` "skipped") or
    missing ("sandbox_error", "error"), which is never an invented 0.

    `detail` is the reason in a few words: the program's value, or its error. `stdout` is the end of
    its output. `seconds` is the time it took, and `cached` says that the verdict came from a cache.
    `errors` are OpenAI's names of grader errors ("python_grader_runtime_error",
    "model_grader_refusal_error", ...); together with a value: the grader failed on this text but
    not on the row's other texts, and the value is the lowest of theirs. `sub` are the values of a
    combined grader's parts, by name, and `tokens` the tokens that judges used, by model (0 from the
    cache).
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
    """One score per item, in the order asked."""

    scores: tuple[Score, ...]


class ScoredItem(Wire):
    """A line of a streamed `/score`: the item at `index` is graded by every reward. Lines come in
    the order of completion."""

    index: int
    score: Score


class ScoredGroup(Wire):
    """A prompt, its completions and their scores, `[G]` each. If they were sampled and scored
    elsewhere, rollouts without log-probs are taken to be the trainer's own."""

    prompt: Prompt
    group: RolloutGroup
    scores: tuple[Score, ...]
