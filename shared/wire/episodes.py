"""Episodes: a job's own environments and tools, which the reward service runs in its sandbox."""

from __future__ import annotations

from pydantic import Field

from shared.documented import Plain
from shared.job.environment import EnvironmentSpec
from shared.wire.base import JobId, Wire

EpisodeId = str


class EpisodeOf(Wire):
    """Which episode of which job. Another `job_id` has other processes. Ids are chosen by the
    caller, and a repeated request of one id happens once."""

    job_id: JobId
    environment: EnvironmentSpec
    id: EpisodeId = Field(min_length=1, max_length=200)


class OpenEpisode(EpisodeOf):
    """`POST /episodes/open`: makes the environment of a row and resets it. Kind "tools" has nothing
    to reset."""

    row: dict[str, Plain] = {}


class EpisodeOpened(Wire):
    """What `reset` returned, as text; None: nothing. `tools` are the JSON schemas of the methods or
    functions, in OpenAI's shape, made from type hints and docstrings."""

    observation: str | None
    tools: tuple[dict[str, Plain], ...]


class ToolCall(Wire):
    """A call that the model made: the tool's `name`, and `arguments` as the model wrote them."""

    id: str = ""
    name: str
    arguments: str | dict[str, Plain] = {}


class StepEpisode(EpisodeOf):
    """`POST /episodes/step`: turn number `turn` of the episode, from 0 on: calls tools, one after
    the other."""

    turn: int = Field(ge=0)
    calls: tuple[ToolCall, ...]


class ToolResult(Wire):
    """What a call returned, as text. `failed`: the tool raised, does not exist, or its arguments do
    not fit; the text says so, for the model to read."""

    id: str = ""
    content: str
    failed: bool = False


class EpisodeStepped(Wire):
    """The results of a turn's calls, in order. `done`: the environment says that the episode is
    over (its attribute `done` is true). `reward` is what the turn earned; None: nothing is known
    of it."""

    results: tuple[ToolResult, ...]
    done: bool = False
    reward: float | None = None


class CloseEpisode(EpisodeOf):
    """`POST /episodes/close`: ends the episode, and returns its reward if the environment has
    `get_reward`. `rewarded` false: it failed, and its reward is not needed. `attributes`: reward
    functions need the environment's attributes."""

    rewarded: bool = True
    attributes: bool = False


class EpisodeClosed(Wire):
    """The environment's own reward; None with `has_reward`: it says that no reward applies.
    `attributes` are its public attributes and properties as they were then, as far as they are
    plain data; None: they were not asked for, or there is no environment."""

    has_reward: bool = False
    reward: float | None = None
    attributes: dict[str, Plain] | None = None


class ValidateEnvironment(Wire):
    """`POST /episodes/validate`: opens an episode of a row, and closes it. 422 with a sentence if
    it cannot be opened. All classes of a table are checked. Without `job_id` no worker is kept."""

    job_id: JobId | None = None
    environment: EnvironmentSpec
    row: dict[str, Plain] = {}


class EnvironmentValidated(EpisodeOpened):
    """`has_reward`: the row's class has `get_reward`."""

    has_reward: bool
