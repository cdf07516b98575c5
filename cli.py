"""Entry of the `engine` command in a checkout; its subcommands stand in `src/enginewright/cli/`."""

from enginewright.cli import main

if __name__ == "__main__":
    main()
