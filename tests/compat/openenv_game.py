"""The guessing game as an environment of the package `openenv`, served by the package's own app on
the port that is given: `python openenv_game.py 8100 4` for four episodes at once. With "tools" as
the last word, its actions are calls of an MCP tool."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

MAX_GUESSES = 8
"""A turn may have many calls."""


class Guess(Action):
    """Guesses the number."""

    number: int


class Heard(Observation):
    said: str = ""


def answer(secret: int, number: int) -> str:
    if number < 0:
        raise RuntimeError("numbers below 0 break the game")
    return "correct" if number == secret else "higher" if number < secret else "lower"


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, secret: int, seed: Any = None, episode_id: Any = None) -> Heard:
        self._secret, self._left = secret, MAX_GUESSES
        return Heard(said=" It is from 0 to 31.")

    def step(self, action: Guess, timeout_s: Any = None, **kwargs: Any) -> Heard:
        said = answer(self._secret, action.number)
        self._left -= 1
        found = said == "correct" and self._left >= 0
        return Heard(said=said, done=found or self._left <= 0, reward=float(found))

    @property
    def state(self) -> State:
        return State()


class ToolGame(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("game")

        @server.tool
        def guess(number: int) -> str:
            """Guesses the number."""
            return answer(self._secret, number)

        super().__init__(server)

    def reset(self, secret: int, seed: Any = None, episode_id: Any = None) -> Observation:
        self._secret = secret
        return Observation()

    def _step_impl(self, action: Action, timeout_s: Any = None, **kwargs: Any) -> Observation:
        raise RuntimeError(f"{action} is no call of a tool")

    @property
    def state(self) -> State:
        return State()


def app(room: int = 40, *, of_tools: bool = False) -> FastAPI:
    kinds = (ToolGame, CallToolAction, CallToolObservation) if of_tools else (Game, Guess, Heard)
    return create_fastapi_app(*kinds, max_concurrent_envs=room)


if __name__ == "__main__":
    port, room, *tools = sys.argv[1:]
    uvicorn.run(app(int(room), of_tools=bool(tools)), port=int(port), log_level="warning")
