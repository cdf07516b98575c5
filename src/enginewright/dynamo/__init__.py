"""A worker of NVIDIA Dynamo: its frontends route requests to it, and it answers them with an engine.

`form` and `model_files` know Dynamo's data and import nothing of it; `options` and `worker` need its packages.
"""
