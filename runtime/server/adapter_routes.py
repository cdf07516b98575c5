"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form.

Source: vllm/entrypoints/serve/lora/api_router.py.
"""

import asyncio
import hmac
import logging
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from enginewright.adapter_file import AdapterFile
from enginewright.errors import EngineError, shorten
from enginewright.runtime.server.config import tenant_of
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.wire import header

logger = logging.getLogger(__name__)

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterBody(msgspec.Struct):
    """Body of a request."""

    lora_name: str  # name of the adapter
    lora_path: str = ""  # adapter file in the server's folder of adapters


class AdapterRoutes:
    """Routes by which holders of an admin key change the adapters that requests may name.

    An adapter is checked before its name is visible. One that is replaced or removed stays for the requests that have
    begun with it.

    Args:
        engines: the engines of the server.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._keys = [tenant_of(key) for key in engines.config.admin_keys]

    @property
    def routes(self) -> list[Route]:
        """The routes; none if the server allows no changes."""
        if not self._engines.config.enable_lora_updates:
            return []
        return [Route(LOAD_PATH, self._load, methods=["POST"]), Route(UNLOAD_PATH, self._unload, methods=["POST"])]

    @property
    def paths(self) -> set[bytes]:
        """Paths of the routes, which check keys of their own."""
        return {route.path.encode() for route in self.routes}

    async def _load(self, request: Request) -> Response:
        body = await self._read(request)
        if body.lora_name in self._engines.engine_names or not body.lora_name.isprintable() or not body.lora_name:
            raise ApiError(400, f"lora_name {shorten(body.lora_name)} is the name of an engine, or no name")
        path = self._inside(body.lora_path)
        try:
            await asyncio.to_thread(self._check, path)
        except EngineError as error:
            raise ApiError(
                400, f"the adapter cannot be loaded: {error.what}: {error.why}", param="lora_path"
            ) from error
        self._engines.adapters.add(body.lora_name, path)
        logger.info("the adapter %s is served from %s", body.lora_name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        body = await self._read(request)
        if not self._engines.adapters.remove(body.lora_name):
            raise ApiError(404, f"there is no adapter {shorten(body.lora_name)} that was loaded", param="lora_name")
        logger.info("the adapter %s is served no more", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _read(self, request: Request) -> AdapterBody:
        """Checks the key of a request, and reads its body."""
        scope = request.scope
        values = header(scope, b"authorization") or [b"bearer " + key for key in header(scope, b"x-api-key")]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        given = tenant_of(key.strip())
        known = [hmac.compare_digest(given, one) for one in self._keys]  # each is compared, as those of API keys are
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(401, "this needs one of the server's admin keys", code="invalid_api_key")
        data = await self._engines.bodies.read(scope, request.receive)
        try:
            return msgspec.json.decode(data, type=AdapterBody)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the body cannot be read: {error}") from error

    def _inside(self, path: str) -> Path:
        """Returns a file of the server's folder of adapters; raises ApiError if a path leaves it."""
        folder = Path(str(self._engines.config.lora_dir)).resolve()
        try:
            file = (folder / path).resolve()
        except (OSError, ValueError):
            file = folder
        if not file.is_relative_to(folder) or not file.is_file():
            raise ApiError(400, f"lora_path {shorten(path)} is no file of the server's --lora-dir", param="lora_path")
        return file

    def _check(self, path: Path) -> None:
        """Checks that an adapter is that of an engine of this server, in another thread."""
        adapter = AdapterFile.open(path)
        try:
            own = [one for one in self._engines.all if one.info and one.info.content_hash == adapter.engine_hash]
        finally:
            adapter.close()
        if not own:
            raise EngineError(f"{path.name} is for another engine", "no engine of this server has its content")
        for engine in own:
            if engine.service is not None:
                engine.service.llm.open_adapter(path)
