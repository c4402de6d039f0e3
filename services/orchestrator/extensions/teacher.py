"""The teacher of a job with `[teacher]`: gets log-probs of the tokens that the policy sampled from
an OpenAI-compatible endpoint. Endpoint and key are HONE_TEACHER_URL and HONE_TEACHER_API_KEY, never
the job's.

A row is sent as token ids to `/completions`. vLLM (and with it a sampler of Hone) answers with
`prompt_logprobs`; an endpoint that does not is asked for `echo` with `logprobs`.

Transient failures (no connection, 429, 502, 503, 504) are retried, up to HONE_WAIT_LIMIT_S.
Failures that may be transient (a deadline, another 5xx, an answer without log-probs) are retried a
few times. After that, or if the endpoint refuses, the rollout's reward is missing, with the reason
in its detail.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx2 as httpx

from services.orchestrator.data.choosing import reader_of
from services.orchestrator.grpo.examples import mean_log_ratio, sampled_of
from services.orchestrator.tasks import gather_all
from shared.errors import BadRequest, Unavailable
from shared.http.connecting import Presence, Tell, no_notify, ssl_context_for
from shared.http.urls import is_direct, without_password
from shared.job import Job, TeacherSpec
from shared.settings import Settings
from shared.templates import TokenizerUnavailable
from shared.wire import Logprobs, Part, Rollout, RolloutGroup, Score

TEACHER = "teacher"
"""The name of the teacher's part of a score."""

TokenAnswers = tuple[list[float | None], list[str | None]]
"""The log-prob and the text of each token of a row; None where the endpoint gives none."""

AWAY = (429, 502, 503, 504)
"""Statuses of transient failures."""

NO_SUCH_FIELD = (400, 422, 501)
"""Statuses of endpoints that do not know `prompt_logprobs`."""

MAX_TRIES = 3
MAX_ASKED = 32
"""Most rows in requests to the endpoint at a time."""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0
CHECK_S = 60.0

ANSWER_S = 600.0
"""Seconds for the log-probs of a row. A busy endpoint computes many other rows first."""

LEAST = -9000.0
"""Log-probs below this mean a probability of 0: JSON has no infinity, vLLM writes -9999."""

NUM_COMPARED = 128
"""Number of tokens by which the vocabularies are compared."""


class TeacherFailed(Exception):
    """A row has no log-probs of the teacher, for the reason in the message."""


class _EndpointUnreachable(Exception):
    """The endpoint does not answer at present."""


class _UnusableAnswer(Exception):
    """The endpoint's answer cannot be used; the next one may be."""


