"""Printing of reports, as lines for people or as JSON."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import click

from enginewright.printable import printable_lines, printable_values


def say(text: str, *, err: bool = False) -> None:
    """Prints lines for people. Unprintable characters, which names of files may contain, are escaped.

    Args:
        err: True prints on stderr.
    """
    click.echo(printable_lines(text), err=err)


def show(report: Mapping[str, Any], describe: Callable[[dict[str, Any]], str] | None) -> None:
    """Prints a report on stdout.

    Args:
        report: Values that JSON can represent.
        describe: Writes the report as lines for people. None: the report is printed as one JSON object.
    """
    click.echo(json.dumps(report) if describe is None else describe(printable_values(report)))


class Report(Protocol):
    """A report that can be printed as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the JSON object."""
        ...


ReportType = TypeVar("ReportType", bound=Report)


def show_report(report: ReportType, describe: Callable[[ReportType], str] | None, *, err: bool = False) -> None:
    """Prints the report of a build or a benchmark.

    Args:
        describe: Writes the report as lines for people. None: the report is printed as one JSON object on stdout.
        err: True prints the lines on stderr.
    """
    if describe is None:
        click.echo(json.dumps(report.to_dict()))
    else:
        say(describe(report), err=err)
