"""Plays episodes: each in a child of its own, which makes the environment and calls its tools.
Standard library only.

    service: {source, file, paths, folder}       worker: {loaded}
    service: {open: {kind, names, name, tools, row}}
              child: {observation, tools, has_reward}, {mistake} of the file, or {error} of this row
    service: {step: [{name, arguments}, ...]}     child: {results: [{content, failed}], done}
    service: {close: {attributes}}                child: {has_reward, reward, attributes}

`open` forks the episode's child. The last two answer {error} too. An answer is the text that the
child sent. A call is lost as its child ends, also when nothing was asked.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import select
import shutil
import sys
import tempfile
import types
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from services.reward.job_code.inside_schemas import NoSchema, schema_of
from services.reward.job_code.inside_serve import (
    Child,
    Handler,
    elide,
    explain,
    find_definition,
    fork,
    number,
)
from services.reward.sandbox.inside import frames, kernel

MAX_ANSWER_BYTES = 8 << 20
"""Of one child to one question. Inside another JSON text it may become six times as long, and the
service takes 64 MiB."""

Tool = Callable[..., Any]

MAX_RESULT_CHARS = 32_768
MAX_TURN_CHARS = 1 << 20
"""Characters of one tool's result, and of a turn's results together. The rest is cut off."""

MAX_ATTRIBUTES_CHARS = 1 << 16
"""Characters of all attributes of an environment together, as JSON. One beyond is left out."""

MAX_SENTENCE_CHARS = 1000
NOT_TOOLS = ("reset", "get_reward")


class InvalidJobFile(Exception):
    """The file is not one of an environment or of tools, whatever the row is."""


def play(channel: int, module: types.ModuleType, file: str) -> None:
    """Answers what is asked until the other end is closed."""
    with asyncio.Runner() as runner:
        episode = Episode(module, file, runner)
        while (asked := frames.receive(channel)) is not None:
            reply = json.dumps(episode.answer(asked), ensure_ascii=False)
            frames.send_bytes(channel, frames.pack_bytes(reply.encode("utf-8", "replace")))


class Episode:
    """`runner` has the event loop of the whole episode, for everything that is async."""

    def __init__(self, module: types.ModuleType, file: str, runner: asyncio.Runner) -> None:
        self._module = module
        self._file = file
        self._runner = runner
        self._environment: Any = None
        self._tools: dict[str, Tool] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            if "open" in asked:
                return self._open(asked["open"])
            if "step" in asked:
                return self._step(asked["step"])
            kept = {"attributes": self._attributes()} if asked["close"]["attributes"] else {}
            return {**self._close(), **kept}
        except InvalidJobFile as error:
            return {"mistake": str(error)}
        except BaseException as error:  # the job's own code: whatever it raises is its answer
            return {"error": explain(error, self._file)}

    def _open(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["kind"] == "tools":
            return self._opened(
                None, self._offer([self._found(name, "function") for name in wanted["tools"]])
            )
        for name in wanted["names"]:
            self._check(self._found(name, "class"))
        made = self._found(wanted["name"], "class")()
        self._environment = made
        tools = self._offer([getattr(made, name) for name in _tool_names(type(made))])
        said = self._finished(made.reset(**_taken(made.reset, wanted["row"])))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"reset returned {elide(said)}, expected text or None")
        return self._opened(said, tools)

    def _offer(self, tools: list[Tool]) -> list[dict[str, Any]]:
        """Returns the schemas of the tools, which can be called from now on."""
        schemas = [self._schema(tool) for tool in tools]
        self._tools = {
            schema["function"]["name"]: tool for schema, tool in zip(schemas, tools, strict=True)
        }
        return schemas

    def _opened(self, said: str | None, tools: list[dict[str, Any]]) -> dict[str, Any]:
        return {"observation": said, "tools": tools, "has_reward": self._has_reward()}

    def _found(self, name: str, what: str) -> Any:
        try:
            target = find_definition(self._module, name, what)
        except LookupError as error:
            raise InvalidJobFile(str(error)) from error
        if inspect.isclass(target) != (what == "class"):
            raise InvalidJobFile(f"{name!r} in {self._file} is {elide(target)}, expected a {what}")
        return target

    def _check(self, kind: type) -> None:
        """Raises InvalidJobFile for a class that is not an environment."""
        if not callable(getattr(kind, "reset", None)):
            raise InvalidJobFile(
                f"{self._line(kind)}: class {kind.__name__!r} has no method reset(self, **row)"
            )
        for name in _tool_names(kind):
            self._schema(getattr(kind, name))

    def _schema(self, tool: Tool) -> dict[str, Any]:
        try:
            return schema_of(tool)
        except NoSchema as error:
            raise InvalidJobFile(f"{self._line(tool)}: {error}") from error

    def _line(self, target: Any) -> str:
        """Returns the file and the line where a class or function is defined."""
        try:
            _, first = inspect.getsourcelines(inspect.unwrap(target))
        except (OSError, TypeError):
            return self._file
        return f"{self._file} line {first}"

    def _step(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        limit = min(MAX_RESULT_CHARS, MAX_TURN_CHARS // max(len(calls), 1))
        results = [self._called(call["name"], call["arguments"], limit) for call in calls]
        done = getattr(self._environment, "done", False)
        return {"results": results, "done": not callable(done) and bool(done)}

    def _called(self, name: str, arguments: Any, limit: int) -> dict[str, Any]:
        try:
            fitting = self._fitting(name, arguments)
        except ValueError as error:
            return {"content": str(error)[:MAX_SENTENCE_CHARS], "failed": True}
        try:
            content = _text(self._finished(self._tools[name](**fitting)))
        except BaseException as error:  # the job's own code
            return {"content": _sentence(error), "failed": True}
        return {"content": _cut(content, limit), "failed": False}

    def _fitting(self, name: str, arguments: Any) -> dict[str, Any]:
        """Returns the arguments by name. Raises ValueError with a sentence for the model."""
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise ValueError(f"There is no tool {name!r:.100}; the tools are: {known}.")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise ValueError(f"The arguments of {name} are not JSON: {error}.") from error
        if not isinstance(arguments, dict):
            raise ValueError(
                f"The arguments of {name} are {elide(arguments)}, expected a JSON object."
            )
        try:
            inspect.signature(self._tools[name]).bind(**arguments)
        except TypeError as error:
            takes = ", ".join(inspect.signature(self._tools[name]).parameters) or "no arguments"
            raise ValueError(
                f"The arguments of {name} do not fit: {error}; it takes {takes}."
            ) from error
        return arguments

    def _close(self) -> dict[str, Any]:
        if not self._has_reward():
            return {"has_reward": False, "reward": None}
        value = self._finished(self._environment.get_reward())
        return {"has_reward": True, "reward": number(value, "get_reward")}

    def _attributes(self) -> dict[str, Any] | None:
        """Returns the public attributes and properties of the environment that JSON has. Others are
        left out; None: there is no environment."""
        if self._environment is None:
            return None
        properties = inspect.getmembers(type(self._environment), inspect.isdatadescriptor)
        names = {*getattr(self._environment, "__dict__", {}), *(name for name, _ in properties)}
        found: dict[str, Any] = {}
        left = MAX_ATTRIBUTES_CHARS
        for name in sorted(name for name in names if not name.startswith("_")):
            try:
                text = json.dumps(getattr(self._environment, name), allow_nan=False)
            except Exception:  # a property of the job's own code, or a value that JSON lacks
                continue
            if len(text) <= left:
                left -= len(text)
                found[name] = json.loads(text)
        return found

    def _has_reward(self) -> bool:
        return callable(getattr(self._environment, "get_reward", None))

    def _finished(self, result: Any) -> Any:
        async def wait(work: Awaitable[Any]) -> Any:
            return await work

        return self._runner.run(wait(result)) if inspect.isawaitable(result) else result


def _tool_names(kind: type) -> list[str]:
    """Returns the public methods, in the order of their names, as TRL gives them to the model."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in methods if name not in NOT_TOOLS and not name.startswith("_")]


