"""HTTP server with the APIs of OpenAI and Anthropic over open engines: app.py has its routes, serve.py runs it."""

from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.serve import serve

__all__ = ["ServerConfig", "serve"]
