"""A taskset of `verifiers` with a harness of its own: a number has to be found by calls of a tool.
As its author writes it: nothing here knows Hone."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["GuessHarness", "GuessTaskset"]

TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}


MAX_GUESSES = 8
"""A turn may have many calls."""


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(self.data.secret in trace.info["guesses"][:MAX_GUESSES])

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.info["guesses"]))


class GuessConfig(vf.TasksetConfig):
    num_tasks: int = 64
    seed: int = 0


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> list[GuessTask]:
        rng = random.Random(self.config.seed)
        return [
            GuessTask(
                GuessData(prompt="Find the number.", secret=rng.randrange(12, 16)), self.config.task
            )
            for _ in range(self.config.num_tasks)
        ]


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """Plays in this process, up to eight turns."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        guesses = trace.info["guesses"] = list[Any]()
        async with httpx.AsyncClient(timeout=120) as http:
            for _ in range(8):
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages, "tools": [TOOL]},
                    headers={"authorization": f"Bearer {secret}"},
                )
                if answer.status_code == 400 and "context_length" in answer.text:
                    break
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                messages += [message, *(self.said(call, data.secret, guesses) for call in calls)]
                if not calls or data.secret in guesses or len(guesses) >= MAX_GUESSES:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def said(self, call: Any, secret: int, guesses: list[Any]) -> dict[str, Any]:
        number = json.loads(call["function"]["arguments"]).get("number")
        guesses.append(number)
        told = "correct" if number == secret else "higher" if number < secret else "lower"
        return {"role": "tool", "tool_call_id": call["id"], "content": told}
