"""Supervised steps: the completions are the answers that the data gives. Each is a group of one
completion with an advantage of 1, so the trainer's loss of a step is the mean negative
log-likelihood of its tokens, and everything else is as in a step that samples. With
`training.objective` "dpo" a group has two completions: the chosen one, with an advantage of 1, and
the rejected one, with -1.

The samplers' tokenizer makes the tokens; nothing is sampled, and no weights are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.data.choosing import BadRow, Problem, unrenderable
from services.orchestrator.grpo.prompts import Content, Prompts, chat_of
from services.orchestrator.samplers.clients import NOT_GRADED
from services.orchestrator.samplers.services import Services
from services.orchestrator.tasks import gather_all
from shared.job import Job
from shared.templates import RENDERER, RenderFailed
from shared.wire import Logprobs, Message, Prompt, Rollout, RolloutGroup, ScoredGroup, TokenIds

ANSWER = "answer"
"""The column with the answer, if neither a template nor a chat gives it."""

CHOSEN, REJECTED = "chosen", "rejected"
"""The columns with two answers of which the first is preferred."""

ADVANTAGES = (1.0, -1.0)
"""The advantages of an example's first answer and of its second, if it has two."""

Answer = str | Message


@dataclass(frozen=True)
class SFTExample:
    """A prompt with its answer, or with two answers of which the first is preferred."""

    prompt: Prompt
    answers: tuple[Answer, ...]


