"""Help that lists the options of a command in sections, each option with its default."""

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from enginewright.cli.hints import hint_for_option

Decorator = Callable[[Any], Any]
OTHER = "Other"  # section of the options that declare none, such as --help


class SectionOption(click.Option):
    """An option that is listed in a section of its command's help.

    Args:
        section: Title of the section.
        args, attributes: Those of `click.Option`.
    """

    def __init__(self, *args: Any, section: str = OTHER, **attributes: Any) -> None:
        self.section = section
        super().__init__(*args, **attributes)

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        """Returns what click appends to the help, without brackets around a default that is given in words."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra


class SectionCommand(click.Command):
    """A command whose help lists its options in sections, in the order in which they are declared.

    An option of another program, such as vLLM's or llama.cpp's, is refused with a hint at the option of ours.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words of the command line, and adds a hint to the error about an unknown option."""
        typed = [*args]  # click removes words from `args` while it parses
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [option for parameter in self.params for option in parameter.opts]
            hint = hint_for_option(error.option_name, typed, known)
            if not hint:
                raise
            raise click.UsageError(f"{error.message} {hint}", ctx) from None

    def get_short_help_str(self, limit: int = 0) -> str:
        """Returns the complete first sentence of the help, which click would cut to fit one line."""
        return first_sentence(self.help or "")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections of options; `Other` is the last one."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", OTHER), []).append(record)
        for title in sorted(sections, key=lambda title: title == OTHER):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def first_sentence(text: str) -> str:
    """Returns the first sentence of a text, on one line."""
    return re.split(r"(?<=\.)\s", text.strip(), maxsplit=1)[0].replace("\n", " ")


def section(title: str) -> Callable[..., Decorator]:
    """Makes `click.option` for the options of one section.

    The help of each option ends with its default. If the default is not a fixed value, `show_default` describes it in
    words.
    """
    return functools.partial(click.option, cls=SectionOption, section=title, show_default=True)


def with_options(*options: Decorator) -> Decorator:
    """Joins several options into one decorator, for options that several commands have."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


JSON_OPTION = section("Output")(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; all other text goes to stderr."
)
