"""Groups of commands: they suggest the nearest command, show errors, and end with exit codes."""

import sys
from typing import Any

import click

from enginewright.cli.help import SectionCommand
from enginewright.cli.hints import hint_for_command
from enginewright.cli.process import INTERRUPTED, open_standard_streams, sigterm_ends_the_command
from enginewright.errors import EngineError, UsageError
from enginewright.printable import printable_lines

# Packages that the base install does not need, by the extra that installs them.
EXTRAS = {
    "build": ("gguf", "huggingface_hub", "ml_dtypes", "onnx", "onnx_ir", "rich", "safetensors", "torch"),
    "bench": ("enginewright_bench",),
    "route": ("httpx2", "httpcore2", "h11"),
    "sign": ("OpenSSL", "cryptography", "model_signing", "sigstore"),
}


class Commands(click.Group):
    """A group that suggests the nearest command for an unknown one, and ends with the exit code of an EngineError."""

    command_class = SectionCommand
    program = "engine"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a subcommand, and adds a hint to the error about an unknown one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = hint_for_command(args, self.list_commands(ctx), self.program)
            raise click.UsageError(f"{error.message} {hint}".rstrip(), ctx) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command with usable standard streams, and so that SIGTERM removes temporary files."""
        open_standard_streams()
        with sigterm_ends_the_command():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand; its errors are printed on stderr and become exit codes."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed stdout raises its error here instead of at the end of the process
            return result
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except EngineError as error:
            click.echo(f"engine: {error}", err=True)
            ctx.exit(error.exit_code)
        except click.UsageError as error:  # its message quotes words of the command line and names of files
            shown = printable_lines(message := error.format_message())
            if shown == message:
                raise
            raise click.UsageError(shown, error.ctx) from None
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            extra = next((extra for extra, packages in EXTRAS.items() if missing in packages), None)
            if extra is None:
                raise
            click.echo(f"engine: this command needs {missing}, which is not installed", err=True)
            click.echo(f"Install it with: pip install 'enginewright[{extra}]'", err=True)
            ctx.exit(UsageError.exit_code)


class BenchCommands(Commands):
    """The group `engine bench`; it accepts `engine bench --profile ENGINE` for `engine bench profile ENGINE`."""

    program = "engine bench"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words of the command line."""
        return super().parse_args(ctx, ["profile", *args[1:]] if args[:1] == ["--profile"] else args)