def sft_examples(prompts: Sequence[Prompt], job: Job, where: str) -> list[SFTExample]:
    """Returns the examples in each prompt's row: one answer or preference, or in a chat each of the
    assistant's messages. With `train_on` "all" a chat is one example, so no token is learned twice.
    Raises BadRow for a row without an answer."""
    if job.training.objective == "dpo":
        return [_preference(prompt, where) for prompt in prompts]
    if job.data.answer is None:
        return [example for prompt in prompts for example in _own(prompt, job, where)]
    try:
        texts = RENDERER.texts(job.data.answer, [prompt.row for prompt in prompts])
    except RenderFailed as error:
        problems = [Problem(prompt.index, prompt.row) for prompt in prompts]
        raise unrenderable("data.answer", error, problems, where) from error
    return [
        _sft_example(prompt, text, "data.answer", where)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _own(prompt: Prompt, job: Job, where: str) -> list[SFTExample]:
    content = prompt.content
    if isinstance(content, str) or content[-1]["role"] != "assistant":
        return [_sft_example(prompt, prompt.row.get(ANSWER), f"column {ANSWER!r}", where)]
    ends = [end for end, message in enumerate(content) if end and _is_learned(message)]
    for message in content:
        _check_message(message, f"row {prompt.index} of {where}")
    if not ends:
        raise BadRow(
            f"row {prompt.index} of {where}: its chat has no assistant's message to learn; "
            "expected one after another message, whose weight is not 0"
        )
    if job.training.train_on == "all":
        ends = ends[-1:]
    return [
        SFTExample(prompt.model_copy(update={"content": content[:end]}), (content[end],))
        for end in ends
    ]


def _is_learned(message: Message) -> bool:
    """Whether the message is an assistant's, and OpenAI's key `weight` does not exclude it."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _check_message(message: Message, at: str) -> None:
    """Raises BadRow for an assistant's message that cannot be learned."""
    if message["role"] != "assistant":
        return
    if message.get("weight", 1) not in (0, 1):
        raise BadRow(
            f"{at}: an assistant's message has weight {message['weight']!r:.40}; expected 0 or 1"
        )
    content = message.get("content")
    has_text = isinstance(content, str) and content.strip()
    if message.get("weight") != 0 and not has_text and not message.get("tool_calls"):
        raise BadRow(
            f"{at}: an assistant's message has content {content!r:.40}; expected content that is "
            "text, or tool_calls"
        )


def _sft_example(prompt: Prompt, answer: Any, what: str, where: str) -> SFTExample:
    if not isinstance(answer, str) or not answer.strip():
        raise BadRow(
            f"row {prompt.index} of {where} has no answer to learn: {what} is {answer!r:.80}; "
            "expected text (a template data.answer makes it of other columns), or a chat that ends "
            "with an assistant's message"
        )
    return SFTExample(prompt, (answer,))


def _preference(prompt: Prompt, where: str) -> SFTExample:
    """Returns the row's preference. The chosen answer is the column `chosen`, or without it the
    last message of a prompt that is a chat."""
    content, chosen = prompt.content, prompt.row.get(CHOSEN)
    if CHOSEN not in prompt.row and not isinstance(content, str) and len(content) > 1:
        content, chosen = content[:-1], list(content[-1:])
    values = {CHOSEN: chosen, REJECTED: prompt.row.get(REJECTED)}
    answers = tuple(
        _answer(value, content, f"row {prompt.index} of {where}, column {name!r}")
        for name, value in values.items()
    )
    texts = [answer if isinstance(answer, str) else answer.get("content") for answer in answers]
    calls = [None if isinstance(answer, str) else answer.get("tool_calls") for answer in answers]
    if texts[0] == texts[1] and calls[0] == calls[1]:
        raise BadRow(
            f"row {prompt.index} of {where}: {CHOSEN!r} and {REJECTED!r} are both "
            f"{texts[0]!r:.80}; expected two answers of which one is better"
        )
    return SFTExample(prompt.model_copy(update={"content": content}), answers)


def _answer(value: Any, content: Content, at: str) -> Answer:
    """Returns an answer from a column: text, or the last of a list of messages. The messages before
    the last must be the end of the prompt."""
    if isinstance(value, str) and value.strip():
        return value
    items: list[Any] = value if isinstance(value, list) else []
    messages = [*chat_of(items, at)] if all(isinstance(each, dict) for each in items) else []
    last: dict[str, Any] = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        raise BadRow(
            f"{at}: got {value!r:.80}; expected an answer: text, or a list of chat messages that "
            "ends with an assistant's"
        )
    _check_message(last, at)
    before = messages[:-1]
    if before and (isinstance(content, str) or list(content[-len(before) :]) != before):
        raise BadRow(
            f"{at}: its messages before the answer differ from the prompt's; expected the "
            "prompt's messages and then the answer, or the answer alone"
        )
    return str(last.get("content") or "") if isinstance(content, str) else last


def sampling_prompts(prompts: Sequence[Prompt], job: Job) -> tuple[Prompt, ...]:
    """Returns the prompts after which completions are sampled. In a job whose rows have answers, a
    chat loses its last message if that is the answer."""
    if not job.has_answers or job.data.answer is not None:
        return tuple(prompts)
    return tuple(
        prompt.model_copy(update={"content": prompt.content[:-1]})
        if _ends_with_it(prompt)
        else prompt
        for prompt in prompts
    )


def _ends_with_it(prompt: Prompt) -> bool:
    content = prompt.content
    if isinstance(content, str) or len(content) < 2 or CHOSEN in prompt.row:
        return False
    return content[-1]["role"] == "assistant"


async def sft_groups(
    services: Services, job: Job, prompts: Prompts, step: int
) -> list[ScoredGroup]:
    """Returns the step's groups of given completions: one or more per row, since each message of an
    assistant is one. An answer that is too long for the model is a rollout that went wrong."""

    def read() -> list[SFTExample]:
        return sft_examples(prompts.for_step(step), job, prompts.name)

    async def group_of(position: int, example: SFTExample) -> ScoredGroup:
        key = f"{services.caller.owner}:{step}:given:{position}"
        group = await services.samplers.read(example.prompt, example.answers, key=key)
        scores = (NOT_GRADED,) * len(example.answers)
        return ScoredGroup(
            prompt=example.prompt, group=add_sft_advantages(group, job), scores=scores
        )

    examples = await asyncio.to_thread(read)
    return await gather_all(
        group_of(position, example) for position, example in enumerate(examples)
    )


def add_sft_advantages(group: RolloutGroup, job: Job) -> RolloutGroup:
    """Returns the group with an advantage for each token that is learned. With `train_on` "all" the
    prompt's tokens but the first are learned too, as part of the completion. A group with a rollout
    that went wrong gets no advantages."""
    if any(rollout.went_wrong for rollout in group.rollouts):
        return group
    prompt = [*group.prompt_token_ids]
    num_before = 1 if job.training.train_on == "all" else len(prompt)
    return group.model_copy(
        update={
            "prompt_token_ids": TokenIds(prompt[:num_before]),
            "rollouts": tuple(
                _with_advantage(rollout, [*prompt[num_before:], *rollout.token_ids], advantage)
                for rollout, advantage in zip(group.rollouts, ADVANTAGES, strict=False)
            ),
        }
    )


def _with_advantage(rollout: Rollout, ids: list[int], advantage: float) -> Rollout:
    of_tokens = Logprobs([advantage] * len(ids))
    return rollout.model_copy(update={"token_ids": TokenIds(ids), "advantages": of_tokens})
