"""Environments on OpenEnv servers, called by the orchestrator itself. It follows the package
`openenv` 0.10: a WebSocket is an episode, and each message is answered by one message, in order.
Jobs name the servers, so redirects to other servers are not followed.

    open      a connection to the server with the fewest episodes, and a reset with the row
    step      an action for each call; the observation is the call's result, and may have a reward
    close     ends the episode on the server, so that its room is free for the next one

An environment whose actions are calls of MCP tools offers these tools; any other offers one tool,
`step`, whose parameters are the schema of its actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError

from services.orchestrator.extensions.environments.tools import (
    arguments_of,
    as_text,
    check_allowed,
    limit_episode,
    of_blocks,
    result,
    tool_schema,
)
from services.orchestrator.seams import EpisodeLost
from shared.errors import BadRequest, Unavailable
from shared.http.connecting import ssl_context
from shared.job import EnvironmentSpec
from shared.settings import Settings
from shared.wire import (
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    Reported,
    ToolCall,
    ToolResult,
)

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message that an environment may send."""

CLOSE_S = 5.0
"""Seconds that a server has to end an episode."""

MAX_CHARS = 1000


class ServerUnreachable(Exception):
    """The server cannot be reached."""


class ServerFull(EpisodeLost):
    """The server has no room for another episode."""


class UnreadableRequest(Exception):
    """The server could not parse the request and ignored it: the error goes to the model."""


class StepReply(BaseModel):
    """The environment's answer to a reset or a step."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    observation: dict[str, Any]
    reward: Reported | None = None
    done: bool = False


class Socket:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._socket = socket
        self._url = url

    async def ask(self, kind: str, data: Mapping[str, Any]) -> StepReply:
        """Sends a reset or a step and returns its answer. Raises ServerFull, UnreadableRequest or
        EpisodeLost."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            # the reason is then in an unread message
            await self._socket.send_json({"type": kind, "data": dict(data)})
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            why = f": {received.extra}" if received.extra else f" (code {self._socket.close_code})"
            raise EpisodeLost(f"the environment at {self._url} closed the connection{why}")
        return self._read(received.data)

    def _read(self, text: str) -> StepReply:
        try:
            frame = json.loads(text)
            if frame["type"] == "observation":
                return StepReply.model_validate(frame["data"])
            code, message = frame["data"]["code"], str(frame["data"]["message"])
        except (ValueError, KeyError, TypeError, ValidationError, RecursionError) as error:
            raise EpisodeLost(
                f"the environment at {self._url} sent {text[:200]!r}; expected an observation with "
                f"a finite reward, or an error"
            ) from error
        if code == "VALIDATION_ERROR":
            raise UnreadableRequest(_with_faults(message, frame["data"].get("errors")))
        if code == "CAPACITY_REACHED":
            raise ServerFull(f"the environment at {self._url} has no room: {message[:MAX_CHARS]}")
        raise EpisodeLost(f"the environment at {self._url} failed ({code}): {message[:MAX_CHARS]}")

    async def close(self) -> None:
        """Ends the episode. Returns once the server has made room for another one, or is late."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.send_json({"type": "close"})
                while not self._socket.closed:
                    await self._socket.receive()
        await self.drop()

    async def drop(self) -> None:
        """Closes the connection without a closing handshake: a late answer would be taken for the
        answer to the next message."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close()


def _with_faults(message: str, errors: Any) -> str:
    faults = [
        f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}"
        for fault in (errors if isinstance(errors, list) else [])
        if isinstance(fault, dict)
    ]
    return "; ".join([message, *faults])[:MAX_CHARS]


CONNECT_S = 10.0


