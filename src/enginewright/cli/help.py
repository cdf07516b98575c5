"""Help that lists the options of a command in sections, each option with its default."""

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from enginewright.cli.hints import hint_for_option

Decorator = Callable[[Any], Any]
OTHER = "Other"  # the section of options that name none, such as --help


class SectionOption(click.Option):
    """An option that stands in a section of its command's help."""

    def __init__(self, *args: Any, section: str = OTHER, **attributes: Any) -> None:
        self.section = section
        super().__init__(*args, **attributes)

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """As click has it, but without brackets around a default in words."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra


class SectionCommand(click.Command):
    """A command whose help has a section for each group of options, in the order in which they are declared.

    An option of another program is answered with what to do instead.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = [*args]  # click takes words away as it goes
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [option for parameter in self.params for option in parameter.opts]
            hint = hint_for_option(error.option_name, typed, known)
            if not hint:
                raise
            raise click.UsageError(f"{error.message} {hint}", ctx) from None

    def get_short_help_str(self, limit: int = 0) -> str:
        """The whole first sentence of the help; click would cut it to fit one line."""
        return first_sentence(self.help or "")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", OTHER), []).append(record)
        for title in sorted(sections, key=lambda title: title == OTHER):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def first_sentence(text: str) -> str:
    """The first sentence of a text, on one line."""
    return re.split(r"(?<=\.)\s", text.strip(), maxsplit=1)[0].replace("\n", " ")


def section(title: str) -> Callable[..., Decorator]:
    """`click.option` for the options of one section.

    The help of each ends with its default. Where a default is no fixed value, `show_default` says in words what it is.
    """
    return functools.partial(click.option, cls=SectionOption, section=title, show_default=True)


def with_options(*options: Decorator) -> Decorator:
    """One decorator of several options that more than one command takes."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


JSON_OPTION = section("Output")(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; all other text goes to stderr."
)
