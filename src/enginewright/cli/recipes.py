"""Build recipes: TOML files whose keys are options of `engine build`. The folder configs/ has the shipped ones."""

import difflib
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from enginewright.cli.help import section
from enginewright.errors import UsageError
from enginewright.regular_file import SMALL_FILE_BYTES, read_regular

FOLDER = Path(__file__).parent.with_name("configs")
SHIPPED = {name: FOLDER / f"{name}.toml" for name in sorted(path.stem for path in FOLDER.glob("*.toml"))}
NOT_IN_RECIPES = (
    "recipe",
    "output",
    "report",
    "provenance",
    "builder_id",
    "dump_graphs",
    "dry_run",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "json",
    "list_models",
)  # options that belong to one run of the command


def recipe_option(command: Any) -> Any:
    """Adds the option `--recipe` to a command. The values of the recipe become the defaults of its other options."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except UsageError as error:
            raise _with_origin(error) from error

    return section("Model")(
        "--recipe",
        is_eager=True,
        expose_value=False,
        callback=_apply_recipe,
        show_default="none",
        help="Take options from a recipe: a TOML file, or one of these. Options on the command line override those of "
        f"the recipe.\n\n{_listed()}",
    )(run)


def from_recipe(name: str) -> bool:
    """Returns True if an option of the running command has the value of a recipe and was not typed."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.DEFAULT_MAP


def purpose_of(path: Path) -> str:
    """Returns the purpose of a shipped recipe: the comment in its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def _listed() -> str:
    return "\n\n".join(f"{name}: {purpose_of(path)}" for name, path in SHIPPED.items())


def _with_origin(error: UsageError) -> UsageError:
    """Returns the error; if it names options of the recipe, it says that they come from there."""
    context = click.get_current_context()
    given = [max(option.opts, key=len) for option in context.command.params if from_recipe(str(option.name))]
    named = " and ".join(word for word in error.what.split() if word in given)
    origin = f"{named} {'come' if ' and ' in named else 'comes'} from the recipe: change that in a copy of it."
    return UsageError(error.what, error.why, "\n".join(filter(None, (error.fix, origin)))) if named else error


def _apply_recipe(context: click.Context, _: click.Parameter, ref: str | None) -> None:
    """Makes the values of a recipe the defaults of the command's options."""
    if ref is None:
        return
    path = SHIPPED.get(ref, Path(ref))
    if not path.is_file():
        near = difflib.get_close_matches(ref, SHIPPED, n=1)
        fix = f"Did you mean {near[0]}?" if near else "Name one of them, or a TOML file."
        raise UsageError(f"there is no recipe {ref}", f"no such file, and none of {', '.join(SHIPPED)}", fix)
    options = {_key(option): option for option in context.command.params if isinstance(option, click.Option)}
    known = {key: option for key, option in options.items() if key not in NOT_IN_RECIPES}
    settings = {key.replace("-", "_"): value for key, value in _read(path).items()}
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            fix = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."
            raise UsageError(f"the recipe {path} has the unknown key {key}", fix=fix)
    context.default_map = {
        str(known[key].name): _value(context, path, key, known[key], settings[key]) for key in settings
    }


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(read_regular(path, SMALL_FILE_BYTES).decode())
    except OSError as error:
        raise UsageError(f"the recipe {path} cannot be read", error.strerror or str(error)) from error
    except ValueError as error:  # the file is not TOML, or not UTF-8
        raise UsageError(f"the recipe {path} is not TOML", str(error)) from error


def _key(option: click.Option) -> str:
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def _value(context: click.Context, path: Path, key: str, option: click.Option, given: Any) -> Any:
    """Returns the value that the option would have on the command line."""
    several = given if isinstance(given, list) else [given]
    try:
        if len(several) != 1 and not option.multiple:
            raise click.BadParameter("it takes one value")
        if not all(isinstance(one, str | int | float) for one in several):
            raise click.BadParameter("it takes text, a number, or true or false")
        words = [one if isinstance(one, bool) else str(one) for one in several]
        return option.type_cast_value(context, words if option.multiple else words[0])
    except click.BadParameter as error:
        raise UsageError(f"the recipe {path} has the value {given!r} for {key}", error.message) from error
