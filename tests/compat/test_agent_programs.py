"""Agent packages of PyPI, unmodified, at a session whose sampler says what the test wrote: what is
recorded is what the package says that happened. These packages force calls of tools by default, or
ask for a schema."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import Any

import pytest

from services.orchestrator.app import create_service
from services.orchestrator.store.store import Store
from shared.settings import Settings
from tests.compat.packages import ROOT, python_with
from tests.compat.versions import pinned
from tests.support.rendering_sampler import RenderingSampler, Reply, call, open_session
from tests.support.running import served

pytestmark = [pytest.mark.compat, pytest.mark.timeout(600)]

END = "<|im_end|>"

DISTRIBUTIONS = {
    "pydantic_ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
    "langchain": "langchain-openai",
    "openai_agents": "openai-agents",
    "litellm": "litellm",
}
"""Packages of the index, by the name of their program here."""


def calling(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


async def run(
    settings: Settings, program: str, *replies: Reply, **how: Any
) -> tuple[Any, Any, Any]:
    """Returns what the program printed, the session, and its sampler."""

    sampler = RenderingSampler(list(replies), max_model_len=4000)
    session = open_session(sampler, **{"max_tokens": 2000, **how})
    store = Store("redis://127.0.0.1:1")
    service = create_service(settings, store, works=False, sessions=sampler.sessions)
    async with served(service.server(0)) as url:
        given = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": session.api_key}
        given |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "ANONYMIZED_TELEMETRY": "False"}
        words = [str(python_with("agent-programs")), str(ROOT / "tests/compat/agent_programs.py")]
        done = await asyncio.to_thread(
            subprocess.run, [*words, program], env=given, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), session, sampler


@pytest.mark.parametrize(
    ("program", "last", "second"),
    [
        ("pydantic_ai", calling("final_result", number=9), "required"),
        ("smolagents", calling("final_answer", answer="9"), "required"),
        ("langchain", '{"number": 9}', "auto"),
        ("openai_agents", '{"number": 9}', "auto"),
    ],
)
async def test_a_package_that_forces_calls_is_recorded_as_it_says(
    settings: Settings, program: str, last: str, second: str, ran_on: Any
) -> None:
    ran_on("client", {DISTRIBUTIONS[program]: pinned(DISTRIBUTIONS[program])})
    replies = Reply(call(3)), Reply(last)
    printed, session, sampler = await run(settings, program, *replies)
    named = {"pydantic_ai": ("final_result", 9), "smolagents": ("final_answer", "9")}.get(program)
    key = "number" if program == "pydantic_ai" else "answer"
    answer = [[named[0], {key: named[1]}]] if named else []
    assert printed["calls"] == [["guess", {"number": 3}], *answer]
    assert str(printed["answer"]) == "9"
    assert [asked.tool_choice for asked in sampler.asked] == ["required", second]
    assert all(asked.is_constrained for asked in sampler.constraints)
    assert len(sampler.constraints) == 2
    (rollout,) = session.rollout().rollouts
    # smolagents sends its calls and results back as texts of its own, which is a fork
    assert len(rollout.branches) == (program == "smolagents")
    text: Any = sampler.tokenizer.decode
    sampled = [
        id
        for row in (*rollout.branches, rollout)
        for id, own in zip(row.token_ids, row.sampled, strict=True)
        if own
    ]
    assert text(sampled) == f"{call(3)}{END}{last}{END}"
    assert "higher" in text([*session.rollout().prompt_token_ids, *rollout.token_ids])


async def test_litellm_knows_that_a_session_has_no_room(settings: Settings, ran_on: Any) -> None:
    ran_on("client", {"litellm": pinned("litellm")})
    replies = [Reply("abcdef", cut=True), Reply("x")]
    printed, session, _ = await run(settings, "litellm", *replies, max_tokens=6)
    assert printed["error"] == "ContextWindowExceededError", printed
    assert session.is_full
