"""Tools of MCP servers, beside the functions of the job's own file. They have no reward of their
own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from services.orchestrator.seams import Environment, EpisodeLost
from shared.errors import BadRequest, Unavailable
from shared.http.gate import caller
from shared.http.urls import is_loopback
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

if TYPE_CHECKING:
    from services.orchestrator.extensions.environments.mcp_session import McpSession


def check_allowed(url: str, field: str, settings: Settings) -> None:
    """Raises BadRequest unless HONE_ALLOWED_ENVIRONMENTS has the URL's host."""
    parts = urlsplit(url)
    host, allowed = parts.hostname or "", settings.allowed_environments
    is_own = is_loopback(settings.host) and caller.get() is None
    if allowed is None and is_own and is_loopback(host):
        return
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    named = {name.lower() for name in allowed or ()}
    if {host, f"{host}:{port}"} & named:
        return
    unset = f"not set, so {'this machine' if is_own else 'none'}"
    hosts = unset if allowed is None else ", ".join(allowed) or "none"
    raise BadRequest(
        f"environment.{field} is {url!r:.200}, and jobs may not name its host; expected a host of "
        f"HONE_ALLOWED_ENVIRONMENTS ({hosts})"
    )


MAX_RESULT_CHARS = 32_768
"""Characters of one result, as in the sandbox. The rest is cut off."""


def arguments_of(call: ToolCall, tools: Collection[str]) -> dict[str, Any]:
    """Returns the arguments of a call. Raises ValueError, with a sentence for the model, unless
    they are an object and the tool exists."""
    if call.name not in tools:
        known = ", ".join(tools) or "none"
        raise ValueError(f"There is no tool {call.name!r:.100}; the tools are: {known}.")
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The arguments of {call.name} are not JSON: {error}.") from error
    if not isinstance(arguments, dict):
        shown = f"{json.dumps(arguments)[:100]}, expected a JSON object"
        raise ValueError(f"The arguments of {call.name} are {shown}.")
    return arguments


def result(call: ToolCall, content: str, *, failed: bool = False) -> ToolResult:
    return ToolResult(id=call.id, content=cut(content), failed=failed)


def as_text(value: Any) -> str:
    """Returns text unchanged, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def of_blocks(blocks: Any) -> str | None:
    """Returns the text of MCP's content blocks; None for anything else. Blocks of other types, such
    as images, are only named."""
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return None
    return "\n".join(str(block.get("text", f"[{block.get('type')}]")) for block in blocks)


def tool_schema(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool in OpenAI's shape."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def cut(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]}... [cut off after {MAX_RESULT_CHARS} of {len(text)}]"


@contextlib.asynccontextmanager
async def limit_episode(
    drop: Callable[[], None], what: str, limit_s: float, key: str
) -> AsyncGenerator[None]:
    """Calls `drop` if the block raises, because the episode's state is then unknown. Raises
    EpisodeLost if the block, which `what` names, takes longer than `limit_s` seconds, the job's
    `key`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        drop()
        raise EpisodeLost(f"{what} did not finish within {limit_s:g} s ({key})") from error
    except BaseException:  # raised again
        drop()
        raise


RETRY_S = 1.0
"""Seconds between two attempts to reach a server."""


@dataclass
class _Episode:
    """`own` are the names of the file's functions. `by_tool` has the session of each other tool."""

    own: frozenset[str]
    sessions: list[McpSession] = field(default_factory=list)
    by_tool: dict[str, McpSession] = field(default_factory=dict)


class Tools:
    """Episodes with a session at each server of `spec.mcp`. `own` has the job's functions; None:
    the job has none."""

    service = "environment"

    def __init__(
        self, spec: EnvironmentSpec, settings: Settings, own: Environment | None = None
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._own = own
        self._episodes: dict[str, _Episode] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        """Opens the episode; tries for `boot_s` to reach the servers."""
        give_up_at = asyncio.get_running_loop().time() + self._spec.boot_s
        while True:
            try:
                return await self._open(id, row)
            except EpisodeLost:
                if asyncio.get_running_loop().time() >= give_up_at:
                    raise
            await asyncio.sleep(RETRY_S)

    async def step(self, id: str, turn: int, calls: tuple[ToolCall, ...]) -> EpisodeStepped:
        """Calls the job's functions, and then the servers' tools, each in order."""
        if (episode := self._episodes.get(id)) is None:
            raise EpisodeLost(f"episode {id!r} is not open")
        mine = tuple(call for call in calls if call.name in episode.own)
        async with limit_episode(
            lambda: self.drop(id), f"turn {turn}", self._spec.step_s, "step_s"
        ):
            told = await self._own.step(id, turn, mine) if self._own else None
            own = iter(told.results if told else ())
            results = [
                next(own) if call.name in episode.own else await _called(episode, call)
                for call in calls
            ]
        return EpisodeStepped(results=tuple(results))

    async def close(self, id: str, *, rewarded: bool) -> EpisodeClosed:
        self._end_sessions(id)
        return await self._own.close(id, rewarded=rewarded) if self._own else EpisodeClosed()

    def drop(self, id: str) -> None:
        self._end_sessions(id)
        if self._own:
            self._own.drop(id)

    async def validate(self, row: Mapping[str, Any]) -> EnvironmentValidated:
        tools = (await self._own.validate(row)).tools if self._own else ()
        try:
            offered = await self._connect("validated", tools)
        except EpisodeLost as error:
            raise Unavailable(error.detail) from error
        finally:
            self._end_sessions("validated")
        return EnvironmentValidated(observation=None, tools=offered, has_reward=False)

    async def shut(self) -> None:
        for id in [*self._episodes]:
            self.drop(id)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._own:
            await self._own.shut()

    async def _open(self, id: str, row: Mapping[str, Any]) -> EpisodeOpened:
        opened = await self._own.open(id, row) if self._own else None
        tools = await self._connect(id, opened.tools if opened else ())
        return EpisodeOpened(observation=None, tools=tools)

    async def _connect(
        self, id: str, tools: tuple[dict[str, Any], ...]
    ) -> tuple[dict[str, Any], ...]:
        """Begins the episode's sessions, and returns `tools` and the servers' tools. Raises
        BadRequest for a name that comes twice."""
        from services.orchestrator.extensions.environments.mcp_session import (
            McpSession,  # importing this takes a second
        )

        offered, owner = [*tools], {_name(tool): "the job's file" for tool in tools}
        episode = self._episodes[id] = _Episode(frozenset(owner))
        what = "the list of tools"
        async with limit_episode(lambda: self.drop(id), what, self._spec.boot_s, "boot_s"):
            for url in self._spec.mcp:
                check_allowed(url, "mcp", self._settings)
                session = McpSession(url, self._spec.step_s)
                episode.sessions.append(session)
                for tool in await session.tools():
                    if (name := _name(tool)) in owner:
                        raise BadRequest(
                            f"the tool {name!r} is in {owner[name]} and in {url}; expected tools "
                            "of different names"
                        )
                    episode.by_tool[name], owner[name] = session, url
                    offered.append(tool)
        return tuple(offered)

    def _end_sessions(self, id: str) -> None:
        episode = self._episodes.pop(id, None)
        for session in episode.sessions if episode else ():
            if task := session.drop():
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)


def _name(tool: dict[str, Any]) -> str:
    return tool["function"]["name"]


async def _called(episode: _Episode, call: ToolCall) -> ToolResult:
    try:
        arguments = arguments_of(call, [*episode.own, *episode.by_tool])
    except ValueError as error:
        return result(call, str(error), failed=True)
    return await episode.by_tool[call.name].call(call, arguments)
