"""Why sampler and trainer disagree, by small experiments with a sampler that serves the job's
newest version.

The trainer's side is the canary of that version: a fixed sequence with the trainer's log-probs,
which every sync brings. So each cause is told apart by what still agrees:

| experiment   | the same in both                | differs only if                               |
|--------------|---------------------------------|-----------------------------------------------|
| version      |                                 | the sampler serves older weights              |
| tensors      | version                         | a load went wrong in the engine               |
| dtype        |                                 | one of them rounds more coarsely              |
| same_tokens  | tokens, temperature 1, no cache | weights, dtype, quantization or model code do |
| decoding     | engine, weights, temperature 1  | its kernels for one token and for many do     |
| prefix_cache | engine, weights, tokens, seed   | what it cached is of other weights            |

Where all of them agree, what is left is how the job samples: temperature and masks.

The sampler is asked by routes that it has anyway: `/weights`, `/weights/check`, `/generate`, and
vLLM's `/v1/completions` for log-probs of given tokens. Nothing that it serves changes, and
`/weights/check` alone holds up sampling.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2 as httpx
from fastapi import Request
from fastapi.responses import Response

from services.orchestrator.extensions.teacher import read
from services.orchestrator.samplers.discovery import sampler_urls
from services.orchestrator.samplers.syncing import tolerance
from services.orchestrator.store.folder import Proof, RunFolder
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import gather_all
from shared.errors import Conflict, Failed, HoneError, Unavailable
from shared.http import rendering
from shared.http.client import Client
from shared.http.connecting import proxy_headers, ssl_context
from shared.http.service import Service
from shared.http.urls import is_direct
from shared.settings import Settings
from shared.wire import (
    CheckedWeights,
    Experiment,
    ExperimentReport,
    GenerateRequest,
    NoBody,
    RolloutGroup,
    Sampling,
    ServingWeights,
)

T = TypeVar("T")

LATER = 3.0
"""How many times as far the second half of the canary may differ as the first: positions that are
counted wrongly show with distance."""

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


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    given = rendering.answers(ExperimentReport) | rendering.accepted()

    @service.app.post("/v1/jobs/{job_id}/experiments", response_model=None, responses=given)
    async def experiments(job_id: str, request: Request) -> Response:
        """Compares each sampler that serves the job with the trainer, by small experiments, and
        returns which causes of a mismatch they leave. Changes nothing; sampling waits while a
        sampler's tensors are read back."""
        record = await store.get(job_id)
        folder = RunFolder(Path(record.run_dir))
        key = request.headers.get("idempotency-key")
        operation = service.operations.start(
            lambda: _run(settings, store, job_id, folder),
            f"experiments {job_id} {key}" if key else None,
            "{}",
            f"experiments of {job_id}",
        )
        return await service.answer(operation, request)


async def _run(
    settings: Settings, store: Store, job_id: str, folder: RunFolder
) -> ExperimentReport:
    newest = await asyncio.to_thread(folder.proof)
    if newest is None:
        raise Conflict(f"job {job_id!r} has brought no weights with a canary to a sampler yet")
    urls = await sampler_urls(settings.rollout_urls, store.samplers.urls)
    of_all = await gather_all(probe(url, settings, job_id, newest) for url in urls)
    experiments = [one for of_one in of_all for one in of_one]
    if not experiments:
        raise Conflict(
            f"no sampler serves job {job_id!r} now: experiments need its weights, until another "
            "job takes the samplers"
        )
    return report(job_id, newest.version, experiments)


@dataclass(frozen=True)
class SamplerMeasurement:
    """What a sampler answered. `again` are its log-probs `[T - 1]` of the canary, read in one pass
    without a cache. `sampled` and `reread` are log-probs of tokens that it sampled at temperature
    1: while it sampled, and read in one pass afterwards. `cold` and `warm` are of the same tokens
    of one prompt, before and after it was cached. None: it was not measured, and `why_not` says
    why, by the experiment's name."""

    serving: ServingWeights
    checked: CheckedWeights | None = None
    again: Sequence[float] | None = None
    sampled: Sequence[float] | None = None
    reread: Sequence[float] | None = None
    cold: Sequence[float] | None = None
    warm: Sequence[float] | None = None
    why_not: dict[str, str] | None = None


