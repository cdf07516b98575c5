"""What a model's own message is made of: reasoning, text for the user, and calls of tools."""
