"""Run by litellm's own environment: two turns of a conversation, a stream, and errors; a line of JSON for each.

Arguments: the server's address, and the model's name.
"""

import json
import sys
from typing import Any

import litellm


def main(address: str, model: str) -> None:
    common: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{address}/v1", "max_tokens": 12}
    common |= {"temperature": 0, "num_retries": 0}
    history: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    for question in ("And of Italy?", None):
        message = litellm.completion(messages=history, api_key="key", **common).choices[0].message
        print(json.dumps({"text": message.content}))
        history.append(message.model_dump())  # with all the keys that litellm gives it
        if question is not None:
            history.append({"role": "user", "content": question})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=history[:1], api_key="key", **options, **common))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    print(json.dumps({"text": text, "usage": any(getattr(chunk, "usage", None) for chunk in chunks)}))
    wrong: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "word " * 40_000}], "api_key": "key"},
        {"messages": history[:1], "api_key": "another"},
    ]
    for given in wrong:
        try:
            litellm.completion(**given, **common)
        except litellm.exceptions.APIError as error:
            print(json.dumps({"error": type(error).__name__}))
        except Exception as error:  # litellm's classes have no common one of its own
            print(json.dumps({"error": type(error).__name__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
