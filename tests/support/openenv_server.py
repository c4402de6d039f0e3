"""A server that speaks OpenEnv's frames, for faults on demand: a number to find, and numbers that
make it fail. The package's own server is in tests/compat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from tests.support.running import served

FAILS, HANGS_UP, HANGS = 100, 101, 102
"""Guesses that the environment fails at, ends the connection at, and never answers."""

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}, "metadata": {}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


class GuessServer:
    """`capacity` episodes at once. `open` is how many there are, `resets` what came with each. With
    `calls_tools` its actions are calls of tools."""

    def __init__(self, capacity: int = 100, *, calls_tools: bool = False) -> None:
        self.capacity = capacity
        self.open = self.most = 0
        self.refused = 0
        self.resets: list[dict[str, Any]] = []
        self.calls_tools = calls_tools
        self.app = FastAPI()
        self.app.get("/schema")(self._schema)
        self.app.websocket("/ws")(self._episode)
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[GuessServer]:
        config = uvicorn.Config(self.app, port=0, log_level="error", timeout_graceful_shutdown=1)
        async with served(uvicorn.Server(config)) as self.url:
            yield self

    async def _schema(self) -> dict[str, Any]:
        tool = {"properties": {"type": {}, "tool_name": {}, "arguments": {}, "metadata": {}}}
        return {"action": tool if self.calls_tools else NUMBER, "observation": {}, "state": {}}

    async def _episode(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.open >= self.capacity:
            self.refused += 1
            await _error(socket, "CAPACITY_REACHED", "full")
            await socket.close()
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self._played(socket)
        except WebSocketDisconnect:
            pass
        finally:
            self.open -= 1

    async def _played(self, socket: WebSocket) -> None:
        secret = -1
        while (message := await socket.receive_json())["type"] != "close":
            data = message["data"]
            if message["type"] == "reset":
                self.resets.append(data)
                if data.get("secret") == FAILS:
                    await _error(socket, "EXECUTION_ERROR", "no such secret")
                    continue
                secret = data.get("secret", -1)
                await _seen(socket, {"hint": " From 0 to 31.", "metadata": {}})
            elif data.get("type") == "list_tools":
                await _seen(socket, {"tools": [ADD]})
            elif data.get("type") == "call_tool":
                await self._call(socket, data)
            elif not await self._guess(socket, data.get("number"), secret):
                break
        await socket.close()

    async def _call(self, socket: WebSocket, data: dict[str, Any]) -> None:
        if data["arguments"].get("a") is None:
            error = {"error_type": "invalid_args", "message": "a is missing"}
            await _seen(socket, {"tool_name": "add", "result": None, "error": error})
            return
        total = data["arguments"]["a"] + data["arguments"]["b"]
        told = {"content": [{"type": "text", "text": str(total)}], "is_error": False}
        await _seen(socket, {"tool_name": "add", "result": told, "error": None}, reward=0.5)

    async def _guess(self, socket: WebSocket, number: Any, secret: int) -> bool:
        if number == HANGS_UP:
            return False
        if number == HANGS:
            await asyncio.sleep(60)
        if number == FAILS:
            await _error(socket, "EXECUTION_ERROR", "it broke")
        elif not isinstance(number, int):
            fault = {"loc": ["number"], "msg": "Input should be a valid integer"}
            await _error(socket, "VALIDATION_ERROR", "Invalid message", errors=[fault])
        else:
            said = "correct" if number == secret else "higher" if number < secret else "lower"
            reward = 1.0 if number == secret else -0.25
            await _seen(socket, {"said": said, "metadata": {}}, reward, number == secret)
        return True


async def _seen(
    socket: WebSocket, seen: dict[str, Any], reward: float | None = None, done: bool = False
) -> None:
    data = {"observation": seen, "reward": reward, "done": done}
    await socket.send_json({"type": "observation", "data": data})


async def _error(socket: WebSocket, code: str, message: str, **more: Any) -> None:
    await socket.send_json({"type": "error", "data": {"message": message, "code": code, **more}})