def judge(newest: Proof, measured: SamplerMeasurement) -> list[Experiment]:
    """Returns the experiments with their results, in the order in which they are read."""
    serving, whys = measured.serving, measured.why_not or {}
    ours, theirs = newest.canary.dtype, serving.dtype
    allowed = tolerance(newest.canary, serving)  # the nats that rounding may come to, as at a sync

    def compared(
        ones: Sequence[float] | None, others: Sequence[float] | None, detail: str
    ) -> dict[str, Any] | None:
        if ones is None or others is None:
            return None
        gaps = [abs(a - b) for a, b in zip(ones, others, strict=True)]
        return {
            "agrees": _mean(gaps) <= allowed,
            "difference": round(_mean(gaps), 8),
            "allowed": round(allowed, 8),
            "detail": detail.format(
                what=f"sampler's log-probs of {len(gaps)} tokens", later=_later(gaps, allowed)
            ),
        }

    found: dict[str, dict[str, Any] | None] = {
        "version": {
            "agrees": (serving.version, serving.digest) == (newest.version, newest.digest),
            "detail": f"it serves version {serving.version}, digest {str(serving.digest)[:12]}; "
            f"the newest is version {newest.version}, digest {newest.digest[:12]}",
        },
        "tensors": _tensors(measured.checked) if measured.checked else None,
        "dtype": {
            "agrees": ours == theirs,
            "detail": f"the trainer computes in {ours}, the sampler in {theirs}",
        },
        "same_tokens": compared(
            newest.canary.logprobs, measured.again, "the trainer's and the {what}{later}"
        ),
        "decoding": compared(
            measured.sampled, measured.reread, "the {what}, as it sampled and as it read them"
        ),
        "prefix_cache": compared(
            measured.cold, measured.warm, "the {what}, before and after it had the prompt"
        ),
    }
    unknown = {name: {"agrees": None, "detail": whys.get(name, "")} for name in found}
    return [
        Experiment(name=name, sampler=serving.replica, **(result or unknown[name]))
        for name, result in found.items()
    ]


def _tensors(checked: CheckedWeights) -> dict[str, Any]:
    read = checked.num_tensors - len(checked.unread)
    detail = f"{read} of {checked.num_tensors} tensors were read back from the engine"
    if checked.differing:
        detail += f", and {len(checked.differing)} differ, the first is {checked.differing[0]!r}"
    return {"agrees": None if not read else not checked.differing, "detail": detail}


def _later(gaps: Sequence[float], allowed: float) -> str:
    """Returns what it points at if later tokens differ more."""
    half = len(gaps) // 2
    first, second = _mean(gaps[:half]), _mean(gaps[half:])
    if not half or second <= max(LATER * first, allowed):
        return ""
    return (
        f"; later tokens differ more ({first:.2g}, then {second:.2g} nats): look at positions "
        "(RoPE) and attention"
    )


def _mean(gaps: Sequence[float]) -> float:
    return sum(gaps) / len(gaps) if gaps else 0.0


CAUSES = {
    "version": "stale weights: a sampler does not serve the newest version",
    "tensors": "a load went wrong: the engine's tensors differ from the published ones",
    "dtype": 'another dtype: name one for both by training.dtype, in place of "auto"',
    "same_tokens": "the sampler computes the model otherwise: quantization, a kernel, or model "
    "code of another version",
    "decoding": "the engine's kernels for one token and for many disagree with each other",
    "prefix_cache": "the prefix cache: what is read from it is not what these weights compute",
}
"""What is wrong if an experiment differs."""

NO_CAUSE = (
    "none of these: weights, dtype, kernels and decoding agree at temperature 1, so what is left "
    "is how the job samples (sampling.temperature, top_p, top_k, min_p) or staleness"
)


def report(job_id: str, version: int, experiments: Sequence[Experiment]) -> ExperimentReport:
    """Returns the report, with the causes that are left."""
    differs = {one.name for one in experiments if one.agrees is False}
    agrees = {one.name for one in experiments if one.agrees} - differs
    causes = {name: cause for name, cause in CAUSES.items() if name in differs}
    if differs & {"version", "tensors", "dtype"}:
        causes.pop("same_tokens", None)  # these explain other log-probs
    elif "same_tokens" in differs and "tensors" in agrees:
        causes["same_tokens"] = f"the tensors are right, so {CAUSES['same_tokens']}"
    if not differs and {"version", "same_tokens", "decoding"} <= agrees:
        causes["none"] = NO_CAUSE
    return ExperimentReport(
        job_id=job_id,
        version=version,
        experiments=tuple(experiments),
        causes=tuple(causes.values()),
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
        verify=ssl_context(),
    )


class _Probe:
    def __init__(self, client: Client, http: httpx.AsyncClient) -> None:
        self._client = client
        self._http = http
        self._why_not: dict[str, str] = {}

    async def measured(self, serving: ServingWeights, newest: Proof) -> SamplerMeasurement:
        ids = list(newest.canary.token_ids)
        start = 1 + secrets.randbelow(len(ids) - 1)  # a prompt that no cache has
        prompt = (ids[start:] + ids[:start])[: max(len(ids) - NUM_SAMPLED, len(ids) // 2)]
        found = SamplerMeasurement(
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
