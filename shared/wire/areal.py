"""Bodies of AReaL's online routes, as `areal` 1.0 sends and reads them."""

from __future__ import annotations

from pydantic import Field

from shared.wire.base import Reported, Wire


class StartSession(Wire):
    """`POST /v1/rl/start_session`: sessions of the same `task_id` are rollouts of one group.
    `api_key` is an earlier session's: that session ends, and the new one has its key."""

    task_id: str = Field(min_length=1, max_length=200)
    api_key: str | None = None


class SessionStarted(Wire):
    """The session's name, and its key: the API key of its agent's calls."""

    session_id: str
    api_key: str


class SetReward(Wire):
    """`POST /v1/rl/set_reward`: the reward of the answer `interaction_id`; None: the last one."""

    reward: Reported
    interaction_id: str | None = None


class RewardSet(Wire):
    message: str = "success"


class SessionEnded(Wire):
    """`POST /v1/rl/end_session`: the rollout is on disk. It has `interaction_count` answers; with
    none it is not trained on."""

    message: str = "success"
    interaction_count: int
