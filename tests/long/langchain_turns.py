"""Run by langchain-openai's own environment: an answer, a stream, a batch, a call of a tool, an answer of a class, and
the Responses API; a line of JSON for each.

Arguments: the server's address, the model's name, and the address of a server whose model calls tools.
"""

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    country: Literal["France", "Italy"]


@tool
def population(city: Literal["Paris", "Rome"]) -> int:
    """How many people live in a city."""
    return {"Paris": 2_100_000, "Rome": 2_750_000}[city]


def say(**found: Any) -> None:
    print(json.dumps(found))


def main(address: str, model: str, tools_address: str) -> None:
    options: dict[str, Any] = {"model": model, "base_url": f"{address}/v1", "api_key": "key", "temperature": 0}
    options |= {"max_retries": 0}
    llm = ChatOpenAI(max_tokens=12, **options)
    answer = llm.invoke(QUESTION)
    say(text=answer.content, usage=answer.usage_metadata is not None)
    chunks = list(llm.stream(QUESTION, stream_usage=True))
    say(text="".join(chunk.content for chunk in chunks), usage=any(chunk.usage_metadata for chunk in chunks))
    say(texts=[one.content for one in asyncio.run(llm.abatch([QUESTION] * 3))])
    calling = ChatOpenAI(max_tokens=300, **options | {"model": "tiny", "base_url": f"{tools_address}/v1"})
    with_tool = calling.bind_tools([population], tool_choice="required")
    history = [HumanMessage("How many people live in Paris?")]
    called = with_tool.invoke(history)
    (call,) = called.tool_calls
    result = ToolMessage(str(population.invoke(call["args"])), tool_call_id=call["id"])
    reply = calling.invoke([*history, called, result])
    say(call=call["name"], city=call["args"]["city"], replied=isinstance(reply, AIMessage))
    city = ChatOpenAI(max_tokens=40, **options).with_structured_output(City, method="json_schema").invoke(QUESTION)
    say(city=city.name, country=city.country)
    say(text=ChatOpenAI(max_tokens=12, use_responses_api=True, **options).invoke(QUESTION).text)


if __name__ == "__main__":
    main(*sys.argv[1:])
