"""One rollout in an environment: the model answers, its calls of tools go to the environment, and
their results come back as messages, until it answers without a call. READ FIRST.

    open        reset(**row): what it says is appended to the last user message
    turn 0..    the sampler continues the tokens so far; each call is made; the results are rendered
    close       get_reward()

The tokens are the sampler's and are never made again from text. If an environment fails, or its
process dies, the policy is not to blame: the episode is played again, and after `MAX_PLAYED`
failures the rollout has no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.orchestrator.extensions.environments.recording import (
    Recording,
    Turn,
    TurnRequest,
    row_of,
)
from services.orchestrator.grpo.groups import ENVIRONMENT_FAILED
from services.orchestrator.samplers.services import AnswerOptions, Services
from services.orchestrator.seams import LOST, Player
from services.orchestrator.tasks import gather_all
from shared.errors import HoneError
from shared.host import tracing
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import (
    EpisodeClosed,
    EpisodeOpened,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenIds,
    ToolCall,
)

MAX_PLAYED = 3
"""How often an episode is played whose environment fails each time."""

SEEDS_PER_TURN = 1 << 20
"""Seeds of a conversation's turns are this far apart, further than completions of a group are."""


T = TypeVar("T")


@dataclass
class ConversationState:
    """A conversation under way: its messages, of which the first are the prompt, and its turns."""

    messages: list[Message]
    num_prompt: int
    recording: Recording = field(default_factory=Recording)
    num_calls: int = 0
    num_failed: int = 0
    environment_s: float = 0.0
    turn_rewards: list[float | None] = field(default_factory=list[float | None])

    @property
    def num_turns(self) -> int:
        return len(self.recording.turns)

    @property
    def last(self) -> Turn | None:
        return self.recording.turns[-1] if self.recording.turns else None


class EnvironmentFailed(Exception):
    """The environment failed, not the policy."""


