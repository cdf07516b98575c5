"""Llama 3.1 and 3.2: the message is {"name": …, "parameters": {…}}, or several with semicolons between."""

import json

from enginewright.runtime.messages.calls import JSON_STREAMED, Call, CallFormat, Schemas, WrittenCalls, json_call


def _read(text: str, schemas: Schemas) -> list[Call]:
    calls, decoder, start = list[Call](), json.JSONDecoder(), 0
    while start < len(text):
        try:
            value, end = decoder.raw_decode(text, start)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        calls.append(json_call(value))
        start = len(text) - len(text[end:].lstrip("; \n"))
    return calls


LLAMA3_JSON = CallFormat(
    "llama3_json",
    ("<|start_header_id|>", "dictionary of argument name"),
    _read,
    WrittenCalls('{"name": "', '", "parameters": ', "}", between="; "),
    begins="{",
    streamed=JSON_STREAMED,
)
