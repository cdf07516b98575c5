"""Parts of a model's message: reasoning, text for the user, and tool calls, with a file for each format."""
