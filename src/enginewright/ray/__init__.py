"""Replicas of the server in Ray Serve, with a request router that knows which replica has computed a prompt.

`settings`, `known`, `scaling` and `metrics` import nothing of Ray.
"""
