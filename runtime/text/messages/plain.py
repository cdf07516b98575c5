"""Tools of models whose chat template shows none: described in the system message, and called by JSON objects.

A call is {"name": …, "parameters": {…}}, as in Llama 3.1. In later turns, calls are text of the assistant, and their
results are text of the user.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from enginewright.errors import UsageError, shorten
from enginewright.runtime.text.messages.llama3_json import LLAMA3_JSON

PLAIN = LLAMA3_JSON
_BEFORE_TOOLS = "You can call these functions. Each is an object of JSON, with the schema of its parameters:"
_AFTER_TOOLS = """To call one, answer with an object of JSON and nothing else:
{"name": "name of the function", "parameters": {"name of a parameter": "its value"}}"""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Adds a description of tools to the system message, which is created if there is none.

    Args:
        messages: messages with text as their content.
        tools: the tools, in OpenAI's format.

    Raises:
        UsageError: a schema is nested too deeply.
    """
    try:
        described = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    except RecursionError as error:
        raise UsageError("the schema of a tool's parameters is nested too deeply") from error
    text = "\n".join((_BEFORE_TOOLS, *described, "", _AFTER_TOOLS))
    has_system = bool(messages) and messages[0]["role"] == "system"
    if has_system and messages[0]["content"]:
        text = f"{messages[0]['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *messages[has_system:]]


def calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Converts calls and their results to text.

    Args:
        messages: messages with text as their content, and calls in OpenAI's format.

    Raises:
        UsageError: a call has another format.
    """
    shown: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}  # names of the called functions, by the ids of calls
    for role, group in groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            returned = ((names.get(str(one.get("tool_call_id")), "a call"), one["content"]) for one in group)
            results = "\n\n".join(f"Result of {name}:\n{content}" for name, content in returned)
            shown.append({"role": "user", "content": results})
            continue
        for message in group:
            calls = message.get("tool_calls") or ()
            names |= {str(call.get("id")): _function(call)["name"] for call in calls}
            texts = (message["content"], (PLAIN.written.between or "").join(map(_written, calls)))
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            shown.append({**others, "content": "\n".join(filter(None, texts))} if calls else message)
    return shown


def _written(call: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    function, written = _function(call), PLAIN.written
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{written.before_name}{function['name']}{written.before_arguments}{arguments}{written.after_arguments}"


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"a call in the messages is {shorten(call)}", "it must have a function with a name")
    return function
