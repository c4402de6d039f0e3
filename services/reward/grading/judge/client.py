"""Asks a language model through any OpenAI-compatible endpoint: HONE_JUDGE_URL and
HONE_JUDGE_API_KEY, never the job's.

For Gemini the endpoint is https://generativelanguage.googleapis.com/v1beta/openai/. The `openai`
package retries what may pass (429, 5xx, no connection) after `Retry-After`, or with growing pauses.
Replies that could be read are cached by content, and cost nothing when asked for again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from services.reward.grading.judge.store import JudgeStore
from services.reward.grading.registry import GraderTools, GradingFailed

OPENAI_URL = "https://api.openai.com/v1"

T = TypeVar("T")


@dataclass(frozen=True)
class JudgeLimits:
    """`retries` of one question, `deadline_s` of it with its retries; `calls` and `tokens` of a
    job, None without a bound."""

    retries: int
    deadline_s: float
    calls: int | None
    tokens: int | None


@dataclass(frozen=True)
class Question:
    model: str
    messages: tuple[dict[str, str], ...]
    sampling: dict[str, Any]


class Judge:
    def __init__(self, tools: GraderTools, reward: str, limits: JudgeLimits) -> None:
        self._tools = tools
        self._reward = reward
        self._limits = limits
        self._client: Any = None  # an openai.AsyncOpenAI, which takes more types than we send
        self._store: JudgeStore | None = None
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(self, question: Question, read: Callable[[str], T]) -> tuple[T, int | None]:
        """Returns what `read` makes of the reply, and how many tokens it took, None if it was
        cached. Raises GradingFailed, as `read` may."""
        if self._store is None:
            self._store = JudgeStore.open(self._tools.run_folder)
        store, key = self._store, self._key(question)
        # The same question at the same time is asked once.
        async with self._asking.setdefault(key, asyncio.Lock()):
            known = await asyncio.to_thread(store.reply, key)
            if known is not None:
                return read(known), None
            if not await asyncio.to_thread(
                store.take_call, self._reward, self._limits.calls, self._limits.tokens
            ):
                calls, tokens = store.spent(self._reward)
                raise GradingFailed(
                    f"the judge's budget is spent: {calls} calls and {tokens} tokens by this job",
                    "other_error",
                )
            text, tokens = await self._reply(question)
            await asyncio.to_thread(store.add_tokens, self._reward, tokens)
            value = read(text)
            await asyncio.to_thread(store.keep, key, text, tokens)
            return value, tokens

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._store is not None:
            self._store.close()

    def _key(self, question: Question) -> str:
        content = [self._url, question.model, question.messages, question.sampling]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def _url(self) -> str:
        return self._tools.settings.judge_url or OPENAI_URL

    async def _reply(self, question: Question) -> tuple[str, int]:
        """Returns the text and how many tokens it cost, the question's included."""
        # The import takes a second or two, the first time.
        openai: Any = await asyncio.to_thread(importlib.import_module, "openai")
        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self._url, api_key=self._api_key, max_retries=self._limits.retries
            )
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                reply = await self._client.chat.completions.create(
                    model=question.model, messages=list(question.messages), **question.sampling
                )
            choice = reply.choices[0]
            tokens = reply.usage.total_tokens if reply.usage else 0
        except TimeoutError as error:
            reason = f"the judge did not answer within {self._limits.deadline_s:g} s"
            raise GradingFailed(reason, "model_grader_server_error") from error
        except openai.APIStatusError as error:
            reason = f"the judge answered {error.status_code}: {self._without_key(error.message)}"
            raise GradingFailed(reason, "model_grader_server_error") from error
        except (openai.OpenAIError, IndexError, TypeError, AttributeError, ValueError) as error:
            reason = (
                f"the judge gave no answer: {type(error).__name__}: {self._without_key(str(error))}"
            )
            raise GradingFailed(reason, "model_grader_server_error") from error
        if choice.message.refusal or choice.finish_reason == "content_filter":
            raise GradingFailed(
                f"the judge refused: {choice.message.refusal or 'content filter'!s:.200}",
                "model_grader_refusal_error",
            )
        return choice.message.content or "", tokens

    @property
    def _api_key(self) -> str:
        key = self._tools.settings.judge_api_key
        return key.get_secret_value() if key else "none"

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***")[:300]
