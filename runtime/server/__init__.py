"""OpenAI's API over an engine: app.py says what there is, serve.py runs it."""

from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.serve import serve

__all__ = ["ServerConfig", "serve"]
