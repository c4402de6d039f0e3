"""An agent made with `openai-agents`, trained as it is: it looks for a number by at most
eight calls of a tool, of which it may make several in one turn.

pip install hone-rl openai-agents
hone run examples/openai_agent.toml        # on the machine of the stack
hone work examples/openai_agent.py         # anywhere that reaches the orchestrator
"""

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.agent import ToolsToFinalOutputResult
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)

FULL = "context_length_exceeded"
"""What the model's answer says once the conversation has no room for another one."""


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    left, found = 8, False

    @function_tool
    def guess(number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        nonlocal left, found
        if found or not left:
            return "the game is over"
        left -= 1
        found = number == row["secret"]
        if found:
            return "correct"
        return "higher" if number < row["secret"] else "lower"

    def is_over(*_: Any) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=found or not left, final_output="over")

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="Finder",
            model=OpenAIChatCompletionsModel("policy", client),
            model_settings=ModelSettings(),
            tools=[guess],
            tool_use_behavior=is_over,
        )
        try:
            await Runner.run(agent, "Find the number.", max_turns=8)
        except (MaxTurnsExceeded, BadRequestError) as error:
            if getattr(error, "code", FULL) != FULL:
                raise
    return float(found)