def _taken(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row's columns that `reset` has a parameter for."""
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _text(value: Any) -> str:
    """Returns text unchanged, anything else as JSON, or as `str` shows it where JSON has no such
    value."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plainer)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _plainer(value: Any) -> Any:
    """Returns numbers and arrays of numpy, sets and tuples as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}... [cut off after {limit} of {len(text)} characters]"


def _sentence(error: BaseException) -> str:
    kind, message = type(error).__name__, str(error)
    return f"{kind}: {message}"[:MAX_SENTENCE_CHARS] if message else kind


@dataclass
class _Player:
    """The child of one call, an episode. `unsent` waits to be written to it; `heard` is the
    beginning of its answer, if one is due."""

    call: str
    child: Child
    folder: str
    is_asked: bool = False
    unsent: bytes = b""
    heard: bytearray = field(default_factory=bytearray)


class Players(Handler):
    """Forks a child for each episode. What a child sends is not read here, so that it can harm its
    own episode only; no read and no write waits for a child."""

    module_name = "environment"

    def __init__(self, channel: int) -> None:
        super().__init__(channel)
        self._folder = ""
        self._by_call: dict[str, _Player] = {}
        self._by_fd: dict[int, _Player] = {}

    def load(self, opening: dict[str, Any]) -> dict[str, Any]:
        self._folder = opening["folder"]
        self.run_file(opening["source"])
        gc.freeze()  # so that a collection in a child copies no page of the file's objects
        return {"loaded": True}

    def take(self, message: dict[str, Any]) -> None:
        call = message["call"]
        player = self._by_call.get(call)
        if "end" in message:
            if player is not None:
                self._lose(player, "it was ended")
            return
        if player is None and "open" not in message["ask"]:
            return  # it ended meanwhile, and the service was told
        try:
            player = player or self._fork(call)
        except OSError as error:
            self.send(call, lost=f"no process could be started for it: {error}")
            return
        player.is_asked = True
        player.unsent += frames.pack(message["ask"])
        self._write(player)

    def _fork(self, call: str) -> _Player:
        folder = tempfile.mkdtemp(prefix=self._folder, dir="/tmp")
        child = fork(
            lambda channel: play(channel, self.module, self.file),
            lambda: self._become_child(folder),
        )
        child.channel.setblocking(False)
        player = self._by_call[call] = _Player(call, child, folder)
        self._by_fd[child.channel.fileno()] = player
        self.poller.register(child.channel, select.POLLIN)
        return player

    def _become_child(self, folder: str) -> None:
        """Leaves this process without the sockets of others, and with a folder and random numbers
        of its own."""
        with suppress(OSError):  # isolated, it may not, and it ends with its pid namespace
            kernel.die_with_parent()
        os.close(self.channel)
        for player in self._by_call.values():
            player.child.channel.close()
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        numpy_random = sys.modules.get("numpy.random")  # `random` does this itself
        if numpy_random is not None:
            numpy_random.seed()

    def attend(self, fd: int, events: int) -> None:
        player = self._by_fd.get(fd)
        if player is None:
            return  # lost since the poll
        if events & select.POLLOUT:
            self._write(player)
        if events & ~select.POLLOUT:
            self._read(player)

    def _write(self, player: _Player) -> None:
        try:
            player.unsent = player.unsent[player.child.channel.send(player.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return  # it ended, which the next read shows
        wanted = select.POLLIN | (select.POLLOUT if player.unsent else 0)
        self.poller.modify(player.child.channel, wanted)

    def _read(self, player: _Player) -> None:
        try:
            data = player.child.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(player, None)
            return
        player.heard += data
        size = _size(player.heard)
        if size > MAX_ANSWER_BYTES:
            self._lose(player, f"its process answered with more than {MAX_ANSWER_BYTES} bytes")
        elif not player.is_asked or (size and len(player.heard) > frames.HEADER.size + size):
            self._lose(player, "its process sent something that is not an answer")
        elif len(player.heard) == frames.HEADER.size + size:
            text = player.heard[frames.HEADER.size :].decode("utf-8", "replace")
            player.is_asked = False
            player.heard.clear()
            self.send(player.call, answer=text)

    def _lose(self, player: _Player, reason: str | None) -> None:
        """Ends the child, and says why it is lost: `reason`, None: how its process ended."""
        self.poller.unregister(player.child.channel)
        del self._by_fd[player.child.channel.fileno()]
        del self._by_call[player.call]
        code = player.child.end()
        shutil.rmtree(player.folder, ignore_errors=True)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self.send(player.call, lost=reason or f"its process {how}")


def _size(heard: bytearray) -> int:
    """Returns the size of the message that begins here, 0 while that is not known."""
    if len(heard) < frames.HEADER.size:
        return 0
    return int(frames.HEADER.unpack(heard[: frames.HEADER.size])[0])


def serve(channel: int) -> None:
    Players(channel).serve()
