"""The agent of `python -m tests.faults --environment worker`: plays the game of
`deploy/jobs/guess.py` by OpenAI's client, unmodified."""

from __future__ import annotations

import json
from typing import Any

import openai

from deploy.jobs.guess import Game

MAX_TURNS = 8
PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}}}
GUESS: Any = {"type": "function", "function": {"name": "guess", "parameters": PARAMETERS}}
FULL = "context_length_exceeded"


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Returns 1 if the number was found."""
    game, messages = Game(), [*row["prompt"]]
    game.reset(row["secret"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_TURNS):
            try:
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[GUESS]
                )
            except openai.APIStatusError as error:
                if error.code != FULL:
                    raise
                break
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                number = json.loads(call.function.arguments)["number"]  # pyright: ignore
                said = game.guess(number)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if game.done or not message.tool_calls:
                break
    return game.get_reward()
