"""A conversation with calls of a tool, turn by turn through POST /generate: the real vLLM and its
parser, beside transformers' rendering of the same messages. One engine start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx2 as httpx
import openai
import pytest

from deploy.tool_model import HEAD, NUMBERS, TAIL, make_tool_model
from services.orchestrator.extensions.agents.sessions import Session, Sessions
from shared.http.client import Client
from shared.wire import ChatRequest, ConversationPrefix, Message, Rollout, RolloutGroup, Sampling
from tests.support.rendering_sampler import job_of_agents
from tests.system.test_rollout_engine import (
    Running,
    assert_sampled_by,
    generate,
    reference_logprobs,
    start,
)

pytestmark = [pytest.mark.engine, pytest.mark.system, pytest.mark.timeout(600)]

PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "guess", "parameters": PARAMETERS}}
ASKED: tuple[Message, ...] = (
    {"role": "system", "content": "Find the number, 0 to 31."},
    {"role": "user", "content": "Guess."},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("tool") / "model")


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Running]:
    running = start(model.parent / "service", HONE_TOOL_PARSER="hermes")
    try:
        spec = {"model": str(model), "dtype": "float32"}
        answer = httpx.put(f"{running.url}/model", json=spec, timeout=500)
        assert answer.status_code == 200, answer.text + running.log.read_text()[-3000:]
        yield running
    finally:
        running.kill()


@pytest.fixture
async def client(service: Running) -> AsyncIterator[Client]:
    async with Client("rollout", service.url, binary=True) as client:
        yield client


class Renderer:
    """The model's tokenizer as transformers loads it."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def __call__(self, messages: Sequence[Message]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=[TOOL], add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(text)


async def turn(
    client: Client, messages: tuple[Message, ...], ids: list[int] | None = None, **sampling: Any
) -> RolloutGroup:
    """Returns a group of 64. `ids` are the tokens up to the last answer in the messages."""
    known = None
    if ids:
        last = max(i for i, each in enumerate(messages) if each["role"] == "assistant")
        known = ConversationPrefix(num_messages=last + 1, token_ids=ids)
    return await generate(
        client,
        prompt_token_ids=None,
        prompt=messages,
        tools=(TOOL,),
        known=known,
        sampling=Sampling(**{"n": 64, "max_tokens": 24, **sampling}),
    )


def with_calls(group: RolloutGroup, num: int) -> Rollout:
    """Returns a rollout that is as many calls, and nothing else."""
    return next(
        rollout
        for rollout in group.rollouts
        if len(calls(rollout)) == num and len(rollout.token_ids) == 3 * num + 1
    )


def calls(rollout: Rollout) -> list[Any]:
    return rollout.messages[0].get("tool_calls") or []  # pyright: ignore[reportReturnType]


def results(rollout: Rollout, *said: str) -> tuple[Message, ...]:
    return tuple(
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(calls(rollout), said, strict=True)
    )


async def test_three_turns_with_calls_are_as_transformers_renders_them(
    service: Running, client: Client, model: Path
) -> None:
    rendered = Renderer(model)
    first = await turn(client, ASKED)
    assert first.prompt_token_ids == rendered(ASKED)
    assert sum(len(calls(rollout)) > 0 for rollout in first.rollouts) > 32
    both = with_calls(first, 2)
    number = rendered.tokenizer.decode(both.token_ids[1])
    assert calls(both)[0]["function"] == {
        "name": "guess",
        "arguments": f'{{"number": {number}}}',
    }

    messages = (*ASKED, *both.messages, *results(both, "higher", "lower"))
    ids = [*first.prompt_token_ids, *both.token_ids]
    second = await turn(client, messages, ids)
    assert list(second.prompt_token_ids)[: len(ids)] == ids
    assert second.prompt_token_ids == rendered(messages)
    one = with_calls(second, 1)

    messages = (*messages, *one.messages, *results(one, "correct"))
    ids = [*second.prompt_token_ids, *one.token_ids]
    third = await turn(client, messages, ids, n=8, max_tokens=8)
    assert list(third.prompt_token_ids)[: len(ids)] == ids
    assert third.prompt_token_ids == rendered(messages)
    assert_sampled_by(model, third)
    given = [call["id"] for rollout in (both, one, with_calls(third, 1)) for call in calls(rollout)]
    assert len(set(given)) == 4
    assert {first.forked, second.forked, third.forked} == {""}