@dataclass
class Conversation:
    """Plays a rollout of the prompt, by weights of at least `min_version`. `sampling.max_tokens`
    bounds all its tokens after the prompt. The keys of its requests contain `key`."""

    services: Services
    job: Job
    prompt: Prompt
    min_version: int
    key: str
    sampling: Sampling

    def __post_init__(self) -> None:
        assert self.job.environment and self.services.environment
        self._environment, self._spec = self.services.environment, self.job.environment

    async def play(self) -> RolloutGroup:
        """Returns the rollout as a group of one."""
        why = ""
        async with self.services.samplers.conversations:
            for number in range(MAX_PLAYED):
                try:
                    return await self._episode(f"{self.key}:{number}")
                except EnvironmentFailed as error:
                    why = str(error)
                    get_logger().warning("environment failed", episode=self.key, reason=why)
        found = failed_group(f"the environment failed {MAX_PLAYED} times: {why}")
        return with_info(found, {ENVIRONMENT_FAILED: True})

    async def _episode(self, id: str) -> RolloutGroup:
        limit = asyncio.timeout(None)
        try:
            opened = await self._of_environment(
                "opening an environment", self._environment.open(id, self.prompt.row)
            )
            async with limit:
                limit.reschedule(asyncio.get_running_loop().time() + self._spec.episode_s)
                found = await self._turns(id, opened)
        except TimeoutError:
            if not limit.expired():
                raise
            late = f"the conversation did not finish within {self._spec.episode_s:g} s"
            found = failed_group(late, "timeout")
        except BaseException:  # raised again
            self._environment.drop(id)
            raise
        if found.rollouts[0].went_wrong:
            with contextlib.suppress(HoneError):
                # the server ends the episode after its own time limit
                await self._environment.close(id, rewarded=False)
        return found

    async def _turns(self, id: str, opened: EpisodeOpened) -> RolloutGroup:
        messages = first_messages(self.prompt, opened.observation)
        state, why = ConversationState(messages, len(messages)), "stop"
        while True:
            group = await self._answer(id, state, opened)
            rollout = group.rollouts[0]
            if group.overlong and state.num_turns:
                why = "window"
                break
            if rollout.went_wrong:
                return group
            self._record(state, group)
            calls = tool_calls(rollout)
            if not calls or rollout.finish_reason == "length":
                why = "stop" if rollout.finish_reason == "stop" else "max_tokens"
                break
            if await self._called(id, state, calls):
                break
            if state.num_turns == self._spec.max_turns:
                why = "max_turns"
                break
            if self._room(state) < 1:
                why = "max_tokens"
                break
        closed = await self._of_environment(
            "closing an environment", self._environment.close(id, rewarded=True)
        )
        found = finished_group(state, "stop" if why == "stop" else "length", why)
        if closed.attributes is not None:
            found = with_info(found, {"environment": closed.attributes})
        return with_info(found, rewards(state.turn_rewards, closed))

    async def _answer(
        self, id: str, state: ConversationState, opened: EpisodeOpened
    ) -> RolloutGroup:
        turn, seed = state.num_turns, self.sampling.seed
        limits = [self._room(state), self._spec.max_answer_tokens]
        sampling = self.sampling.model_copy(
            update={
                "max_tokens": min(limit for limit in limits if limit is not None),
                "seed": None if seed is None else seed + turn * SEEDS_PER_TURN,
            }
        )
        return await self.services.samplers.answer(
            tuple(state.messages),
            self.min_version,
            key=f"{id}:{turn}",
            options=AnswerOptions(opened.tools),
            known=state.last and state.last.known,
            sampling=sampling,
        )

    def _record(self, state: ConversationState, group: RolloutGroup) -> None:
        name = str(state.num_turns)
        asked, began = TurnRequest(name, tuple(state.messages)), state.recording.tick()
        turn = state.recording.add(name, asked, state.last, group, began=began)
        state.recording.taken.add(turn)
        state.messages.append(turn.message)
        state.turn_rewards.append(None)

    def _room(self, state: ConversationState) -> int:
        """Returns how many tokens the next answer may have."""
        return self.sampling.max_tokens - (state.last.num_tokens if state.last else 0)

    async def _called(self, id: str, state: ConversationState, calls: tuple[ToolCall, ...]) -> bool:
        """Makes the calls, appends their results, and returns whether the episode is over."""
        began = time.monotonic()
        stepped = await self._of_environment(
            "calling tools", self._environment.step(id, state.num_turns - 1, calls)
        )
        state.environment_s += time.monotonic() - began
        state.turn_rewards[-1] = stepped.reward
        state.num_calls += len(calls)
        state.num_failed += sum(result.failed for result in stepped.results)
        for call, result in zip(calls, stepped.results, strict=True):
            state.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.name,
                    "content": result.content,
                }
            )
        return stepped.done

    async def _of_environment(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        try:
            with self.services.status.on(self._environment.service, what), tracing.span(what):
                return await call
        except HoneError as error:
            if error.code == LOST:
                raise EnvironmentFailed(error.detail) from error
            raise


def first_messages(prompt: Prompt, observation: str | None) -> list[Message]:
    """Returns the prompt's messages, with the environment's first observation at the end of the
    last message of the user."""
    content = prompt.content
    messages: list[Message] = (
        [{"role": "user", "content": content}] if isinstance(content, str) else [*content]
    )
    if observation:
        places = [at for at, message in enumerate(messages) if message.get("role") == "user"]
        if not places:
            return [*messages, {"role": "user", "content": observation}]
        said = messages[places[-1]]
        text = f"{said.get('content') or ''}{observation}"
        messages[places[-1]] = {**said, "content": text}
    return messages


def tool_calls(rollout: Rollout) -> tuple[ToolCall, ...]:
    """Returns the calls that the sampler found in an answer."""
    (message,) = rollout.messages
    return tuple(
        ToolCall(
            id=str(call.get("id") or ""),
            name=str(call["function"]["name"]),
            arguments=call["function"].get("arguments") or {},
        )
        for call in message.get("tool_calls") or ()
    )


def finished_group(state: ConversationState, finish_reason: FinishReason, why: str) -> RolloutGroup:
    """Returns the conversation as a group of one. `why` it ended is "stop", or the limit that it
    reached."""
    group = state.recording.group(finish_reason, state.messages[state.num_prompt :])
    info = {
        "ended": why,
        "turns": state.num_turns,
        "tool_calls": state.num_calls,
        "tool_errors": state.num_failed,
        "environment_s": state.environment_s,
        "forks": len(group.rollouts[0].branches),
    }
    return with_info(group, info)


def rewards(of_turns: Sequence[float | None], closed: EpisodeClosed) -> dict[str, Any]:
    """Returns the environment's rewards for the rollout's `info`: of the episode, by default the
    sum over its steps, and of the turns. Missing ones are left out."""
    given = [reward for reward in of_turns if reward is not None]
    found: dict[str, Any] = {"turn_rewards": [*of_turns], "reward": sum(given)} if given else {}
    return {**found, "reward": closed.reward} if closed.has_reward else found


def failed_group(error: str, finish_reason: FinishReason = "error") -> RolloutGroup:
    """Returns a group of one rollout that is neither graded nor trained on."""
    rollout = Rollout(text="", token_ids=TokenIds(), finish_reason=finish_reason, error=error)
    return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=(rollout,))


