"""Asks a sampler what the experiments compare (experiments.py), by routes that it has anyway:
`/weights`, `/weights/check`, `/generate`, and vLLM's `/v1/completions` for log-probs of given
tokens. Nothing that it serves changes, and `/weights/check` alone holds up sampling."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2 as httpx

from services.orchestrator.extensions.diagnosis.experiments import Measured, judge
from services.orchestrator.extensions.teacher import read
from services.orchestrator.store.folder import Proof
from shared.errors import Failed, HoneError, Unavailable
from shared.http.client import Client
from shared.http.connecting import proxy_headers, trusted
from shared.http.urls import is_direct
from shared.settings import Settings
from shared.wire import (
    CheckedWeights,
    Experiment,
    GenerateRequest,
    NoBody,
    RolloutGroup,
    Sampling,
    ServingWeights,
)

T = TypeVar("T")

POLICY = "policy"
"""What the sampler calls the weights in training."""

NUM_SAMPLED = 32
"""Tokens that are sampled to compare: enough for a mean, and done in a second."""

CHECK_S = 120.0
"""Seconds for reading an engine's tensors back."""

ANSWER_S = 60.0

CACHED = re.compile(r"^hone_rollout_cached_prompt_tokens (\S+)$", re.MULTILINE)

NOT_CACHED = (
    "nothing of the prompt was cached: it is shorter than a block of the cache, or the engine "
    "keeps none"
)


async def probe(url: str, settings: Settings, job_id: str, newest: Proof) -> list[Experiment]:
    """Returns the experiments with the sampler at `url`; none if it does not serve the job, or does
    not answer."""
    token = settings.bearer()
    async with Client("rollout", url, token=token, patience_s=0.0) as client:
        try:
            serving = await client.get("/weights", ServingWeights, deadline_s=ANSWER_S)
        except HoneError:  # `hone doctor` says how the services are
            return []
        if serving.job_id != job_id:
            return []
        async with _http(url, token) as http:
            return judge(newest, await _Probe(client, http).measured(serving, newest))


def _http(url: str, token: str | None) -> httpx.AsyncClient:
    authorization = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(
        base_url=url,
        headers=authorization | proxy_headers(url),
        timeout=ANSWER_S,
        trust_env=not is_direct(urlsplit(url).hostname or ""),
        verify=trusted(),
    )


class _Probe:
    def __init__(self, client: Client, http: httpx.AsyncClient) -> None:
        self._client = client
        self._http = http
        self._why_not: dict[str, str] = {}

    async def measured(self, serving: ServingWeights, newest: Proof) -> Measured:
        ids = list(newest.canary.token_ids)
        start = 1 + secrets.randbelow(len(ids) - 1)  # a prompt that no cache has
        prompt = (ids[start:] + ids[:start])[: max(len(ids) - NUM_SAMPLED, len(ids) // 2)]
        found = Measured(
            serving,
            checked=await self._or_why("tensors", self._checked),
            again=await self._or_why("same_tokens", lambda: self._logprobs(ids)),
            why_not=self._why_not,
        )
        before = await self._or_why("prefix_cache", self._num_cached)
        first = await self._or_why("decoding", lambda: self._sampled(prompt))
        if first is None:
            return found
        tokens, sampled = first
        reread = await self._or_why("decoding", lambda: self._logprobs(prompt + tokens))
        found = replace(found, sampled=sampled, reread=reread and reread[len(prompt) - 1 :])
        second = await self._or_why("prefix_cache", lambda: self._sampled(prompt))
        after = await self._or_why("prefix_cache", self._num_cached)
        if second is None or before is None or after is None:
            return found
        if not after > before:
            self._why_not["prefix_cache"] = NOT_CACHED
            return found
        num_same = _num_same(tokens, second[0])
        return replace(found, cold=sampled[:num_same], warm=second[1][:num_same])

    async def _or_why(self, name: str, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Returns the answer; None, and notes why, if there is none."""
        try:
            return await ask()
        except (HoneError, httpx.HTTPError) as error:
            detail = error.detail if isinstance(error, HoneError) else repr(error)
            self._why_not.setdefault(name, detail)
            return None

    async def _checked(self) -> CheckedWeights:
        return await self._client.call(
            "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=CHECK_S
        )

    async def _sampled(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Returns the tokens of one completion at temperature 1, the same each time, and their
        log-probs."""
        body = GenerateRequest(
            prompt_token_ids=prompt,  # pyright: ignore[reportArgumentType]
            sampling=Sampling(max_tokens=NUM_SAMPLED, temperature=1.0, seed=0),
            fit=True,
        )
        group = await self._client.call(
            "POST", "/generate", body, RolloutGroup, deadline_s=ANSWER_S
        )
        rollout = group.rollouts[0]
        if rollout.went_wrong or not len(rollout.token_ids):
            raise Failed(f"the sampler sampled nothing: {rollout.error or rollout.finish_reason}")
        return list(rollout.token_ids), list(rollout.logprobs)

    async def _logprobs(self, ids: list[int]) -> list[float]:
        """Returns the log-probs `[T - 1]` of all tokens but the first, read in one pass, without a
        cache."""
        asked = {"model": POLICY, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        asked["cache_salt"] = secrets.token_hex(8)
        answer = await self._http.post("/v1/completions", json=asked)
        if answer.status_code != 200:
            raise Unavailable(
                f"the sampler answered {answer.status_code} to /v1/completions: {answer.text[:200]}"
            )
        told = await asyncio.to_thread(read, answer.content, ids)
        if told is None:
            raise Unavailable("the sampler gave no log-probs of the tokens that it was sent")
        return [value for value in told[0][1:] if value is not None]

    async def _num_cached(self) -> float:
        """Returns how many tokens of prompts the cache has held so far."""
        answer = await self._http.get("/metrics")
        found = CACHED.search(answer.text)
        if not found:
            raise Unavailable("the sampler's /metrics do not say what was cached")
        return float(found[1])


def _num_same(ones: list[int], others: list[int]) -> int:
    """Returns how many tokens both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ones, others, strict=False))
    return len(list(same))
