"""Result files as JSON that a diff can show: objects are spread over lines, and each row of a list has one line."""

import json
from typing import Any


def in_rows(value: Any, indent: int = 0) -> str:
    """A value as JSON: a line for each entry of an object, and for each object in a list, however long it is."""
    if isinstance(value, dict) and value:
        begin, end = "{", "}"
        entries = [f"{json.dumps(key)}: {in_rows(entry, indent + 1)}" for key, entry in value.items()]
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        begin, end = "[", "]"
        entries = [json.dumps(entry) for entry in value]
    else:
        return json.dumps(value)
    line = "\n" + " " * (indent + 1)
    return f"{begin}{line}{f',{line}'.join(entries)}\n{' ' * indent}{end}"