async def test_an_answer_cut_off_in_a_call_is_a_text_and_continues(
    service: Running, client: Client, model: Path
) -> None:
    rendered = Renderer(model)
    group = await turn(client, ASKED, max_tokens=2)
    texts = {HEAD + number for number in NUMBERS}
    cut = next(rollout for rollout in group.rollouts if rollout.text in texts)
    assert cut.finish_reason == "length"
    assert cut.messages == ({"role": "assistant", "content": cut.text},)
    messages = (*ASKED, *cut.messages, {"role": "user", "content": "Continue."})
    second = await turn(client, messages, [*group.prompt_token_ids, *cut.token_ids])
    assert second.prompt_token_ids == rendered(messages)

    open_call = await turn(client, ASKED, stop=("\n</tool_call>",))
    stopped = next(each for each in open_call.rollouts if each.finish_reason == "stop")
    assert TAIL not in stopped.text and len(calls(stopped)) == 1
    assert "Traceback" not in service.log.read_text(), "vLLM's parser logs each malformed call"
    assert not list(service.tmp.rglob("errors.log")), "it would be why the engine died"


class OneSampler:
    """The services of a session: this sampler."""

    caller = SimpleNamespace(job_id="job-1")

    def __init__(self, client: Client) -> None:
        self._client = client
        self.samplers = self

    async def answer(
        self, messages: tuple[Message, ...], _: int, *, key: str, options: Any, **asked: Any
    ) -> RolloutGroup:
        asked |= vars(options)
        return await generate(
            self._client, prompt_token_ids=None, prompt=messages, fit=True, **asked
        )


async def test_a_session_is_a_row_as_transformers_renders_it_with_its_log_probs(
    client: Client, model: Path
) -> None:
    job = job_of_agents(sampling={"group_size": 2, "max_tokens": 200})
    sampling = Sampling(max_tokens=200, seed=3)
    session = Sessions().open(
        cast(Any, OneSampler(client)), job, id="s:0", min_version=0, sampling=sampling
    )
    messages: list[Message] = [*ASKED]
    for _ in range(4):
        request = ChatRequest(messages=tuple(messages), tools=(TOOL,), max_tokens=24)
        answer = await session.turn(Session.asked(request))
        messages.append(answer.message)
        found = answer.message.get("tool_calls") or ()
        messages += [
            {"role": "tool", "tool_call_id": each["id"], "content": "higher"} for each in found
        ]
        messages += [] if found else [{"role": "user", "content": "Guess."}]
    group = session.rollout()
    (rollout,) = group.rollouts
    ids = [*group.prompt_token_ids, *rollout.token_ids]
    rendered = Renderer(model)
    text = rendered.tokenizer.decode
    assert rendered(messages)[: len(ids)] == ids and rollout.branches == ()
    sampled = [id for id, own in zip(rollout.token_ids, rollout.sampled, strict=True) if own]
    between = text(ids).split("assistant\n")[1:]
    assert text(sampled) == "".join(
        part.partition("<|im_end|>")[0] + "<|im_end|>" for part in between
    )
    start = len(group.prompt_token_ids)
    own = reference_logprobs(model, ids, start)
    for logprob, theirs, is_sampled in zip(rollout.logprobs, own, rollout.sampled, strict=True):
        assert logprob == (pytest.approx(theirs, abs=1e-3) if is_sampled else 0)


