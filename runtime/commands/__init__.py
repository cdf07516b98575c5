"""Work of the subcommands of `engine` other than building and serving, such as verify, diff, quality and batch."""
