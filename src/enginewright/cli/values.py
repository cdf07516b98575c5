"""Types of the values that options and arguments take."""

import json
from pathlib import Path
from typing import Any

import click

from enginewright.checkpoint_ref import check_written_path
from enginewright.cli.hints import hint_for_quant, hint_for_target
from enginewright.errors import UsageError
from enginewright.runtime.count import parse_bytes, parse_count
from enginewright.targets import SMS, parse_targets


class CountType(click.ParamType[int]):
    """An integer of at least `minimum`; `32k` is 32768."""

    name = "count"

    def __init__(self, minimum: int = 1) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the typed value, or ends the command with a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_count(str(value), self.minimum)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class EnginePathType(click.Path):
    """The path of an engine file. Words that begin with ./, ../, / or ~ are always paths, and never hub ids."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the typed value, or ends the command with a usage error."""
        check_written_path(str(value))
        return super().convert(value, param, ctx)


class BytesType(click.ParamType[int]):
    """A size in bytes; `2g` and `2GiB` are 2 * 2**30, `2GB` is 2 * 10**9."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the typed value, or ends the command with a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class JsonObjectType(click.ParamType[dict[str, Any]]):
    """A JSON object, such as {"enable_thinking": false}."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Returns the typed value, or ends the command with a usage error."""
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"{value!r} is no JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is no JSON object", param, ctx)
        return found


class TargetType(click.ParamType[str]):
    """One target, or several joined by + or commas."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the typed value, or ends the command with a usage error."""
        if hint := hint_for_target(str(value), SMS):
            self.fail(f"{value!r} names no GPU architecture. {hint}", param, ctx)
        try:
            parse_targets([value])
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class QuantType(click.Choice[str]):
    """A quantization method. The error about another program's name suggests our method."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the typed value, or ends the command with a usage error."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = hint_for_quant(str(value), self.choices)
            self.fail(f"{error.message} {hint}".rstrip(), param, ctx)
