"""Completions to grade, and what graders say of them: `POST /score`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field

from shared.job import RewardSpec
from shared.plain import Plain
from shared.wire.base import JobId, Message, Wire
from shared.wire.rollouts import FinishReason, Prompt, RolloutGroup


class ScoreItem(Wire):
    """One completion to grade. `row` holds the dataset's columns, which graders take as keyword
    arguments.

    `num_tokens` is the completion's length in tokens, for graders of length.
    """

    prompt: str | tuple[Message, ...]
    completion: str
    finish_reason: FinishReason = "stop"
    num_tokens: int | None = Field(default=None, ge=0)
    row: dict[str, Plain] = {}


MAX_SCORED_ITEMS = 4096
"""Of one request, four groups of the largest size: the service turns to nothing else while it
reads and writes a body."""

MAX_REWARDS = 64

MAX_COLUMNS = 4096

MAX_CHECKED_PROMPTS = 64
"""Of one request to validate; a job's first rows are a handful."""

MAX_PARTS = 65_536
"""Verdicts of one request, its items times its rewards: a group of the largest size by as many
rewards as may be."""


class ScoreRequest(Wire):
    """`POST /score`: every item graded by every reward. `job_id` says in whose run folder verdicts
    may be cached, and whose workers of the job's own functions are asked."""

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
    """What one grader said of one completion. `value` None: not applicable (`verdict` "skipped") or
    missing ("sandbox_error", "error"), which is never an invented 0.

    `detail` is why, in a few words: what the program evaluated to, or died of. `stdout` is the end
    of what it printed. `seconds` is the time it took, and `cached` says that it came from a cache.
    `errors` are OpenAI's names of grader errors ("python_grader_runtime_error",
    "model_grader_refusal_error", ...); with a value, the grader failed on this text and not on
    others of its row, and the value is the least of theirs. `sub` are the values of the graders
    that it is made of, by their names, and `tokens` what judges took for it, by model (0 for what
    was cached).
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
    (never an invented 0)."""

    value: float | None
    parts: dict[str, Part]


class ScoreResult(Wire):
    """One score per item, in the order asked."""

    scores: tuple[Score, ...]


class ScoredItem(Wire):
    """A line of a streamed `/score`: the item at `index` is graded by every reward. Lines come in
    the order of completion."""

    index: int
    score: Score


class ScoredGroup(Wire):
    """A group that was sampled and scored elsewhere, to be trained on as if it had been sampled
    here. Rollouts without log-probs are taken to be the trainer's own."""

    prompt: Prompt
    group: RolloutGroup
    scores: tuple[Score, ...]
