"""Episodes that agents elsewhere play: offers, leases and results, beside sessions that record
nothing but how often they were opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.orchestrator.app import run_extensions
from services.orchestrator.extensions.agents import worker_episodes as agents
from services.orchestrator.extensions.agents.worker_episodes import Episodes
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.grpo.groups import environment_failed, sample_group
from services.orchestrator.samplers.status import AttemptStatus
from shared.errors import BadRequest
from shared.job import Job
from shared.job.file import make_job
from shared.wire import (
    EpisodeResult,
    LeasedEpisode,
    LeaseEpisodes,
    Prompt,
    RenewLeases,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenIds,
)

PROMPT = Prompt(index=0, content="Guess.", row={"secret": 7})


class Session:
    def __init__(self, number: int) -> None:
        self.api_key = f"sk-hone-{number}"
        self.number = number
        self.is_closed = self.is_full = False

    def rollout(self) -> RolloutGroup:
        rollout = Rollout(
            text="answer",
            token_ids=TokenIds([self.number]),
            finish_reason="stop",
        )
        return RolloutGroup(prompt_token_ids=TokenIds([1]), rollouts=(rollout,))

    def answers(self) -> dict[str, int]:
        """The row of `a`, the second in time, comes first."""
        return {"a": 5, "b": 3}

    def close(self) -> None:
        self.is_closed = True


class Around:
    """What an episode needs of its job's services, and a worker's side of the leases."""

    def __init__(self, **environment: Any) -> None:
        self.job: Job = make_job(
            {
                "name": "game",
                "model": "m",
                "steps": 1,
                "data": {"train": "rows"},
                "environment": {"kind": "worker", **environment},
            },
            (),
            "test",
        )
        self.job_id = "job-1"
        self.episodes = Episodes()
        sessions: Any = self
        self.extensions = run_extensions(self.episodes, sessions, SampleOrders())
        self.opened: list[Session] = []
        self.told: list[str] = []
        self.conversations = asyncio.Semaphore(8)
        self.status = AttemptStatus()
        self.caller = self.samplers = self

    def open(self, services: Any, job: Job, **_: Any) -> Session:
        self.opened.append(Session(len(self.opened)))
        return self.opened[-1]

    async def tell(self, message: str, away: bool) -> None:
        self.told.append(message)

    async def group(self, n: int = 1) -> RolloutGroup:
        given = Sampling(n=n, max_tokens=8)
        services: Any = self
        return await sample_group(services, self.job, PROMPT, 0, key="k", sampling=given)

    async def lease(self, worker: str = "w1", **ask: Any) -> list[LeasedEpisode]:
        return [*await self.episodes.lease(LeaseEpisodes(worker=worker, wait_s=5, **ask))]

    def renew(self, *ids: str, returned: tuple[str, ...] = ()) -> tuple[str, ...]:
        body = RenewLeases(worker="w1", ids=ids, returned=returned)
        return self.episodes.renew(body).unwanted

    def end(self, episode: LeasedEpisode, reward: Any = None, **result: Any) -> bool:
        return self.episodes.end(episode.id, EpisodeResult(reward=reward, **result)).taken


def played(
    around: Around, worker: Callable[[], Awaitable[Any]], n: int = 1
) -> tuple[RolloutGroup, Any]:
    """Returns the group and what `worker` returned, run beside each other."""

    async def both() -> tuple[RolloutGroup, Any]:
        async with asyncio.timeout(20):
            return await asyncio.gather(around.group(n), worker())

    return asyncio.run(both())


def tokens(group: RolloutGroup) -> list[int]:
    return [*group.rollouts[0].token_ids]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "LEASE_S", 0.2)
    monkeypatch.setattr(agents, "LOOK_S", 0.02)


def test_a_rollout_has_the_reward_and_the_metrics_of_its_worker() -> None:
    around = Around()

    async def worker() -> None:
        (one,) = await around.lease(num=4)
        assert (one.row, one.prompt, one.job_id) == ({"secret": 7}, "Guess.", "job-1")
        assert (one.api_key, one.path, one.deadline_s) == ("sk-hone-0", "/v1", 1800.0)
        assert around.end(one, 0.5, metrics={"guesses": 3.0})

    group, _ = played(around, worker)
    assert tokens(group) == [0] and around.opened[0].is_closed
    assert group.rollouts[0].info["reward"] == 0.5
    assert group.rollouts[0].info["agent"] == {"guesses": 3.0}


def test_two_workers_share_a_group() -> None:
    around = Around()

    async def worker() -> None:
        first, second = await around.lease("w1", num=2)
        (third,) = await around.lease("w2", num=2, job_id="job-1")
        assert len({first.id, second.id, third.id}) == 3
        for reward, one in enumerate((third, first, second)):
            assert around.end(one, float(reward))

    group, _ = played(around, worker, n=3)
    assert [rollout.info["reward"] for rollout in group.rollouts] == [1.0, 2.0, 0.0]


def test_rewards_per_turn_come_as_a_list_or_by_completion_id() -> None:
    around = Around()

    async def worker() -> None:
        first, second = await around.lease(num=2)
        with pytest.raises(BadRequest, match="has 1 entries; expected 2, one for each recorded"):
            around.end(first, [1.0])
        with pytest.raises(
            BadRequest, match="names the answer 'c'; expected ids of the 2 recorded"
        ):
            around.end(first, {"c": 1.0})
        assert around.end(first, [None, 0.25]) and around.end(second, {"a": 1.0})

    group, _ = played(around, worker, n=2)
    infos = [rollout.info for rollout in group.rollouts]
    assert [info["turn_rewards"] for info in infos] == [[0.25, None], [1.0, None]]
    assert [info["reward"] for info in infos] == [0.25, 1.0]


def test_an_episode_whose_worker_is_silent_goes_to_another_again(short: None) -> None:
    around = Around()

    async def worker() -> bool:
        (dead,) = await around.lease("w1")
        (other,) = await around.lease("w2")
        assert other.id != dead.id and other.api_key == "sk-hone-1"
        assert around.opened[0].is_closed and around.renew(dead.id) == (dead.id,)
        assert around.end(other, 1.0)
        return around.end(dead, 0.0)

    group, late = played(around, worker)
    assert not late and tokens(group) == [1] and group.rollouts[0].info["reward"] == 1.0


def test_a_renewed_lease_lasts_and_a_returned_one_ends_at_once(short: None) -> None:
    around = Around()

    async def worker() -> None:
        (one,) = await around.lease()
        for _ in range(6):
            await asyncio.sleep(0.1)
            assert around.renew(one.id) == ()
        assert around.renew(returned=(one.id,)) == ()
        (again,) = await around.lease()
        assert around.end(again, 1.0) and around.end(again, 1.0), "a repeated result"

    group, _ = played(around, worker)
    assert tokens(group) == [1]


def test_an_agent_that_fails_three_times_has_no_reward() -> None:
    around = Around()

    async def worker() -> None:
        for number in range(3):
            (one,) = await around.lease()
            assert around.end(one, error=f"no browser {number}")

    group, _ = played(around, worker)
    assert environment_failed(group)
    assert group.rollouts[0].error == "the agent failed 3 times: no browser 2"


def test_an_agent_that_fails_without_room_leaves_a_cut_off_rollout() -> None:
    around = Around()

    async def worker() -> None:
        (one,) = await around.lease()
        around.opened[0].is_full = True
        assert around.end(one, error="BadRequestError: no room", metrics={"guesses": 2.0})

    group, _ = played(around, worker)
    (rollout,) = group.rollouts
    assert not environment_failed(group) and tokens(group) == [0] and rollout.error is None
    assert rollout.info == {
        "reward": None,
        "reward_error": "the agent failed after its conversation had used up the context: "
        "BadRequestError: no room",
        "agent": {"guesses": 2.0},
    }


def test_an_episode_that_kills_five_workers_has_no_reward(short: None) -> None:
    around = Around()

    async def worker() -> None:
        for number in range(5):
            for _ in range(2):  # a worker that stops is no dead one
                (one,) = await around.lease(f"w{number}")
                around.renew(returned=(one.id,))
            await around.lease(f"w{number}")

    group, _ = played(around, worker)
    assert environment_failed(group) and len(around.opened) == 15
    assert group.rollouts[0].error == (
        "5 workers died while they played it: worker 'w4' sent nothing for 0.2 s"
    )


def test_failures_and_deaths_of_an_episode_are_counted_apart(short: None) -> None:
    around = Around()

    async def worker() -> None:
        for number in range(2):
            (one,) = await around.lease(f"w{number}")
            around.end(one, error="no browser")
            await around.lease(f"w{number}")
        (one,) = await around.lease("w3")
        around.end(one, 1.0)

    group, _ = played(around, worker)
    assert group.rollouts[0].info["reward"] == 1.0


def test_episodes_that_died_with_a_bad_one_are_played_in_peace(short: None) -> None:
    """Two workers die with all four episodes, of which one is to blame."""
    around = Around()

    async def worker() -> list[int]:
        for number in range(2):
            leased: list[LeasedEpisode] = []
            while len(leased) < 4:
                leased += await around.lease(f"w{number}", num=4)
            await asyncio.sleep(0.3)
        taken: list[int] = []
        for number in range(5):
            found = await around.lease(f"w{min(number, 1) + 2}", num=4)
            taken.append(len(found))
            if number:  # the first one kills its worker again
                assert around.end(found[0], 1.0)
        return taken

    group, taken = played(around, worker, n=4)
    assert taken == [1, 1, 1, 1, 1]
    assert [each.info["reward"] for each in group.rollouts] == [1.0] * 4


def test_an_agent_that_is_not_done_in_time_is_stopped() -> None:
    around = Around(episode_s=0.1)

    async def worker() -> tuple[str, ...]:
        (one,) = await around.lease()
        await asyncio.sleep(0.2)
        assert around.opened[0].is_closed and not around.end(one, 1.0)
        return around.renew(one.id)

    group, unwanted = played(around, worker)
    assert len(unwanted) == 1 and len(around.opened) == 1
    assert group.rollouts[0].finish_reason == "timeout"
    assert group.rollouts[0].error == "the agent did not finish within 0.1 s"


def test_a_job_that_ends_takes_its_episodes_back() -> None:
    around = Around()

    async def ends() -> None:
        task = asyncio.create_task(around.group(2))
        (one,) = await around.lease()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert around.renew(one.id) == (one.id,) and around.opened[0].is_closed
        ask = LeaseEpisodes(worker="w1", num=2)
        assert await around.episodes.lease(ask) == () and around.status.is_idle

    asyncio.run(ends())


def test_events_say_once_that_no_one_asks_and_once_that_a_worker_does(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "NOBODY_S", 0.1)
    around = Around()

    async def worker() -> None:
        await asyncio.sleep(0.4)
        for one in await around.lease(num=2):
            around.end(one, 1.0)

    played(around, worker, n=2)
    assert [message[:43] for message in around.told] == [
        "no worker asked for an episode for 0.1 s; `",
        "a worker asks for episodes again",
    ]
    assert "`hone work agent.py --job job-1` starts one" in around.told[0]


def test_a_kind_says_which_fields_it_needs() -> None:
    for given, said in (
        ({"kind": "worker", "name": "Game"}, 'kind "worker" needs no field of its own; got name'),
        ({"kind": "class", "name": "Game"}, 'kind "class" needs file and name; file is missing'),
        ({"kind": "tools", "file": "a.py", "source": ""}, "file and tools, or mcp; tools is"),
    ):
        with pytest.raises(BadRequest, match=said):
            Around(**given)
