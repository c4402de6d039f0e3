"""Conversations with an environment, by hand: the tokens, masks and messages that they become."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.orchestrator.app import run_extensions
from services.orchestrator.extensions.agents.sessions import Sessions
from services.orchestrator.extensions.agents.worker_episodes import Episodes
from services.orchestrator.extensions.environments.conversation import Conversation, first_messages
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.grpo.groups import environment_failed, sample_group
from services.orchestrator.samplers.status import AttemptStatus
from shared.errors import Conflict
from shared.job import Job
from shared.job.file import make_job
from shared.wire import (
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    Logprobs,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampling,
    Span,
    TokenIds,
    ToolResult,
)

PROMPT = Prompt(index=0, content=({"role": "user", "content": "Guess."},), row={"secret": 7})
CALL = {"id": "c1", "type": "function", "function": {"name": "guess", "arguments": '{"n": 5}'}}


def job_with(**environment: Any) -> Job:
    document = {
        "name": "game",
        "model": "m",
        "steps": 1,
        "data": {"train": "rows"},
        "sampling": {"group_size": 2, "max_tokens": 40},
        "environment": {"source": "class Game: ...", "name": "Game", **environment},
    }
    return make_job(document, (), "test")


class Script:
    """Services whose sampler says each of `answers` in turn: token ids, and whether it calls. What
    was rendered before an answer are the ids 100, 101, ..."""

    def __init__(self, answers: list[tuple[list[int], bool]], first: list[int], **how: Any) -> None:
        self.answers = answers
        self.first = first
        self.how = how
        self.asked: list[dict[str, Any]] = []
        self.closed: list[tuple[str, bool]] = []
        self.dropped: list[str] = []
        self.num_opened = 0
        self.conversations = asyncio.Semaphore(1)
        self.environment, self.service, self.status = self, "reward", AttemptStatus()
        self.samplers = self
        self.extensions = run_extensions(Episodes(), Sessions(), SampleOrders())

    def sampling(self, seed: int | None) -> Sampling:
        return Sampling(n=2, max_tokens=40, seed=seed)

    async def open(self, id: str, row: dict[str, Any]) -> EpisodeOpened:
        self.num_opened += 1
        if self.num_opened <= self.how.get("lost", 0):
            raise Conflict("the child was killed", code="episode_lost")
        assert row == {"secret": 7}
        return EpisodeOpened(observation=" Between 0 and 9.", tools=({"name": "guess"},))

    async def answer(self, messages: Any, min_version: int, **asked: Any) -> RolloutGroup:
        turn = int(asked["key"].rpartition(":")[2])
        self.asked.append({"messages": messages, "turn": turn, **asked})
        if turn == self.how.get("goes_wrong_at"):
            error = Rollout(text="", token_ids=TokenIds(), finish_reason="error", error="no room")
            overlong = bool(self.how.get("overlong"))
            return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=(error,), overlong=overlong)
        ids, calls = self.answers[turn]
        known = list(asked["known"].token_ids) if asked["known"] else self.first
        between = [100, 101] if asked["known"] else []
        message = {"role": "assistant", "content": "x", **({"tool_calls": [CALL]} if calls else {})}
        cut = len(ids) >= asked["sampling"].max_tokens
        rollout = Rollout(
            text=f"answer {turn}",
            token_ids=TokenIds(ids),
            logprobs=Logprobs([-0.5] * len(ids)),
            finish_reason="length" if cut else "stop",
            spans=(Span(version=3 + turn, start=0),),
            messages=(message,),
        )
        return RolloutGroup(
            prompt_token_ids=TokenIds([*known, *between]),
            rollouts=(rollout,),
            replica="s",
            forked="dropped thoughts" if turn == self.how.get("forks") else "",
        )

    async def step(self, id: str, turn: int, calls: Any) -> EpisodeStepped:
        assert [(call.id, call.name, call.arguments) for call in calls] == [
            ("c1", "guess", '{"n": 5}')
        ]
        result = ToolResult(id="c1", content="higher", failed=turn == 1)
        reward = self.how.get("rewards", {}).get(turn)
        done = turn == self.how.get("done")
        return EpisodeStepped(results=(result,), done=done, reward=reward)

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        self.closed.append((id, rewarded))
        own = self.how.get("own", 0.75)
        return EpisodeClosed(has_reward=own is not None, reward=own)

    def drop(self, id: str) -> None:
        self.dropped.append(id)


def play(script: Script, job: Job, **sampling: Any) -> RolloutGroup:
    given = Sampling(max_tokens=40, **sampling)
    return asyncio.run(Conversation(script, job, PROMPT, 3, "k:0", given).play())  # type: ignore


def test_a_conversation_is_one_row_of_which_answers_are_sampled() -> None:
    script = Script([([1, 2], True), ([3], True), ([4, 5], False)], [9, 8])
    group = play(script, job_with(), seed=11)
    (rollout,) = group.rollouts
    assert group.prompt_token_ids == [9, 8] and group.replica == "s"
    assert rollout.token_ids == [1, 2, 100, 101, 3, 100, 101, 4, 5]
    assert rollout.sampled == [1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert rollout.logprobs == [-0.5, -0.5, 0, 0, -0.5, 0, 0, -0.5, -0.5]
    assert [(span.version, span.start) for span in rollout.spans] == [(3, 0), (4, 4), (5, 7)]
    assert rollout.text == "answer 2" and rollout.finish_reason == "stop"
    assert [message["role"] for message in rollout.messages] == [
        *("assistant", "tool", "assistant", "tool", "assistant")
    ]
    told = {"role": "tool", "tool_call_id": "c1", "name": "guess", "content": "higher"}
    assert rollout.messages[1] == told
    info = dict(rollout.info)
    assert info.pop("environment_s") >= 0
    assert info == {
        "ended": "stop",
        "turns": 3,
        "tool_calls": 2,
        "tool_errors": 1,
        "forks": 0,
        "reward": 0.75,
    }
    assert script.closed == [("k:0:0", True)]
    assert [asked["key"] for asked in script.asked] == ["k:0:0:0", "k:0:0:1", "k:0:0:2"]
    assert len({asked["sampling"].seed for asked in script.asked}) == 3
    assert script.asked[0]["messages"][-1]["content"] == "Guess. Between 0 and 9."
    known = script.asked[2]["known"]
    assert known.num_messages == 4 and known.token_ids == [9, 8, 1, 2, 100, 101, 3]


@pytest.mark.parametrize(
    ("answers", "environment", "how", "ended", "reason", "count"),
    [
        ([([1], True)] * 2, {"max_turns": 2}, {}, "max_turns", "length", 2),
        ([([1], True)] * 2, {}, {"done": 1}, "stop", "stop", 2),
        ([([1] * 40, True)], {}, {}, "max_tokens", "length", 1),
        ([([1] * 5, True)], {"max_answer_tokens": 5}, {}, "max_tokens", "length", 1),
    ],
    ids=["turns", "the environment", "all tokens", "an answer's tokens"],
)
def test_what_ends_a_conversation_is_said(
    answers: Any, environment: Any, how: Any, ended: str, reason: str, count: int
) -> None:
    (rollout,) = play(Script(answers, [9], **how), job_with(**environment)).rollouts
    assert (rollout.info["ended"], rollout.finish_reason) == (ended, reason)
    assert rollout.info["turns"] == count


def test_a_conversation_that_fills_the_window_has_its_reward() -> None:
    script = Script([([1], True)], [9], goes_wrong_at=1, overlong=True)
    (rollout,) = play(script, job_with()).rollouts
    assert (rollout.info["ended"], rollout.finish_reason) == ("window", "length")
    assert rollout.token_ids == [1] and rollout.info["reward"] == 0.75
    assert script.closed == [("k:0:0", True)]


def test_an_answer_that_went_wrong_is_no_reward_and_closes_the_episode() -> None:
    script = Script([([1], True)], [9], goes_wrong_at=1)
    (rollout,) = play(script, job_with()).rollouts
    assert rollout.went_wrong and rollout.error == "no room" and "reward" not in rollout.info
    assert script.closed == [("k:0:0", False)]


def test_an_environment_that_fails_is_played_again_and_then_has_no_reward() -> None:
    script = Script([([1], False)], [9], lost=2)
    assert play(script, job_with()).rollouts[0].info["reward"] == 0.75
    assert script.asked[0]["key"] == "k:0:2:0"
    assert script.dropped == ["k:0:0", "k:0:1"]
    group = play(Script([([1], False)], [9], lost=3), job_with())
    assert group.rollouts[0].error == "the environment failed 3 times: the child was killed"
    assert group.rollouts[0].went_wrong and environment_failed(group)


def test_what_turns_earned_is_kept_and_summed_where_there_is_no_reward_of_its_own() -> None:
    answers = [([1], True), ([2], True), ([3], True), ([4], False)]
    earned = {0: 0.25, 2: -1.5}
    info = play(Script(answers, [9], rewards=earned, own=None), job_with()).rollouts[0].info
    assert info["turn_rewards"] == [0.25, None, -1.5, None] and info["reward"] == -1.25
    info = play(Script(answers, [9], rewards=earned), job_with()).rollouts[0].info
    assert info["turn_rewards"] == [0.25, None, -1.5, None] and info["reward"] == 0.75
    info = play(Script(answers, [9], own=None), job_with()).rollouts[0].info
    assert "reward" not in info and "turn_rewards" not in info


def test_a_template_that_rewrites_answers_makes_branches() -> None:
    script = Script([([1, 2], True), ([3], True), ([4], False)], [9], forks=1)
    (rollout,) = play(script, job_with()).rollouts
    (branch,) = rollout.branches
    assert (branch.prompt_token_ids, branch.token_ids) == ([9], [1, 2])
    assert branch.because == "dropped thoughts" and [s.version for s in branch.spans] == [3]
    assert rollout.token_ids == [3, 100, 101, 4] and rollout.sampled == [1, 0, 0, 1]
    assert rollout.num_sampled == 4 and rollout.versions == (3, 4, 5)
    assert [message["role"] for message in rollout.messages] == [
        *("assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert rollout.info["forks"] == 1
    assert script.asked[2]["known"].token_ids == [9, 1, 2, 100, 101, 3]


def test_prompts_that_differ_share_their_beginning() -> None:
    script = Script([([1], True), ([4], False)], [9, 8])

    async def answer(messages: Any, min_version: int, **asked: Any) -> RolloutGroup:
        script.first = [9, 8, 7] if asked["key"].startswith("k:1") else [9, 8, 6, 5]
        return await Script.answer(script, messages, min_version, **asked)

    script.answer = answer  # type: ignore[method-assign]
    group = asyncio.run(sample_group(script, job_with(), PROMPT, 3, key="k"))  # type: ignore
    assert group.prompt_token_ids == [9, 8]
    first, second = group.rollouts
    assert first.token_ids == [6, 5, 1, 100, 101, 4] and second.token_ids == [7, 1, 100, 101, 4]
    assert first.sampled == [0, 0, 1, 0, 0, 1] and second.sampled == [0, 1, 0, 0, 1]
    assert [span.start for span in second.spans] == [0, 4]  # the trainer refuses a gap before them
    assert second.turns == [1, 4]
    assert first.info["reward"] == 0.75


def test_an_observation_ends_the_last_message_of_the_user() -> None:
    text = Prompt(index=0, content="Go", row={})
    assert first_messages(text, None) == [{"role": "user", "content": "Go"}]
    chat = Prompt(
        index=0,
        content=(
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
        ),
        row={},
    )
    assert [each["content"] for each in first_messages(chat, "!")] == ["s", "u!", "a"]
