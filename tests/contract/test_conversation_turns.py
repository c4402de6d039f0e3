"""Turns of a conversation that the caller keeps: POST /generate with tools and known tokens, on a
partner at the `Chat` seam whose tokens can be read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadRequest
from shared.wire import ConversationPrefix, Message, Rollout, RolloutGroup, Sampling
from tests.support.fake_chat import PAIR, sampled_tokens, text_of, tokens
from tests.support.rollout_bench import RolloutBench

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
QUESTION: Message = {"role": "user", "content": "2 + 3?"}
HEAD = "<|im_start|>assistant\n"
ASKED = (
    f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n{HEAD}"
)


def call(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def result(number: int, id: str = "call-1") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": str(number)}


def sampled(text: str, *, cut: bool = False) -> Rollout:
    """A completion in other tokens than its text would be tokenized to."""
    ids = sampled_tokens(text)[: -1 if cut else None]
    reason = "length" if cut else "stop"
    return Rollout(text=text, token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason)


def known(group: RolloutGroup, num_messages: int, answer: int = 0) -> ConversationPrefix:
    ids = [*group.prompt_token_ids, *group.rollouts[answer].token_ids]
    return ConversationPrefix(num_messages=num_messages, token_ids=ids)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    bench = RolloutBench(tmp_path)
    async with bench.client:
        await bench.put()
        bench.engine.max_model_len, bench.engine.vocab_size = 2000, PAIR * 2
        yield bench


async def turn(bench: RolloutBench, *said: Rollout, **request: Any) -> RolloutGroup:
    """Returns the group with `said` as its rollouts."""
    bench.engine.outcome = said
    sampling = Sampling(max_tokens=100, n=len(said))
    given = {"tools": TOOLS, "sampling": sampling, "prompt": (QUESTION,), **request}
    return await bench.generate(prompt_token_ids=None, **given)


async def test_each_rollout_of_a_first_turn_is_a_message_with_its_calls(
    bench: RolloutBench,
) -> None:
    wrong = Rollout(text="", token_ids=(), finish_reason="error", error="lost")
    said = (sampled(f"Well.{call(2, 3)}"), wrong, sampled("It is 5."))
    group = await turn(bench, *said)
    assert text_of(group.prompt_token_ids) == ASKED
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    assert [rollout.messages for rollout in group.rollouts] == [
        ({"role": "assistant", "content": "Well.", "tool_calls": calls},),
        (),
        ({"role": "assistant", "content": "It is 5."},),
    ]
    assert [rollout.token_ids for rollout in group.rollouts] == [one.token_ids for one in said]
    assert (group.forked, group.overlong, group.replica) == ("", False, "here:1")


async def test_another_sampler_continues_after_the_tokens_that_were_sampled(
    bench: RolloutBench, tmp_path: Path
) -> None:
    first = await turn(bench, sampled(f"a{call(2, 3)}{call(4, 5)}"))
    (answer,) = first.rollouts[0].messages
    assert [each["id"] for each in answer["tool_calls"]] == ["call-1", "call-2"]
    messages = (QUESTION, answer, result(5), result(9, "call-2"))

    other = RolloutBench(tmp_path / "other")
    async with other.client:
        await other.put()
        other.engine.max_model_len, other.engine.vocab_size = 2000, PAIR * 2
        second = await turn(other, sampled("5, 9"), prompt=messages, known=known(first, 2))
    between = f"\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n9<|im_end|>\n{HEAD}"
    ids = [*tokens(ASKED), *first.rollouts[0].token_ids, *tokens(between)]
    assert second.prompt_token_ids == ids
    assert second.forked == ""


@pytest.mark.parametrize("forgets", ["before", "after"])
async def test_a_template_that_rewrites_answers_forks_with_a_reason(
    bench: RolloutBench, forgets: Any
) -> None:
    first = await turn(bench, sampled("It is 5."))
    bench.engine.chat.forgets = forgets
    prompt = (QUESTION, *first.rollouts[0].messages, {"role": "user", "content": "sure?"})
    group = await turn(bench, sampled("yes."), prompt=prompt, known=known(first, 2))
    if forgets == "before":  # the text before the answer's end is not rendered again
        assert (group.forked, max(group.prompt_token_ids) > PAIR) == ("", True)
    else:
        assert group.forked == (
            "the chat template renders an answer differently once messages follow"
        )
        shown = "It is 5....<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n"
        assert group.prompt_token_ids == tokens(f"{ASKED}{shown}{HEAD}")


async def test_calls_of_a_conversation_have_ids_of_their_own(bench: RolloutBench) -> None:
    first = await turn(bench, sampled(f"a{call(1, 1)}"))
    prompt = (QUESTION, *first.rollouts[0].messages, result(2))
    said = (sampled(f"b{call(2, 2)}{call(3, 3)}"), sampled(f"c{call(4, 4)}"))
    second = await turn(bench, *said, prompt=prompt, known=known(first, 2))
    ids = [[each["id"] for each in one.messages[0]["tool_calls"]] for one in second.rollouts]
    assert ids == [["call-1-1", "call-2"], ["call-1-1"]]


async def test_a_conversation_that_is_too_long_is_a_jobs_data_and_an_error_by_hand(
    bench: RolloutBench,
) -> None:
    first = await turn(bench, sampled("It is 5."))
    prompt = (QUESTION, *first.rollouts[0].messages, {"role": "user", "content": "sure?"})
    asked = {"prompt": prompt, "known": known(first, 2)}
    fits = await turn(bench, sampled("yes."), **asked)
    size = len(fits.prompt_token_ids)
    bench.engine.max_model_len = size + 99
    sentence = f"a prompt of {size} tokens with 'max_tokens' 100 makes {size + 100}"
    with pytest.raises(BadRequest, match=sentence):
        await turn(bench, sampled("yes."), **asked)
    cut = await turn(bench, sampled("yes."), truncate_prompt=True, **asked)
    assert cut.prompt_token_ids == list(fits.prompt_token_ids)[1:]
    assert (cut.overlong, cut.forked) == (
        True,
        "its first 1 tokens were cut off, and known tokens with them",
    )
    await bench.reload(bench.publish(3))
    refused = await turn(bench, sampled("yes."), job_id="job", **asked)
    assert (refused.overlong, refused.prompt_token_ids, len(refused.rollouts)) == (True, [], 1)
    assert refused.rollouts[0].finish_reason == "error"
    assert sentence in (refused.rollouts[0].error or "")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"prompt": "2 + 3?"}, "expected messages as 'prompt'"),
        (
            {"known": ConversationPrefix(num_messages=3, token_ids=[1])},
            "got 3 of 3 messages, expected fewer",
        ),
        ({"known": ConversationPrefix(num_messages=2, token_ids=[])}, "'known.token_ids' is empty"),
        (
            {"prompt": (QUESTION, QUESTION, QUESTION)},
            "'known' ends with message 1, whose role is 'user'; expected 'assistant'",
        ),
        (
            {"prompt": ({"role": "user", "content": 5}, {"role": "assistant"}, QUESTION)},
            "the 'content' of message 0 is 5; expected text",
        ),
    ],
)
async def test_known_tokens_that_fit_no_conversation_are_refused(
    bench: RolloutBench, wrong: dict[str, Any], sentence: str
) -> None:
    said: Message = {"role": "assistant", "content": "It is 5."}
    right = {
        "prompt": (QUESTION, said, QUESTION),
        "known": ConversationPrefix(num_messages=2, token_ids=[1]),
    }
    with pytest.raises(BadRequest, match=sentence):
        await turn(bench, sampled("yes."), **{**right, **wrong})
    assert bench.engine.samples == 0
