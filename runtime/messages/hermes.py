"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from enginewright.runtime.messages.calls import JSON_STREAMED, CallFormat, WrittenCalls, json_calls

HERMES = CallFormat(
    "hermes",
    ("<tool_call>", "arguments"),
    json_calls,
    WrittenCalls('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    open="<tool_call>",
    close="</tool_call>",
    streamed=JSON_STREAMED,
)
