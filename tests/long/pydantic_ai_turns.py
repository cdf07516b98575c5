"""Run by pydantic-ai's own environment: agents with a tool, and an output that is a call of another tool or has a
format, over Chat Completions and Responses; a line of JSON for each kind of run.

Arguments: the address of a server whose model, tiny, calls tools and writes noise.
"""

import asyncio
import json
import sys
from itertools import product
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolCallPart, ToolOutput, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

NUM_RUNS = 12  # each with another seed and question, so that some call the tool and some do not


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


async def run(model: Any, output: Any, seed: int, *, stream: bool) -> dict[str, Any]:
    agent = Agent(model, instructions="Name a city.", output_type=output, tools=[weather])
    settings: Any = {"temperature": 2.0, "max_tokens": 200, "parallel_tool_calls": False, "extra_body": {"seed": seed}}
    if stream:
        async with agent.run_stream(f"Which city, {seed}?", model_settings=settings) as done:
            city, messages = await done.get_output(), done.all_messages()
    else:
        whole = await agent.run(f"Which city, {seed}?", model_settings=settings)
        city, messages = whole.output, whole.all_messages()
    parts: list[Any] = [part for message in messages for part in message.parts]
    parts = [part for part in parts if getattr(part, "tool_name", None) == "weather"]
    calls = [part.args_as_dict()["city"] for part in parts if isinstance(part, ToolCallPart)]
    results = [part.content for part in parts if isinstance(part, ToolReturnPart)]
    return {"calls": calls, "results": results, "city": city.name}


async def main(address: str) -> None:
    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="key")
    for kind, output in product((OpenAIChatModel, OpenAIResponsesModel), (ToolOutput(City), NativeOutput(City))):
        model = kind("tiny", provider=provider)
        for stream in (False, True):
            runs = [await run(model, output, seed, stream=stream) for seed in range(NUM_RUNS)]
            print(json.dumps({"setting": type(output).__name__, "runs": runs}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
