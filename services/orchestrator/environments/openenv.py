"""Environments of OpenEnv servers. READ FIRST of the kinds that the orchestrator speaks to itself.

    open      a connection to the replica with the fewest episodes, and a reset with the row
    step      an action for each call; what is seen is the call's result, and may have a reward
    close     ends the episode on the server, so that its room is free for the next one

An environment whose actions are calls of MCP tools offers these tools; any other offers one tool,
`step`, whose parameters are the schema of its actions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.orchestrator.environments.allowed import check_allowed
from services.orchestrator.environments.connecting import connect, schema_of_actions, session
from services.orchestrator.environments.environment import Lost, Unreachable
from services.orchestrator.environments.images import Containers
from services.orchestrator.environments.replicas import Replica, Replicas
from services.orchestrator.environments.results import (
    arguments_of,
    as_text,
    of_blocks,
    result,
    tool_schema,
)
from services.orchestrator.environments.sockets import Away, Full, Refused, Seen, Socket
from services.orchestrator.tasks import stop
from shared.errors import BadRequest, HoneError
from shared.host.logs import get_logger
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import (
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    ToolCall,
    ToolResult,
)

SKIP_S = 10.0
"""Seconds that a replica is skipped after it could not be reached."""

STEP = "step"
"""The one tool of an environment whose actions are not calls of tools."""

OVER = "The episode is over, so this call was not made."


@dataclass
class _Episode:
    socket: Socket
    replica: Replica
    num_steps: int = 0


@dataclass(frozen=True)
class _Offer:
    """The tools of the environment. `calls_tools`: its actions are calls of them."""

    tools: tuple[dict[str, Any], ...]
    calls_tools: bool

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


class OpenEnv:
    """Episodes on the servers of `spec.url`, or of `containers`."""

    service = "environment"

    def __init__(
        self, spec: EnvironmentSpec, settings: Settings, containers: Containers | None = None
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._containers = containers
        self._replicas = Replicas(spec.urls, min(SKIP_S, spec.boot_s))
        self._episodes: dict[str, _Episode] = {}
        self._offer: _Offer | None = None
        self._http: aiohttp.ClientSession | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._mending: dict[int, asyncio.Task[None]] = {}

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        """Waits for room as long as it takes, and for a server that can be reached `boot_s`.
        Raises Lost."""
        loop, away_since = asyncio.get_running_loop(), None
        await self._start()
        while True:
            replica = await self._replicas.take()
            try:
                return await self._begin(id, replica, row)
            except Full:
                self._replicas.full(replica)
            except Away as error:
                self._replicas.away(replica)
                self._mend(replica)
                away_since = away_since or loop.time()
                if loop.time() - away_since >= self._spec.boot_s:
                    raise Lost(str(error)) from error
            except BaseException:  # raised again
                self._replicas.leave(replica)
                raise

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        async with self._asking(id, f"turn {turn}", self._spec.step_s) as episode:
            results: list[ToolResult] = []
            rewards: list[float] = []
            done = False
            for call in calls:
                if done:
                    results.append(result(call, OVER, failed=True))
                    continue
                told, seen = await self._called(episode.socket, call)
                results.append(told)
                if seen:
                    episode.num_steps += 1
                    done = seen.done
                    rewards += [] if seen.reward is None else [seen.reward]
        reward = sum(rewards) if rewards else None
        return EpisodeStepped(results=tuple(results), done=done, reward=reward)

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        """The rewards were the steps'. Without a step their sum is 0."""
        if (episode := self._episodes.pop(id, None)) is None:
            return EpisodeClosed()
        try:
            await episode.socket.close()
        finally:
            self._replicas.leave(episode.replica)
        if episode.num_steps:
            return EpisodeClosed()
        return EpisodeClosed(has_reward=True, reward=0.0)

    def drop(self, id: str) -> None:
        if (episode := self._episodes.pop(id, None)) is not None:
            self._replicas.leave(episode.replica)
            task = asyncio.create_task(episode.socket.drop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        """A server that is full is not asked for an episode."""
        reasons: list[str] = []
        await self._start()
        for replica in self._replicas.all:
            replica.num_open += 1
            try:
                opened = await self._begin("validated", replica, row)
            except Away as error:
                self._replicas.leave(replica)
                reasons.append(str(error))
            except Full:
                self._replicas.leave(replica)
                return EnvironmentValidated(observation=None, tools=(), has_reward=True)
            except Lost as error:
                self._replicas.leave(replica)
                raise BadRequest(f"the environment cannot be opened: {error.detail}") from error
            else:
                await self.close("validated", rewarded=False)
                return EnvironmentValidated(**opened.model_dump(), has_reward=True)
        raise Unreachable("; ".join(reasons))

    async def shut(self) -> None:
        for id in [*self._episodes]:
            self.drop(id)
        await asyncio.gather(*self._ending)
        await stop(*self._mending.values())
        if self._containers:
            await self._containers.remove()
        if self._http:
            await self._http.close()

    async def _start(self) -> None:
        """Starts the containers, if there are any and they are not started yet."""
        if self._containers and not self._replicas.all:
            self._replicas.add(await self._containers.start(self._client))

    def _mend(self, replica: Replica) -> None:
        """Has the container of a replica started again, unless that is under way."""
        number = self._replicas.number_of(replica)
        if self._containers and (number not in self._mending or self._mending[number].done()):
            self._mending[number] = asyncio.create_task(self._mended(self._containers, replica))

    async def _mended(self, containers: Containers, replica: Replica) -> None:
        try:
            number, is_full = self._replicas.number_of(replica), replica.full_since is not None
            url = await containers.up(number, self._client, restarted=is_full)
        except HoneError as error:  # the next episode that meets it tries again
            get_logger().warning("environment not started again", reason=error.detail)
        else:
            self._replicas.back(replica, url)

    @property
    def _client(self) -> aiohttp.ClientSession:
        self._http = self._http or session()
        return self._http

    async def _begin(self, id: str, replica: Replica, row: Mapping[str, Any]) -> EpisodeOpened:
        url, limit_s = replica.url, self._spec.boot_s
        if not self._containers:
            check_allowed(url, "url", self._settings)
        socket = await connect(self._client, url)
        try:
            async with asyncio.timeout(limit_s):
                self._offer = self._offer or await self._offered(self._client, url, socket)
                seen = await socket.ask("reset", row)
        except TimeoutError as error:
            await socket.drop()
            raise Lost(f"{url} did not reset within {limit_s:g} s (boot_s)") from error
        except Refused as error:
            await socket.drop()
            raise Lost(f"{url} refused to reset with the row: {error}") from error
        except Full as error:
            await socket.drop()
            self._check_has_room(replica, error)
            raise
        except BaseException:  # raised again
            await socket.drop()
            raise
        replica.full_since = None
        self._episodes[id] = _Episode(socket, replica)
        return EpisodeOpened(observation=_shown(seen) or None, tools=self._offer.tools)

    def _check_has_room(self, replica: Replica, error: Full) -> None:
        """Raises Away if a replica has been full for `boot_s` with no episode of this job: it
        keeps places for episodes that have ended, or others have them all. Other requests of the
        job under way may be resets that it let in, unless it has counted as away already."""
        if any(episode.replica is replica for episode in self._episodes.values()):
            replica.full_since = None
            return
        now = asyncio.get_running_loop().time()
        since = replica.full_since = replica.full_since or now
        may_reset = replica.num_open > 1 and replica.away_until < since
        if now - since >= self._spec.boot_s and not may_reset:
            raise Away(
                f"{error}; this has lasted {self._spec.boot_s:g} s (boot_s), and no episode of "
                "this job is open there"
            ) from error

    async def _offered(self, http: aiohttp.ClientSession, url: str, socket: Socket) -> _Offer:
        actions = await schema_of_actions(http, url)
        fields = actions.get("properties", {}).keys() - {"metadata"}
        if fields and not {"tool_name", "arguments"} <= fields:
            said = actions.get("description") or "Takes a step in the environment."
            return _Offer((tool_schema(STEP, str(said), _without_metadata(actions)),), False)
        seen = await socket.ask("step", {"type": "list_tools"})
        try:
            tools = tuple(
                tool_schema(tool["name"], tool.get("description"), tool["input_schema"])
                for tool in seen.observation["tools"]
            )
        except (KeyError, TypeError) as error:
            raise Lost(
                f"{url} answered list_tools with {str(seen.observation)[:200]}; expected its tools"
            ) from error
        return _Offer(tools, calls_tools=True)

    async def _called(self, socket: Socket, call: ToolCall) -> tuple[ToolResult, Seen | None]:
        """Returns the call's result, and what was seen; None where no step was taken."""
        assert self._offer, "an episode is open"
        try:
            action = arguments_of(call, self._offer.names)
            if self._offer.calls_tools:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": action}
            seen = await socket.ask("step", action)
        except (ValueError, Refused) as error:
            return result(call, str(error), failed=True), None
        if not self._offer.calls_tools:
            return result(call, _shown(seen)), seen
        return _of_tool(call, seen.observation), seen

    @contextlib.asynccontextmanager
    async def _asking(self, id: str, what: str, limit_s: float) -> AsyncGenerator[_Episode]:
        """Drops the episode if anything but success leaves the block: its state is unknown."""
        if (episode := self._episodes.get(id)) is None:
            raise Lost(f"episode {id!r} is not open")
        try:
            async with asyncio.timeout(limit_s):
                yield episode
        except TimeoutError as error:
            self.drop(id)
            raise Lost(
                f"{what} was not done by {episode.replica.url} within {limit_s:g} s (step_s)"
            ) from error
        except Full as error:
            self.drop(id)
            raise Lost(str(error)) from error
        except BaseException:  # raised again
            self.drop(id)
            raise


def _without_metadata(actions: dict[str, Any]) -> dict[str, Any]:
    fields = {name: field for name, field in actions["properties"].items() if name != "metadata"}
    return {**actions, "properties": fields}


def _shown(seen: Seen) -> str:
    """Returns what the model reads of an observation: without metadata, and a lone text as it
    is."""
    fields = {name: value for name, value in seen.observation.items() if name != "metadata"}
    only = [*fields.values()]
    if len(only) == 1 and isinstance(only[0], str):
        return only[0]
    return as_text(fields) if fields else ""


def _of_tool(call: ToolCall, observation: dict[str, Any]) -> ToolResult:
    """Returns the result of a call of an MCP tool."""
    if error := observation.get("error"):
        said = error.get("message") if isinstance(error, dict) else error
        return result(call, as_text(said), failed=True)
    found = observation.get("result", observation)
    if isinstance(found, dict) and (text := of_blocks(found.get("content"))) is not None:
        return result(call, text, failed=bool(found.get("is_error")))
    return result(call, as_text(found))
