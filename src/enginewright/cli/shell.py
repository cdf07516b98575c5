"""Commands about the command line itself: `engine completion` and `engine help`."""

import click

from enginewright.cli.help import SectionCommand


@click.command(cls=SectionCommand)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete commands and options.

    \b
    bash: eval "$(engine completion bash)" in ~/.bashrc
    zsh:  eval "$(engine completion zsh)" in ~/.zshrc
    fish: engine completion fish > ~/.config/fish/completions/engine.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "engine", "_ENGINE_COMPLETE").source())


@click.command("help", cls=SectionCommand)
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def show_help(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, as `engine COMMAND --help` does."""
    assert context.parent is not None
    command, shown = context.parent.command, context.parent
    for word in words:
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{shown.command_path} has no commands of its own.", context)
        name, found, _ = command.resolve_command(shown, [word])
        assert found is not None
        command, shown = found, click.Context(found, shown, name)
    click.echo(command.get_help(shown))
