"""Llama 4 and LFM2: a list of calls in Python, [f(a=1), g(b="x")]."""

import ast
from collections.abc import Mapping
from typing import Any

from enginewright.runtime.messages.calls import Call, CallFormat, ListedArguments, Schemas, WrittenCalls, dump
from enginewright.runtime.messages.lark import Lark, parts

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


def _rule(lark: Lark, schema: Any, root: Mapping[str, Any], after: str) -> str:
    """Of a value. Texts are JSON's without \\u, of which a pair of surrogates would be two characters in Python."""
    words = {"boolean": '("True" | "False")', "null": '"None"'}
    rules = []
    for one in parts(schema, root):
        word = words.get(one.get("type", "")) if "enum" not in one or one["type"] == "null" else None
        rules.append(word or lark.json(one, root, json_allowed_escapes='nrbtf\\"'))
    return f"({' | '.join(rules)}) {lark.text(after)}"


def _written(first: str, last: str) -> WrittenCalls:
    arguments = ListedArguments("", "=", "", _rule, between=", ", key="[A-Za-z_][A-Za-z0-9_]{0,63}")
    name = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
    return WrittenCalls("", "(", ")", between=", ", first=first, last=last, arguments=arguments, name=name)


PYTHONIC = CallFormat("pythonic", ("[func_name1(",), _read, _written("[", "]"), begins="[", quotes="\"'")
LFM2 = CallFormat(
    "lfm2",
    ("<|tool_list_start|>",),
    _read,
    _written("<|tool_call_start|>[", "]<|tool_call_end|>"),
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
    quotes="\"'",
)
