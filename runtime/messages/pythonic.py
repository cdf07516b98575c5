"""Llama 4 and LFM2: a list of calls in Python, [f(a=1), g(b="x")]."""

import ast
from typing import Any

from enginewright.runtime.messages.calls import Call, CallFormat, Schemas, dump

_CONSTANTS = {"true": True, "false": False, "null": None}  # as JSON has them


def _read(text: str, schemas: Schemas) -> list[Call]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = [_call(node) for node in tree.elts] if isinstance(tree, ast.List) else [_call(tree)]
        return calls
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:  # a SyntaxError is a ValueError, too
        raise ValueError("no list of calls") from error


def _call(node: ast.AST) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call of named arguments")
    return Call(ast.unparse(node.func), dump({str(keyword.arg): _value(keyword.value) for keyword in node.keywords}))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {
                str(ast.literal_eval(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError("an argument that JSON does not have")
    return value


PYTHONIC = CallFormat("pythonic", ("[func_name1(",), _read, begins="[", quotes="\"'")
LFM2 = CallFormat(
    "lfm2",
    ("<|tool_list_start|>",),
    _read,
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
    quotes="\"'",
)
