"""Supervised steps: the completions are the answers that the data gives. Each is a group of one
completion with an advantage of 1, so the trainer's loss of a step is the mean negative
log-likelihood of its tokens, and everything else is as in a step that samples.

The samplers' tokenizer makes the tokens; nothing is sampled, and no weights are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.data.choosing import BadRow, Problem, unrenderable
from services.orchestrator.loop.prompts import Prompts
from services.orchestrator.pool.services import NOT_GRADED, Services
from services.orchestrator.tasks import all_of
from shared.job import Job
from shared.prompts.templates import RENDERER, CannotRender
from shared.wire import Message, Prompt, Rollout, RolloutGroup, ScoredGroup
from shared.wire.packed import Logprobs, TokenIds

ANSWER = "answer"
"""The column with the answer, if neither a template nor a chat gives it."""


@dataclass(frozen=True)
class Lesson:
    """A prompt, and the answer that is learned after it."""

    prompt: Prompt
    answer: str | Message


def lessons(prompts: Sequence[Prompt], job: Job, where: str) -> list[Lesson]:
    """Returns what each prompt's row teaches: one answer, or of a chat each of the assistant's
    messages. With `train_on` "all" a chat is one lesson, so no token is learned twice. Raises
    BadRow for a row without an answer."""
    if job.data.answer is not None:
        rows = [prompt.row for prompt in prompts]
        try:
            texts = RENDERER.texts(job.data.answer, rows)
        except CannotRender as error:
            problems = [Problem(prompt.index, prompt.row) for prompt in prompts]
            raise unrenderable("data.answer", error, problems, where) from error
        pairs = zip(prompts, texts, strict=True)
        return [_lesson(prompt, text, "data.answer", where) for prompt, text in pairs]
    return [lesson for prompt in prompts for lesson in _own(prompt, job, where)]


def _own(prompt: Prompt, job: Job, where: str) -> list[Lesson]:
    content = prompt.content
    if isinstance(content, str) or content[-1]["role"] != "assistant":
        return [_lesson(prompt, prompt.row.get(ANSWER), f"column {ANSWER!r}", where)]
    ends = [end for end, message in enumerate(content) if message["role"] == "assistant" and end]
    if not ends:
        raise BadRow(
            f"row {prompt.index} of {where}: its chat has one message, an assistant's; expected a "
            "message before it"
        )
    if job.training.train_on == "all":
        ends = ends[-1:]
    return [
        Lesson(prompt.model_copy(update={"content": content[:end]}), content[end]) for end in ends
    ]


def _lesson(prompt: Prompt, answer: Any, what: str, where: str) -> Lesson:
    if not isinstance(answer, str) or not answer.strip():
        raise BadRow(
            f"row {prompt.index} of {where} has no answer to learn: {what} is {answer!r:.80}; "
            "expected text (a template data.answer makes it of other columns), or a chat that ends "
            "with an assistant's message"
        )
    return Lesson(prompt, answer)


async def given_groups(
    services: Services, job: Job, prompts: Prompts, step: int
) -> list[ScoredGroup]:
    """Returns the step's groups of one given completion each, `[P]`: of chats more than there are
    rows. An answer that is too long for the model is a rollout that went wrong."""

    def read() -> list[Lesson]:
        return lessons(prompts.for_step(step), job, prompts.name)

    async def group_of(position: int, lesson: Lesson) -> ScoredGroup:
        key = f"{services.owner}:{step}:given:{position}"
        group = await services.given(lesson.prompt, lesson.answer, key=key)
        return ScoredGroup(prompt=lesson.prompt, group=learned(group, job), scores=(NOT_GRADED,))

    found = await asyncio.to_thread(read)
    return await all_of(group_of(position, lesson) for position, lesson in enumerate(found))


def learned(group: RolloutGroup, job: Job) -> RolloutGroup:
    """Returns the group with an advantage of 1 for each token that is learned. With `train_on`
    "all" the prompt's tokens but the first are learned too, as part of the completion."""
    (rollout,) = group.rollouts
    if rollout.went_wrong:
        return group
    num_before = 1 if job.training.train_on == "all" else len(group.prompt_token_ids)
    ids = [*group.prompt_token_ids, *rollout.token_ids]
    whole: Rollout = rollout.model_copy(
        update={
            "token_ids": TokenIds(ids[num_before:]),
            "advantages": Logprobs([1.0] * (len(ids) - num_before)),
        }
    )
    return group.model_copy(
        update={"prompt_token_ids": TokenIds(ids[:num_before]), "rollouts": (whole,)}
    )