class Teacher:
    """`wait_s` is how long calls wait for an unreachable endpoint. `tell` is called when it becomes
    unreachable, and when it answers again."""

    def __init__(
        self,
        spec: TeacherSpec,
        settings: Settings,
        tell: Tell = no_notify,
        wait_s: float | None = None,
    ) -> None:
        if settings.teacher_url is None:
            raise BadRequest(
                f"the job has a teacher, {spec.model!r}, and HONE_TEACHER_URL of the orchestrator "
                "is not set; expected an OpenAI-compatible endpoint, as in http://host:8000/v1"
            )
        self._model = spec.model
        self._url = settings.teacher_url.rstrip("/")
        self._shown = without_password(self._url)
        self._key = (
            settings.teacher_api_key.get_secret_value() if settings.teacher_api_key else None
        )
        self._wait_s = wait_s if wait_s is not None else settings.wait_limit_s or math.inf
        self._presence = Presence("teacher", tell)
        self._room = asyncio.Semaphore(MAX_ASKED)
        self._echoes = False
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(ANSWER_S, connect=5.0),
            trust_env=not is_direct(urlsplit(self._url).hostname or ""),
            verify=ssl_context_for(self._url),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def score(
        self, group: RolloutGroup, scores: Sequence[Score], *, alone: bool
    ) -> tuple[Score, ...]:
        """Returns the scores with the teacher's log-probs of each rollout that is graded, and with
        the part "teacher", the negative mean log-ratio over its sampled tokens. `alone`: that part
        is the reward. A rollout without log-probs of the teacher has no reward. Scores that have
        log-probs already keep them."""

        async def one(rollout: Rollout, score: Score) -> Score:
            if rollout.went_wrong:
                return score
            try:
                _check_measured(rollout)
                logprobs = score.teacher_logprobs or await self._of(group, rollout)
            except TeacherFailed as error:
                part = Part(value=None, verdict="error", detail=str(error))
                return Score(value=None, parts={**score.parts, TEACHER: part})
            reward = -mean_log_ratio(rollout, logprobs)
            return Score(
                value=reward if alone else score.value,
                parts={**score.parts, TEACHER: Part(value=reward)},
                teacher_logprobs=logprobs,
            )

        return tuple(await gather_all(map(one, group.rollouts, scores)))

    async def _of(self, group: RolloutGroup, rollout: Rollout) -> Logprobs:
        """Returns the log-probs of the rollout's rows, one row after the other, its own last, and 0
        where nothing was sampled. Raises TeacherFailed."""
        prompts = [*(row.prompt_token_ids for row in rollout.branches), group.prompt_token_ids]
        found = array("f")
        for prompt, row in zip(prompts, (*rollout.branches, rollout), strict=True):
            async with self._room:
                logprobs, _ = await self._asked([*prompt, *row.token_ids])
            for position, value in sampled_of(row, logprobs[len(prompt) :]):
                if value is None or not value > LEAST:
                    raise TeacherFailed(
                        f"the teacher {self._model!r} gives token {row.token_ids[position]}, "
                        f"number {position} of the completion, the log-prob {value}; expected a "
                        "finite one"
                    )
                found.append(value)
        return Logprobs(found)

    async def check(self, job: Job) -> None:
        """Raises BadRequest where the endpoint has another vocabulary than the job's model, as far
        as the tokenizer is known here, or gives no log-probs. Raises Unavailable if it is
        unreachable."""
        try:
            tokenizer = reader_of(job).tokenizer
        except TokenizerUnavailable:
            ids, texts = [0, 0], ["", ""]
        else:
            size = tokenizer.get_vocab_size()
            ids = sorted({number * size // NUM_COMPARED for number in range(NUM_COMPARED)})
            texts = [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
        try:
            async with asyncio.timeout(CHECK_S):
                try:
                    _, theirs = await self._ask(ids)
                except _UnusableAnswer:  # the next request asks for `echo`
                    _, theirs = await self._ask(ids)
        except (TimeoutError, _EndpointUnreachable) as error:
            raise Unavailable(
                f"the teacher at {self._shown} does not answer: {error or 'it took too long'}"
            ) from error
        except (TeacherFailed, _UnusableAnswer) as error:
            raise BadRequest(
                f"{error}; it was sent {len(ids)} token ids from 0 to {ids[-1]}, and expected is a "
                "teacher with the vocabulary of the job's model"
            ) from error
        for id, own, other in zip(ids, texts, theirs, strict=True):
            if other is not None and differs(own, other):
                raise BadRequest(
                    f"the teacher {self._model!r} at {self._shown} reads token {id} as {other!r}, "
                    f"and the model {job.model!r} as {own!r}; expected a teacher with the same "
                    "vocabulary"
                )

    async def _asked(self, ids: list[int]) -> TokenAnswers:
        """Returns as `_ask`, with retries. Raises TeacherFailed."""
        began, tries, pause_s = time.monotonic(), 0, FIRST_PAUSE_S
        while True:
            asked_at = time.monotonic()
            try:
                found = await self._ask(ids)
                await self._presence.heard()
                return found
            except _EndpointUnreachable as error:
                await self._presence.missed(asked_at, str(error))
                if time.monotonic() - began + pause_s > self._wait_s:
                    raise TeacherFailed(
                        f"{error}; retried for {self._wait_s:g} s, the limit HONE_WAIT_LIMIT_S"
                    ) from error
            except _UnusableAnswer as error:
                tries += 1
                if tries == MAX_TRIES:
                    raise TeacherFailed(f"{error}, {MAX_TRIES} times") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _ask(self, ids: list[int]) -> TokenAnswers:
        """Sends a request. Raises _EndpointUnreachable, _UnusableAnswer or (refused)
        TeacherFailed."""
        echoes = self._echoes
        answer = await self._sent(ids, echoes)
        if not echoes and answer.status_code in NO_SUCH_FIELD:
            echoed = await self._sent(ids, True)
            self._echoes = echoes = echoed.status_code == 200
            answer = echoed if echoes else answer
        if answer.status_code != 200:
            raise TeacherFailed(self._refusal(answer))
        if (found := await asyncio.to_thread(read, answer.content, ids)) is None:
            self._echoes = not echoes  # an endpoint may ignore an unknown field
            raise _UnusableAnswer(
                f"the teacher at {self._shown} gave no log-probs of the {len(ids)} tokens that it "
                "was sent; expected prompt_logprobs, or echo with logprobs"
            )
        return found

    async def _sent(self, ids: list[int], echoes: bool) -> httpx.Response:
        how = {"echo": True, "logprobs": 1} if echoes else {"prompt_logprobs": 0}
        asked = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, **how}
        try:
            answer = await self._http.post(f"{self._url}/completions", json=asked)
        except httpx.ReadTimeout as error:
            raise _UnusableAnswer(
                f"the teacher at {self._shown} did not answer within {ANSWER_S:g} s"
            ) from error
        except httpx.TransportError as error:
            raise _EndpointUnreachable(
                f"{self._shown} cannot be reached ({type(error).__name__})"
            ) from error
        if answer.status_code in AWAY:
            raise _EndpointUnreachable(f"{self._shown} answered {answer.status_code}")
        if answer.status_code >= 500 and answer.status_code not in NO_SUCH_FIELD:
            raise _UnusableAnswer(self._refusal(answer))
        return answer

    def _refusal(self, answer: httpx.Response) -> str:
        text = answer.text.replace(self._key, "***") if self._key else answer.text
        return f"the teacher at {self._shown} answered {answer.status_code}: {text[:300]}"


def read(body: bytes, ids: Sequence[int]) -> TokenAnswers | None:
    """Returns for each token of a completion's prompt its log-prob and its text; None if they are
    not in the answer."""
    try:
        choice = json.loads(body)["choices"][0]
        listed = choice.get("prompt_logprobs")
        if listed is not None:
            own = [(entry or {}).get(str(id)) for entry, id in zip(listed, ids, strict=True)]
            told = [
                (one["logprob"], one.get("decoded_token")) if one else (None, None) for one in own
            ]
        else:
            found = choice["logprobs"]
            values, texts = found["token_logprobs"], found.get("tokens") or [None] * len(ids)
            told = list(zip(values, texts, strict=True))[: len(ids)]
        if len(told) != len(ids) or not all(
            isinstance(value, int | float) and isinstance(text, str | None)
            for value, text in told[1:]
        ):
            return None
        return [value for value, _ in told], [None, *(text for _, text in told[1:])]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def differs(own: str, other: str) -> bool:
    """Returns whether two texts belong to different tokens. A token that is a part of a character
    has no text of its own, and libraries treat spaces differently."""
    if not own.strip() or "\ufffd" in own + other:
        return False
    return own.split() != other.split()


def _check_measured(rollout: Rollout) -> None:
    rows = (*rollout.branches, rollout)
    if not rollout.num_sampled or any(len(row.logprobs) != len(row.token_ids) for row in rows):
        raise TeacherFailed(
            f"the sampler gave log-probs of {sum(len(row.logprobs) for row in rows)} tokens of the "
            f"completion, of which {rollout.num_sampled} were sampled; expected one of each token"
        )
