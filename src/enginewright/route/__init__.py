"""A proxy for a few replicas of a server, which sends a request to the one that has computed most of its prompt."""
