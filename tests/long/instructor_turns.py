"""Run by instructor's own environment: answers of a class, which are calls of a tool, whole and in parts; a line of
JSON for each model.

Arguments: a server's address, the model's name, and the address of a server whose model, tiny, calls tools.
"""

import json
import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: Literal["Paris", "Rome"]


def main(address: str, model: str, tools_address: str) -> None:
    for at, name in ((address, model), (tools_address, "tiny")):
        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{at}/v1", api_key="key", max_retries=0), mode=instructor.Mode.TOOLS
        )
        asked: Any = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        asked |= {"max_tokens": 300, "response_model": City, "max_retries": 0}
        city, parsed = client.chat.completions.create(**asked), list(client.chat.completions.create_partial(**asked))
        print(json.dumps({"city": city.name, "streamed": parsed[-1].name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
