"""Llama 3.1 and 3.2: a message is {"name": …, "parameters": {…}}, or several of these with semicolons between."""

from functools import partial

from enginewright.runtime.text.messages.calls import CallFormat, WrittenCalls
from enginewright.runtime.text.messages.json_calls import read_calls

LLAMA3_JSON = CallFormat(
    "llama3_json",
    ("<|start_header_id|>", "dictionary of argument name"),
    partial(read_calls, only_known=True),  # JSON without marks may be an answer
    WrittenCalls('{"name": "', '", "parameters": ', "}", between="; ", json_keys=("name", "parameters")),
    begins="{",
    is_streamed=True,
)
