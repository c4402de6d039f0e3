"""Why sampler and trainer disagree, by small experiments with a sampler that serves the job's
newest version. The trainer's side is the canary of that version: a fixed sequence with the
trainer's log-probs, which every sync brings. So each cause is told apart by what still agrees;
docs/diagnosis.md has the table. Where all of them agree, what is left is how the job samples.

The sampler is asked by routes that it has anyway: `/weights`, `/weights/check`, `/generate`, and
vLLM's `/v1/completions` for log-probs of given tokens. Nothing that it serves changes, and
`/weights/check` alone holds up sampling."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from shared.http.connecting import client_options
from shared.http.service import Service
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

LATER = 3.0
"""How many times as far the second half of the canary may differ as the first: positions that are
counted wrongly show with distance."""

NUM_SAMPLED = 32
"""Tokens that are sampled to compare: enough for a mean, and done in a second."""

CHECK_S, ANSWER_S = 120.0, 60.0
"""Seconds for reading an engine's tensors back, and for another answer."""

CACHED = re.compile(r"^hone_rollout_cached_prompt_tokens (\S+)$", re.MULTILINE)


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


CAUSES = {
    "version": "stale weights: a sampler does not serve the newest version",
    "tensors": "a load went wrong: the engine's tensors differ from the published ones",
    "dtype": 'another dtype: name one for both by training.dtype, in place of "auto"',
    "same_tokens": "the sampler computes the model otherwise: quantization, a kernel, or model "
    "code of another version",
    "decoding": "the engine's kernels for one token and for many disagree with each other",
    "prefix_cache": "the prefix cache: what is read from it is not what these weights compute",
}
"""What is wrong if an experiment differs, in the order in which they are made."""

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
        async with httpx.AsyncClient(**client_options(url, token), timeout=ANSWER_S) as http:
            sampler = Sampler(client, http, serving, newest)
            return [await sampler.experiment(name) for name in CAUSES]


@dataclass(frozen=True)
class Sampler:
    """A sampler to compare with the trainer's `newest` version. Each experiment is a method, which
    returns the fields of its result."""

    client: Client
    http: httpx.AsyncClient
    serving: ServingWeights
    newest: Proof

    async def experiment(self, name: str) -> Experiment:
        try:
            found: dict[str, Any] = await getattr(self, name)()
        except (HoneError, httpx.HTTPError) as error:
            detail = error.detail if isinstance(error, HoneError) else repr(error)
            found = {"agrees": None, "detail": detail}
        return Experiment(name=name, sampler=self.serving.replica, **found)

    async def version(self) -> dict[str, Any]:
        serves, newest = self.serving, self.newest
        return {
            "agrees": (serves.version, serves.digest) == (newest.version, newest.digest),
            "detail": f"it serves version {serves.version}, digest {str(serves.digest)[:12]}; "
            f"the newest is version {newest.version}, digest {newest.digest[:12]}",
        }

    async def tensors(self) -> dict[str, Any]:
        checked = await self.client.call(
            "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=CHECK_S
        )
        num_read = checked.num_tensors - len(checked.unread)
        detail = f"{num_read} of {checked.num_tensors} tensors were read back from the engine"
        if differing := checked.differing:
            detail += f", and {len(differing)} differ, the first is {differing[0]!r}"
        return {"agrees": None if not num_read else not differing, "detail": detail}

    async def dtype(self) -> dict[str, Any]:
        ours, theirs = self.newest.canary.dtype, self.serving.dtype
        detail = f"the trainer computes in {ours}, the sampler in {theirs}"
        return {"agrees": ours == theirs, "detail": detail}

    async def same_tokens(self) -> dict[str, Any]:
        """Compares the log-probs of the canary, read in one pass without a cache."""
        canary = self.newest.canary
        again = await self._logprobs(list(canary.token_ids))
        return self._compared(canary.logprobs, again, "the trainer's and the {what}{later}")

    async def decoding(self) -> dict[str, Any]:
        """Compares the log-probs of tokens while they are sampled and read in one pass."""
        prompt = self._prompt(1)
        tokens, sampled = await self._sampled(prompt)
        reread = (await self._logprobs(prompt + tokens))[len(prompt) - 1 :]
        return self._compared(sampled, reread, "the {what}, as it sampled and as it read them")

    async def prefix_cache(self) -> dict[str, Any]:
        """Compares the log-probs of the same tokens, before and after their prompt was cached."""
        prompt, before = self._prompt(2), await self._num_cached()
        (ones, cold), (others, warm) = [await self._sampled(prompt) for _ in range(2)]
        if await self._num_cached() <= before:
            detail = (
                "nothing of the prompt was cached: it is shorter than a block of the cache, or the "
                "engine keeps none"
            )
            return {"agrees": None, "detail": detail}
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ones, others, strict=False))
        num_same = len(list(same))
        detail = "the {what}, before and after it had the prompt"
        return self._compared(cold[:num_same], warm[:num_same], detail)

    def _compared(
        self, ones: Sequence[float], others: Sequence[float], detail: str
    ) -> dict[str, Any]:
        allowed = tolerance(self.newest.canary, self.serving)  # by rounding, as at a sync
        gaps = [abs(a - b) for a, b in zip(ones, others, strict=True)]
        half, later = len(gaps) // 2, ""
        first, second = _mean(gaps[:half]), _mean(gaps[half:])
        if half and second > max(LATER * first, allowed):
            later = (
                f"; later tokens differ more ({first:.2g}, then {second:.2g} nats): look at "
                "positions (RoPE) and attention"
            )
        what = f"sampler's log-probs of {len(gaps)} tokens"
        return {
            "agrees": _mean(gaps) <= allowed,
            "difference": round(_mean(gaps), 8),
            "allowed": round(allowed, 8),
            "detail": detail.format(what=what, later=later),
        }

    def _prompt(self, first: int) -> list[int]:
        """Returns the canary from a token on, the `first` or a multiple of 2 further: a prompt that
        no cache has."""
        ids = list(self.newest.canary.token_ids)
        start = random.SystemRandom().randrange(first, len(ids), 2)
        return (ids[start:] + ids[:start])[: max(len(ids) - NUM_SAMPLED, len(ids) // 2)]

    async def _sampled(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Returns the tokens of one completion at temperature 1, the same each time, and their
        log-probs."""
        body = GenerateRequest(
            prompt_token_ids=prompt,  # pyright: ignore[reportArgumentType]
            sampling=Sampling(max_tokens=NUM_SAMPLED, temperature=1.0, seed=0),
            fit=True,
        )
        group = await self.client.call("POST", "/generate", body, RolloutGroup, deadline_s=ANSWER_S)
        rollout = group.rollouts[0]
        if rollout.went_wrong or not len(rollout.token_ids):
            raise Failed(f"the sampler sampled nothing: {rollout.error or rollout.finish_reason}")
        return list(rollout.token_ids), list(rollout.logprobs)

    async def _logprobs(self, ids: list[int]) -> list[float]:
        """Returns the log-probs `[T - 1]` of all tokens but the first, read in one pass, without a
        cache."""
        asked = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        asked["cache_salt"] = secrets.token_hex(8)
        answer = await self.http.post("/v1/completions", json=asked)
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
        found = CACHED.search((await self.http.get("/metrics")).text)
        if not found:
            raise Unavailable("the sampler's /metrics do not say what was cached")
        return float(found[1])


def _mean(gaps: Sequence[float]) -> float:
    return sum(gaps) / len(gaps) if gaps else 0.0
