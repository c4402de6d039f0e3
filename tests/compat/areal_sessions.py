"""Sessions of the package `areal` by its own client: `areal_sessions.py URL KEY SESSIONS`. The
modules are the package's, unmodified, but its folders' `__init__` do not run, nor does its cache of
completions: they import what it trains with (torch, ray)."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

import aiohttp


def client_module() -> Any:
    for name in ("areal", "areal.infra", "areal.experimental.openai"):
        found = sys.modules[name] = ModuleType(name)
        found.__path__ = [str(distribution("areal").locate_file(name.replace(".", "/")))]
    proxy = sys.modules["areal.experimental.openai.proxy"] = ModuleType("proxy")
    proxy.__path__ = [f"{sys.modules['areal.experimental.openai'].__path__[0]}/proxy"]
    cache: Any = ModuleType("cache")
    cache.InteractionCache = object
    sys.modules["areal.experimental.openai.cache"] = cache
    return import_module("areal.experimental.openai.proxy.client_session")


async def main(url: str, key: str, num_sessions: int) -> None:
    """Plays a session after another, two of each task. The first answer of a session earns a
    quarter, and the last one half for the first session of a task."""
    client = client_module().OpenAIProxyClient
    async with aiohttp.ClientSession() as http:
        for number in range(num_sessions):
            async with client(http, url, f"task-{number // 2}", key) as session:
                headers = {"authorization": f"Bearer {session.session_api_key}"}
                asked = {"model": "policy", "messages": [{"role": "user", "content": "w3"}]}
                ids: list[str] = []
                for _ in range(2):
                    answer = await http.post(f"{url}/chat/completions", json=asked, headers=headers)
                    answer.raise_for_status()
                    ids.append((await answer.json())["id"])
                await session.set_reward(ids[0], 0.25)
                await session.set_last_reward(0.5 if number % 2 == 0 else -1.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
