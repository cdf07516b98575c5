"""Run by openai-agents' own environment: agents with an output type and a tool, over Chat Completions and Responses; a
line of JSON for each kind of run.

Arguments: the address of a server whose model, tiny, calls tools and writes noise.
"""

import asyncio
import json
import sys
from itertools import product
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

NUM_RUNS = 12  # each with another seed and question, so that some call the tool at once and some do not


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


async def run(model: Any, choice: str | None, seed: int, *, stream: bool) -> dict[str, Any]:
    settings = ModelSettings(
        temperature=2.0, max_tokens=200, tool_choice=choice, parallel_tool_calls=False, extra_body={"seed": seed}
    )
    agent = Agent("Guide", "Name a city.", model=model, tools=[weather], output_type=City, model_settings=settings)
    if stream:
        done: Any = Runner.run_streamed(agent, f"Which city, {seed}?", max_turns=30)
        async for _ in done.stream_events():
            pass
    else:
        done = await Runner.run(agent, f"Which city, {seed}?", max_turns=30)
    calls = [json.loads(item.raw_item.arguments)["city"] for item in done.new_items if isinstance(item, ToolCallItem)]
    results = [item.output for item in done.new_items if isinstance(item, ToolCallOutputItem)]
    return {"calls": calls, "results": results, "city": done.final_output_as(City, raise_if_incorrect_type=True).name}


async def main(address: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0) as client:
        for kind, choice in product((OpenAIChatCompletionsModel, OpenAIResponsesModel), (None, "required")):
            model = kind(model="tiny", openai_client=client)
            for stream in (False, True):
                runs = [await run(model, choice, seed, stream=stream) for seed in range(NUM_RUNS)]
                print(json.dumps({"setting": choice or "auto", "runs": runs}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
