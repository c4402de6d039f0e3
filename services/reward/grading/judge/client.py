"""Asks a language model through any OpenAI-compatible endpoint: HONE_JUDGE_URL and
HONE_JUDGE_API_KEY, never the job's.

For Gemini the endpoint is https://generativelanguage.googleapis.com/v1beta/openai/. The `openai`
package retries what may pass (429, 5xx, no connection) after `Retry-After`, or with growing pauses.
Verdicts are cached by content, and cost nothing when asked for again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from services.reward.grading.judge import replies
from services.reward.grading.judge.store import JudgeStore
from services.reward.grading.registry import GraderTools, GradingFailed
from shared.host.logs import get_logger

OPENAI_URL = "https://api.openai.com/v1"
MAX_ASKS = 3
"""How often a question is asked whose replies cannot be read."""

NOT_TAKEN = (400, 422, 501)
"""Statuses by which endpoints say that they know no `response_format`."""

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
    """What is asked about `completion`. `messages` makes them with the key that this time fences
    the completion and has to be in the reply. `schema` is the JSON schema of the reply."""

    model: str
    completion: str
    messages: Callable[[str], list[dict[str, str]]]
    sampling: dict[str, Any]
    schema: dict[str, Any]


class Judge:
    def __init__(self, tools: GraderTools, reward: str, limits: JudgeLimits) -> None:
        self._tools = tools
        self._reward = reward
        self._limits = limits
        self._client: Any = None  # an openai.AsyncOpenAI, which takes more types than we send
        self._takes_schema = True
        self._store: JudgeStore | None = None
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(
        self, question: Question, read: Callable[[dict[str, Any]], T]
    ) -> tuple[T, int | None]:
        """Returns what `read` makes of the object in the reply, and how many tokens it took, None
        if it was cached. Raises GradingFailed; where `read` raises Unreadable, the judge is asked
        again first."""
        if self._store is None:
            self._store = JudgeStore.open(self._tools.run_folder)
        store, key = self._store, self._cache_key(question)
        # The same question at the same time is asked once.
        async with self._asking.setdefault(key, asyncio.Lock()):
            known = await asyncio.to_thread(store.reply, key)
            if known is not None:
                return read(json.loads(known)), None
            spent, asks = 0, 0
            while True:
                await self._take_call(store)
                nonce = secrets.token_hex(8)
                text, tokens = await self._reply(question, nonce)
                await asyncio.to_thread(store.add_tokens, self._reward, tokens)
                spent, asks = spent + tokens, asks + 1
                try:
                    found = replies.verdict(_whole(text), nonce)
                    value = read(found)
                except replies.Unreadable as error:
                    if asks < MAX_ASKS:
                        continue
                    raise replies.Unreadable(f"asked {asks} times: {error.detail}") from error
                await asyncio.to_thread(store.keep, key, json.dumps(found), spent)
                return value, spent

    async def _take_call(self, store: JudgeStore) -> None:
        """Counts a call. Raises GradingFailed if the budget is spent."""
        if not await asyncio.to_thread(
            store.take_call, self._reward, self._limits.calls, self._limits.tokens
        ):
            calls, tokens = store.spent(self._reward)
            raise GradingFailed(
                f"the judge's budget is spent: {calls} calls and {tokens} tokens by this job",
                "other_error",
            )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._store is not None:
            self._store.close()

    def _cache_key(self, question: Question) -> str:
        """Returns a digest of the question with no key in it: the next one has another."""
        content = [
            self._url,
            question.model,
            question.completion,
            question.messages(""),
            question.sampling,
            question.schema,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def _url(self) -> str:
        return self._tools.settings.judge_url or OPENAI_URL

    async def _reply(self, question: Question, nonce: str) -> tuple[str | None, int]:
        """Returns the text, None if it was cut, and how many tokens it cost, the question's
        included."""
        # The import takes a second or two, the first time.
        openai: Any = await asyncio.to_thread(importlib.import_module, "openai")
        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self._url, api_key=self._api_key, max_retries=self._limits.retries
            )
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                reply = await self._completion(openai, question, nonce)
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
        is_cut = choice.finish_reason == "length"
        return None if is_cut else choice.message.content or "", tokens

    async def _completion(self, openai: Any, question: Question, nonce: str) -> Any:
        """Returns the endpoint's answer, by `schema` unless the job's sampling says another form or
        the endpoint knows none."""
        create = self._client.chat.completions.create
        asked = {"model": question.model, "messages": question.messages(nonce), **question.sampling}
        if not self._takes_schema or "response_format" in question.sampling:
            return await create(**asked)
        form = {"name": "verdict", "strict": True, "schema": question.schema}
        try:
            return await create(
                **asked, response_format={"type": "json_schema", "json_schema": form}
            )
        except openai.APIStatusError as error:
            if error.status_code not in NOT_TAKEN:
                raise
        reply = await create(**asked)
        # Only now it is known that the format was what the endpoint refused.
        self._takes_schema = False
        get_logger().warning("judge takes no response_format", reward=self._reward)
        return reply

    @property
    def _api_key(self) -> str:
        key = self._tools.settings.judge_api_key
        return key.get_secret_value() if key else "none"

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***")[:300]


def _whole(text: str | None) -> str:
    if text is None:
        raise replies.Unreadable("the judge's reply was cut at its limit of tokens")
    return text
