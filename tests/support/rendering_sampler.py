"""A sampler for sessions, without an engine: a real tokenizer and chat template, and answers that a
test wrote. What it does with a turn is the rollout service's own code."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from services.orchestrator.extensions.agents.sessions import Session, Sessions
from services.rollout.engine import Constraint
from services.rollout.groups import sampled_group
from services.rollout.running import Running
from shared.errors import HoneError
from shared.job import Job
from shared.job.file import make_job
from shared.wire import (
    ChatRequest,
    FinishReason,
    GenerateRequest,
    Logprobs,
    Message,
    Rollout,
    RolloutGroup,
    Sampling,
    Span,
    TokenIds,
)

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% set text = message.content or '' %}"
    "{% if message.role == 'assistant' and '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the thoughts of earlier answers, as Qwen3's template does."""


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


@dataclass(frozen=True)
class Reply:
    """An answer as it is sampled: `text`, in tokens of one character if it is `spelled`; an end
    token follows unless it was `cut`."""

    text: str
    spelled: bool = False
    cut: bool = False
    version: int = 3
    error: HoneError | None = None
    finish_reason: FinishReason | None = None


@dataclass
class RenderingSampler:
    """Services and engine in one. `replies` are sampled in turn; `asked` are the turns that came.
    Sampling waits for `may_answer`."""

    replies: list[Reply] = field(default_factory=list[Reply])
    template: str | None = None
    max_model_len: int = 400
    asked: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    constraints: list[ChatRequest] = field(default_factory=list[ChatRequest])

    def __post_init__(self) -> None:
        from deploy.tool_model import make_tokenizer  # with torch, which many files need not

        self.tokenizer = make_tokenizer()
        if self.template:
            self.tokenizer.chat_template = self.template
        self.vocab_size = len(self.tokenizer)
        self.chat, self.job_id, self.sessions = self, "job-1", Sessions()
        self.caller = self.samplers = self
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    # --- services ---

    async def answer(
        self, messages: tuple[Message, ...], min_version: int, *, key: str, **asked: Any
    ) -> RolloutGroup:
        asked |= vars(asked.pop("options"))
        asked = {name: value for name, value in asked.items() if value is not None}
        return await self._generate(prompt=messages, min_version=min_version, fit=True, **asked)

    async def complete(
        self, prompt: str | TokenIds, min_version: int, *, key: str, sampling: Sampling
    ) -> RolloutGroup:
        given = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        return await self._generate(**given, min_version=min_version, fit=True, sampling=sampling)

    async def _generate(self, **asked: Any) -> RolloutGroup:
        request = GenerateRequest(job_id=self.job_id, **asked)
        self.asked.append(request)
        await self.may_answer.wait()
        if self.replies and self.replies[0].error:
            raise cast(HoneError, self.replies.pop(0).error)
        running = SimpleNamespace(engine=self, salt=lambda *_: "")
        return await sampled_group(request, cast(Running, running), None)

    # --- engine ---

    def encode(self, prompt: Any, template_args: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        return self.tokenize(self._text(prompt, None, True, template_args))

    async def sample(
        self, prompt_token_ids: list[int], sampling: Sampling, **_: Any
    ) -> tuple[Rollout, ...]:
        reply = self.replies.pop(0)
        ids = [
            id
            for part in (reply.text if reply.spelled else [reply.text])
            for id in self.tokenize(part)
        ]
        ids += [] if reply.cut else self.tokenize(self.tokenizer.eos_token)
        cut = reply.cut or len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        rollout = Rollout(
            text=str(self.tokenizer.decode(ids, skip_special_tokens=True)) if cut else reply.text,
            token_ids=TokenIds(ids),
            logprobs=Logprobs([-0.5] * len(ids)),
            finish_reason=reply.finish_reason or ("length" if cut else "stop"),
            spans=(Span(version=reply.version, start=0),),
        )
        return (rollout,)

    # --- chat ---

    async def render(
        self, request: ChatRequest, messages: Sequence[Message], *, answering: bool
    ) -> str:
        args = request.chat_template_kwargs or {}
        return self._text(messages, request.tools, answering, args)

    def _text(self, messages: Any, tools: Any, answering: bool, args: Any) -> str:
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools and list(tools),
            add_generation_prompt=answering,
            tokenize=False,
            **args,
        )
        assert isinstance(text, str)
        return text

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def special_text(self, token_id: int) -> str:
        token = self.tokenizer.added_tokens_decoder.get(token_id)
        return str(token) if token is not None and token.special else ""

    async def constraint(self, request: ChatRequest, prompt_token_ids: list[int]) -> Constraint:
        """Returns what the request asks for: no token is limited here."""
        self.constraints.append(request)
        return {"json": request.json_schema or {}}

    async def parsed(
        self, request: ChatRequest, prompt_token_ids: list[int], rollouts: Sequence[Rollout]
    ) -> list[Message]:
        return [_message(rollout.text) for rollout in rollouts]


def _message(text: str) -> Message:
    calls = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": one["name"], "arguments": json.dumps(one["arguments"])},
        }
        for number, one in enumerate(map(json.loads, CALL.findall(text)), 1)
    ]
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text.partition("<tool_call>")[0], "tool_calls": calls}


def job_of_agents(**more: Any) -> Job:
    document = {
        "name": "agents",
        "model": "m",
        "steps": 1,
        "data": {"train": "rows"},
        "sampling": {"group_size": 2, "max_tokens": 120},
        "rewards": [{"grader": "exact_match"}],
        **more,
    }
    return make_job(document, (), "test")


def open_session(
    sampler: RenderingSampler, *, id: str = "job-1:1:1:5:0:0:0", **how: Any
) -> Session:
    given = Sampling(**{"max_tokens": 120, "seed": 7, **how})
    return sampler.sessions.open(
        cast(Any, sampler), job_of_agents(), id=id, min_version=3, sampling=given
    )