def session() -> aiohttp.ClientSession:
    """Returns a client without cookies, a limit of connections, or redirects."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=ssl_context(), limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        middlewares=(_without_redirects,),
    )


async def connect(http: aiohttp.ClientSession, url: str) -> Socket:
    """Returns a connection to `/ws` of the server. Raises ServerUnreachable."""
    try:
        async with asyncio.timeout(CONNECT_S):
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
    except TimeoutError as error:
        raise ServerUnreachable(
            f"the environment at {url} took no connection in {CONNECT_S:g} s"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        why = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        raise ServerUnreachable(f"the environment at {url} cannot be reached: {why}") from error
    return Socket(socket, url)


async def schema_of_actions(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Returns the JSON Schema of the environment's actions, from `/schema`."""
    try:
        async with http.get(f"{url}/schema") as answer:
            actions = json.loads(await _whole(answer))["action"]
    except (aiohttp.ClientError, OSError, RecursionError, ValueError, KeyError, TypeError) as error:
        raise EpisodeLost(
            f"{url}/schema cannot be read ({type(error).__name__}: {error}); expected the schemas "
            "of an OpenEnv server"
        ) from error
    if not isinstance(actions, dict) or not isinstance(actions.get("properties", {}), dict):
        raise EpisodeLost(
            f"{url}/schema has {str(actions)[:200]} as 'action'; expected a JSON Schema"
        )
    return actions


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the whole body; a single read returns only the part that has arrived. Raises
    ValueError for more than MAX_MESSAGE_BYTES."""
    found = bytearray()
    while piece := await answer.content.read(MAX_MESSAGE_BYTES):
        found += piece
        if len(found) > MAX_MESSAGE_BYTES:
            raise ValueError(f"it has more than {MAX_MESSAGE_BYTES} bytes")
    return bytes(found)


async def _without_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    answer = await handler(request)
    if 300 <= answer.status < 400:
        where = urlsplit(answer.headers.get("Location", "")).netloc or "another address"
        answer.close()
        raise aiohttp.ClientError(f"it redirects to {where}, which is not followed")
    return answer


SKIP_S = 10.0
"""Most seconds that a server is skipped after it could not be reached."""

RETRY_S = 0.5
"""Seconds until a full server is tried again, unless an episode of the job ends there before."""

STEP = "step"
"""The only tool of an environment whose actions are not calls of tools."""

OVER = "The episode is over, so this call was not made."


@dataclass
class _Server:
    """A server. `num_open` counts this job's episodes there, open or being opened. `most`: how many
    there were when the server refused another one. Times are of the event loop's clock."""

    url: str
    num_open: int = 0
    most: float = math.inf
    full_until: float = 0.0
    skipped_until: float = 0.0


@dataclass
class _Episode:
    socket: Socket
    server: _Server
    num_steps: int = 0


@dataclass(frozen=True)
class _Offer:
    """The tools of an environment. `calls_tools`: its actions are calls of these."""

    tools: tuple[dict[str, Any], ...]
    calls_tools: bool

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


class _Servers:
    """Chooses the server of each episode. An unreachable one is skipped for `skip_s` seconds."""

    def __init__(self, urls: Sequence[str], skip_s: float) -> None:
        self.all = tuple(map(_Server, urls))
        self._skip_s = skip_s
        self._changed = asyncio.Event()

    async def take(self) -> _Server:
        """Returns the server with the fewest episodes that may have room, and counts one more
        episode on it. Waits until there is one."""
        while (chosen := self._free()) is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_S)
        if chosen.num_open >= chosen.most:
            chosen.most, chosen.full_until = chosen.num_open + 1, _now() + RETRY_S
        chosen.num_open += 1
        return chosen

    def leave(self, server: _Server) -> None:
        """Counts one episode less on the server."""
        server.num_open -= 1
        self._changed.set()

    def refused(self, server: _Server, error: ServerUnreachable | ServerFull) -> None:
        """Records that the server did not begin the episode."""
        server.num_open -= 1
        if isinstance(error, ServerFull):
            server.most, server.full_until = server.num_open, _now() + RETRY_S
        else:
            server.most, server.skipped_until = math.inf, _now() + self._skip_s

    def _free(self) -> _Server | None:
        now = _now()
        free = [
            server
            for server in self.all
            if server.skipped_until <= now
            and (server.num_open < server.most or server.full_until <= now)
        ]
        return min(free, key=lambda server: server.num_open, default=None)


