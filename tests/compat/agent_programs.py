"""Agents of other packages, each as its package's documentation has one: the user's question, a
call of the tool `guess`, its result, and a last answer. Run by a package's own interpreter as
`agent_programs.py NAME`, with the session at OPENAI_BASE_URL; prints what the package says that
happened, as JSON. Only the names of packages are imported, when they are asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, ClassVar

ASKED = "Find the number."
RESULT = "higher"

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def pydantic_ai() -> Any:
    """A typed result, which pydantic-ai has the model give by a call that it forces."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Found(BaseModel):
        number: int

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=URL, api_key=KEY))
    agent = Agent(model, output_type=Found)

    @agent.tool_plain
    def guess(number: int) -> str:
        return RESULT

    result = agent.run_sync(ASKED)
    said = [
        [part.tool_name, json.loads(part.args)]
        for message in result.all_messages()
        for part in message.parts
        if part.part_kind == "tool-call"
    ]
    return {"calls": said, "answer": result.output.number}


def smolagents() -> Any:
    """A `ToolCallingAgent`, whose model must call a tool in each answer."""
    from smolagents import OpenAIModel, Tool, ToolCallingAgent

    class Guess(Tool):
        name, description, output_type = "guess", "Guesses.", "string"
        inputs: ClassVar = {"number": {"type": "integer", "description": "the guess"}}

        def forward(self, number: int) -> str:
            return RESULT

    model = OpenAIModel("policy", api_base=URL, api_key=KEY)
    agent = ToolCallingAgent(tools=[Guess()], model=model, max_steps=3, verbosity_level=0)
    answer = agent.run(ASKED)
    said = [
        [call.name, call.arguments]
        for step in agent.memory.steps
        for call in getattr(step, "tool_calls", None) or ()
    ]
    return {"calls": said, "answer": answer}


def langchain() -> Any:
    """A call that is forced, and then an answer by a schema, beside the same tool."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def guess(number: int) -> str:
        """Guesses."""
        return RESULT

    class Found(BaseModel):
        """The number."""

        number: int

    model = ChatOpenAI(model="policy", base_url=URL, api_key=KEY)
    messages: list[Any] = [HumanMessage(ASKED)]
    first = model.bind_tools([guess], tool_choice="any", strict=True).invoke(messages)
    messages.append(first)
    for each in first.tool_calls:
        messages.append(ToolMessage(guess.invoke(each["args"]), tool_call_id=each["id"]))
    limited: Any = model.with_structured_output(
        Found, method="json_schema", tools=[guess], strict=True
    )
    said = [[each["name"], each["args"]] for each in first.tool_calls]
    return {"calls": said, "answer": limited.invoke(messages).number}


def openai_agents() -> Any:
    """An agent on `/v1/responses`, which is the package's default."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
    from pydantic import BaseModel

    set_tracing_disabled(True)

    class Found(BaseModel):
        number: int

    @function_tool
    def guess(number: int) -> str:
        """Guesses."""
        return RESULT

    agent = Agent(
        name="finder",
        model="policy",
        tools=[guess],
        output_type=Found,
        model_settings=ModelSettings(tool_choice="required"),
    )
    result = asyncio.run(Runner.run(agent, ASKED))
    said = [
        [item.raw_item.name, json.loads(item.raw_item.arguments)]
        for item in result.new_items
        if item.type == "tool_call_item"
    ]
    return {"calls": said, "answer": result.final_output.number}


def litellm() -> Any:
    """Asks until the session has no room, and says as which error litellm knows that."""
    import litellm

    messages: list[Any] = [{"role": "user", "content": ASKED}]
    try:
        for _ in range(9):
            answer = litellm.completion(
                model="openai/policy", messages=messages, api_base=URL, api_key=KEY, num_retries=0
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "Again."}]
    except Exception as error:
        return {"error": type(error).__name__, "detail": str(error)}
    return {"error": None}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