async def test_without_a_session_vllm_answers_responses_and_messages(service: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        answer = await client.responses.create(
            model="policy", input="Guess.", max_output_tokens=8, temperature=0
        )
    assert answer.usage and 0 < answer.usage.output_tokens <= 8
    assert answer.output_text.startswith("<tool_call>"), "what the model nearly always says"
    async with anthropic.AsyncAnthropic(base_url=service.url, api_key="none") as claude:
        asked: Any = [{"role": "user", "content": "Guess."}]
        message = await claude.messages.create(
            model="policy", messages=asked, max_tokens=8, extra_body={"temperature": 0}
        )
    assert 0 < message.usage.output_tokens <= 8 and message.content[0].type == "text"


SCHEMA = {
    "type": "object",
    "properties": {"why": {"type": "string", "maxLength": 5}, "number": {"type": "integer"}},
    "required": ["why", "number"],
    "additionalProperties": False,
}
OTHER = {"type": "function", "function": {"name": "give_up", "parameters": {"type": "object"}}}


def trainers_logprobs(model: Path, prompt: Sequence[int], rollout: Rollout) -> list[float]:
    """Returns what the trainer's head computes for the tokens of a rollout, over `kept_ids`."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.trainer.learning.head import CandidateTokens
    from services.trainer.learning.policy import chunk_logprobs

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens_T = torch.tensor([*prompt, *rollout.token_ids])
    first = len(prompt)
    counts = list(rollout.kept_counts) or [0] * len(rollout.token_ids)
    kept = CandidateTokens.of(list(rollout.kept_ids), counts)
    with torch.no_grad():
        hidden_TH = network.model(tokens_T[None]).last_hidden_state[0]
        found, _ = chunk_logprobs(
            network.lm_head, hidden_TH[first - 1 : -1], tokens_T[first:], 1.0, kept
        )
    return found.tolist()


def assert_trained_as_sampled(model: Path, group: RolloutGroup) -> None:
    for rollout in group.rollouts:
        assert len(rollout.kept_counts) == len(rollout.token_ids) and 0 not in rollout.kept_counts
        found = trainers_logprobs(model, group.prompt_token_ids, rollout)
        assert list(rollout.logprobs) == pytest.approx(found, abs=1e-4)


async def test_forced_calls_are_sampled_from_what_the_trainer_trains(
    client: Client, model: Path
) -> None:
    asked = {"prompt_token_ids": None, "prompt": ASKED, "tools": (TOOL, OTHER)}
    many = Sampling(n=16, max_tokens=60)
    free, required, named = await asyncio.gather(
        generate(client, **asked, sampling=many),
        generate(client, **asked, tool_choice="required", sampling=many),
        generate(
            client,
            **asked,
            tool_choice={"type": "function", "function": {"name": "guess"}},
            parallel_tool_calls=False,
            sampling=Sampling(n=16, max_tokens=60, top_k=3),
        ),
    )
    assert not any(len(rollout.kept_counts) for rollout in free.rollouts)
    assert_sampled_by(model, free)
    assert_trained_as_sampled(model, required)
    assert_trained_as_sampled(model, named)
    ended = [rollout for rollout in required.rollouts if rollout.finish_reason == "stop"]
    assert ended and all(calls(rollout) for rollout in ended)
    counts = [max(rollout.kept_counts) for rollout in named.rollouts]
    assert max(counts) <= 33, "the model's 32 numbers are equally likely, so all are among the 3"
    ended = [rollout for rollout in named.rollouts if rollout.finish_reason == "stop"]
    assert ended and {len(calls(rollout)) for rollout in ended} == {1}
    assert {calls(rollout)[0]["function"]["name"] for rollout in ended} == {"guess"}
    first = len(required.prompt_token_ids)
    whole = [
        reference_logprobs(model, [*required.prompt_token_ids, *rollout.token_ids], first)
        for rollout in required.rollouts
    ]
    own = [list(rollout.logprobs) for rollout in required.rollouts]
    assert (
        max(a - b for x, y in zip(own, whole, strict=True) for a, b in zip(x, y, strict=True))
        > 1e-2
    )


async def test_a_session_with_schemas_and_forced_calls_is_recorded_with_their_masks(
    client: Client, model: Path
) -> None:
    job = job_of_agents(sampling={"group_size": 2, "max_tokens": 400})
    sampling = Sampling(max_tokens=400, seed=5)
    session = Sessions().open(
        cast(Any, OneSampler(client)), job, id="s:1", min_version=0, sampling=sampling
    )
    messages: list[Message] = [*ASKED]
    limits: list[dict[str, Any]] = [{}, {"tool_choice": "required"}, {"json_schema": SCHEMA}]
    answers = []
    for limit in limits:
        given = {"tools": (TOOL,), "tool_choice": "none", **limit}
        request = ChatRequest(messages=tuple(messages), max_tokens=60, **given)
        answer = await session.turn(Session.asked(request))
        answers.append(answer)
        messages.append(answer.message)
        found = answer.message.get("tool_calls") or ()
        messages += [
            {"role": "tool", "tool_call_id": each["id"], "content": "higher"} for each in found
        ]
        messages += [] if found else [{"role": "user", "content": "Guess."}]
    assert answers[1].message["tool_calls"]
    if answers[2].rollout.finish_reason == "stop":
        said = json.loads(str(answers[2].message["content"]))
        assert set(said) == {"why", "number"} and len(said["why"]) <= 5
    group = session.rollout()
    (rollout,) = group.rollouts
    assert rollout.branches == ()
    starts = list(rollout.turns)
    for first, answer, limit in zip(starts, answers, limits, strict=True):
        counts = list(rollout.kept_counts)[first : first + len(answer.rollout.token_ids)]
        assert (0 not in counts) if limit else not any(counts)
    found = trainers_logprobs(model, group.prompt_token_ids, rollout)
    for logprob, own, is_sampled in zip(rollout.logprobs, found, rollout.sampled, strict=True):
        assert logprob == (pytest.approx(own, abs=1e-3) if is_sampled else 0)
