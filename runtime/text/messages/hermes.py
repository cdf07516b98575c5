"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from enginewright.runtime.text.messages.calls import CallFormat, WrittenCalls
from enginewright.runtime.text.messages.json_calls import read_calls

HERMES = CallFormat(
    "hermes",
    ("<tool_call>", "arguments"),
    read_calls,
    WrittenCalls('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    open="<tool_call>",
    close="</tool_call>",
    is_streamed=True,
)