def with_info(group: RolloutGroup, info: dict[str, Any]) -> RolloutGroup:
    rollout = group.rollouts[0]
    more = rollout.model_copy(update={"info": {**rollout.info, **info}})
    return group.model_copy(update={"rollouts": (more,)})


def without_prefix(group: RolloutGroup, num_shared: int) -> Rollout:
    """Returns a group's only rollout as a continuation of `num_shared` tokens of its prompt."""
    rollout = group.rollouts[0]
    if (rest := group.prompt_token_ids[num_shared:]) == ():
        return rollout
    found = row_of([(rest, rollout)], rollout.text, rollout.finish_reason, rollout.messages)
    return found.model_copy(update={"info": rollout.info, "branches": rollout.branches})


async def play_group(
    players: Mapping[str, Player],
    services: Services,
    job: Job,
    prompt: Prompt,
    min_version: int,
    key: str,
    sampling: Sampling,
) -> RolloutGroup:
    """Returns the group of `sampling.n` conversations, each by the player of the environment's
    kind."""
    assert job.environment is not None
    play = players[job.environment.kind]
    groups = await gather_all(
        play(services, job, prompt, min_version, f"{key}:{number}", _nth(sampling, number))
        for number in range(sampling.n)
    )
    return joined(groups)


async def converse(
    services: Services, job: Job, prompt: Prompt, min_version: int, key: str, sampling: Sampling
) -> RolloutGroup:
    """Returns one conversation with an environment, as a group of one."""
    return await Conversation(services, job, prompt, min_version, key, sampling).play()


PLAYERS: dict[str, Player] = {"class": converse, "tools": converse, "openenv": converse}


def _nth(sampling: Sampling, number: int) -> Sampling:
    seed = None if sampling.seed is None else sampling.seed + number
    return sampling.model_copy(update={"n": 1, "seed": seed})


def joined(groups: list[RolloutGroup]) -> RolloutGroup:
    """Joins groups of one rollout to one group. Its prompt is the common beginning of their
    prompts; the rest of a prompt, such as a first observation, begins the rollout, unsampled."""
    whole = [group for group in groups if not group.rollouts[0].went_wrong]
    prompts = [list(group.prompt_token_ids) for group in whole] or [[]]
    columns = zip(*prompts, strict=False)
    shared = [ids[0] for ids in itertools.takewhile(lambda ids: len(set(ids)) == 1, columns)]
    rollouts = tuple(
        without_prefix(group, len(shared)) if group in whole else group.rollouts[0]
        for group in groups
    )
    return RolloutGroup(
        prompt_token_ids=TokenIds(shared),
        rollouts=rollouts,
        replica=next((group.replica for group in whole), groups[0].replica),
        overlong=any(group.overlong for group in groups),
    )