class OpenEnv:
    """Episodes on the servers of `spec.url`."""

    service = "environment"

    def __init__(self, spec: EnvironmentSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        self._servers = _Servers(spec.urls, min(SKIP_S, spec.boot_s))
        self._episodes: dict[str, _Episode] = {}
        self._offer: _Offer | None = None
        self._http: aiohttp.ClientSession | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        """Waits for a server that can be reached and has room: as long as the job has episodes
        open, which will end, and else `boot_s`. Raises EpisodeLost."""
        since = None
        while True:
            server = await self._servers.take()
            try:
                return await self._begin(id, server, row)
            except (ServerUnreachable, ServerFull) as error:
                self._servers.refused(server, error)
                since = None if self._episodes else since or _now()
                if since and _now() - since >= self._spec.boot_s:
                    waited = f"waited {self._spec.boot_s:g} s (boot_s)"
                    raise EpisodeLost(f"{error}; {waited}, with no other episode open") from error
            except BaseException:  # raised again
                self._servers.leave(server)
                raise

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        if (episode := self._episodes.get(id)) is None:
            raise EpisodeLost(f"episode {id!r} is not open")
        what = f"turn {turn} at {episode.server.url}"
        async with limit_episode(lambda: self.drop(id), what, self._spec.step_s, "step_s"):
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
        """Ends the episode. Its rewards were the steps', so without a step their sum is 0."""
        if (episode := self._episodes.pop(id, None)) is None:
            return EpisodeClosed()
        try:
            await episode.socket.close()
        finally:
            self._servers.leave(episode.server)
        if episode.num_steps:
            return EpisodeClosed()
        return EpisodeClosed(has_reward=True, reward=0.0)

    def drop(self, id: str) -> None:
        if (episode := self._episodes.pop(id, None)) is not None:
            self._servers.leave(episode.server)
            task = asyncio.create_task(episode.socket.drop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        """Opens an episode and ends it. Skips this if the server is full."""
        reasons: list[str] = []
        for server in self._servers.all:
            server.num_open += 1
            try:
                opened = await self._begin("validated", server, row)
            except ServerUnreachable as error:
                self._servers.leave(server)
                reasons.append(str(error))
            except ServerFull:
                self._servers.leave(server)
                return EnvironmentValidated(observation=None, tools=(), has_reward=True)
            except EpisodeLost as error:
                self._servers.leave(server)
                raise BadRequest(f"the environment cannot be opened: {error.detail}") from error
            else:
                await self.close("validated", rewarded=False)
                return EnvironmentValidated(**opened.model_dump(), has_reward=True)
        raise Unavailable("; ".join(reasons))

    async def shut(self) -> None:
        for id in [*self._episodes]:
            self.drop(id)
        await asyncio.gather(*self._ending)
        if self._http:
            await self._http.close()

    async def _begin(self, id: str, server: _Server, row: Mapping[str, Any]) -> EpisodeOpened:
        url, limit_s = server.url, self._spec.boot_s
        check_allowed(url, "url", self._settings)
        self._http = self._http or session()
        socket = await connect(self._http, url)
        try:
            async with asyncio.timeout(limit_s):
                self._offer = self._offer or await self._offered(self._http, url, socket)
                seen = await socket.ask("reset", row)
        except TimeoutError as error:
            await socket.drop()
            raise EpisodeLost(f"{url} did not reset within {limit_s:g} s (boot_s)") from error
        except UnreadableRequest as error:
            await socket.drop()
            raise EpisodeLost(f"{url} refused to reset with the row: {error}") from error
        except BaseException:  # raised again
            await socket.drop()
            raise
        self._episodes[id] = _Episode(socket, server)
        return EpisodeOpened(observation=_shown(seen) or None, tools=self._offer.tools)

    async def _offered(self, http: aiohttp.ClientSession, url: str, socket: Socket) -> _Offer:
        actions = await schema_of_actions(http, url)
        fields = actions.get("properties", {}).keys() - {"metadata"}
        if fields and not {"tool_name", "arguments"} <= fields:
            said = actions.get("description") or "Takes a step in the environment."
            own = {name: kind for name, kind in actions["properties"].items() if name != "metadata"}
            return _Offer((tool_schema(STEP, str(said), {**actions, "properties": own}),), False)
        seen = await socket.ask("step", {"type": "list_tools"})
        try:
            tools = tuple(
                tool_schema(tool["name"], tool.get("description"), tool["input_schema"])
                for tool in seen.observation["tools"]
            )
        except (KeyError, TypeError) as error:
            raise EpisodeLost(
                f"{url} answered list_tools with {str(seen.observation)[:200]}; expected its tools"
            ) from error
        return _Offer(tools, calls_tools=True)

    async def _called(self, socket: Socket, call: ToolCall) -> tuple[ToolResult, StepReply | None]:
        """Returns the call's result, and the observation; None if no step was taken."""
        assert self._offer, "an episode is open"
        try:
            action = arguments_of(call, self._offer.names)
            if self._offer.calls_tools:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": action}
            seen = await socket.ask("step", action)
        except (ValueError, UnreadableRequest) as error:
            return result(call, str(error), failed=True), None
        if not self._offer.calls_tools:
            return result(call, _shown(seen)), seen
        return _of_tool(call, seen.observation), seen


def _now() -> float:
    return asyncio.get_running_loop().time()


def _shown(seen: StepReply) -> str:
    """Returns the observation as text for the model: without metadata, and unchanged if it is a
    single text."""
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
