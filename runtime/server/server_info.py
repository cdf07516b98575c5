"""GET /server_info, /v1/loads and /get_load: facts and load of a server, in the forms that routers read.

vllm-router asks for /server_info and /get_load, SGLang's smg for /server_info and /v1/loads (docs/routers.md).
"""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from enginewright import __version__
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.form import encode


class InfoRoutes:
    """Routes that show facts and the load of a server.

    Args:
        engines: the engines of the server.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [
            *(Route(path, self._info) for path in ("/server_info", "/get_server_info")),
            Route("/v1/loads", self._loads),
            Route("/get_load", self._count),
        ]

    async def _info(self, request: Request) -> Response:
        """Facts of the engine that the query names, first under SGLang's names, then under vLLM's."""
        engine = self._engines.find(request.query_params.get("model")).engine
        info, service = engine.info, engine.service
        blocks = None if service is None else service.metrics.cache
        max_model_len = None if info is None else info.max_model_len
        max_sequences = None if service is None else service.llm.memory_plan.limits.sequences
        root, tokens = engine.names[0], None if blocks is None else blocks.tokens
        content = {
            "model_path": root,
            "served_model_name": root,
            "version": __version__,
            "context_length": max_model_len,
            "max_running_requests": max_sequences,
            "max_total_tokens": tokens,
            "tp_size": 1,
            "dp_size": 1,
            "vllm_config": {
                "model_config": {"model": root, "served_model_name": engine.names, "max_model_len": max_model_len},
                "cache_config": {
                    "block_size": None if blocks is None else blocks.block_size,
                    "num_gpu_blocks": None if blocks is None else blocks.count,
                },
                "scheduler_config": {"max_num_seqs": max_sequences},
            },
        }
        return Response(encode(content), media_type="application/json")

    async def _loads(self, request: Request) -> Response:
        """Load of all open engines, as one rank of SGLang's."""
        load = self._load()
        content = {"timestamp": datetime.now(UTC).isoformat(), "version": __version__, "dp_rank_count": 1}
        return Response(encode({**content, "loads": [{"dp_rank": 0, **load}]}), media_type="application/json")

    async def _count(self, request: Request) -> Response:
        return Response(encode({"load": self._load()["num_total_reqs"]}), media_type="application/json")

    def _load(self) -> dict[str, Any]:
        """Present load of the open engines together. A completion counts as a request."""
        services = self._engines.services
        all_stats = [service.llm.stats() for service in services]
        capacities = [0 if service.metrics.cache is None else service.metrics.cache.tokens for service in services]
        used = sum(round(stats.kv_usage * tokens) for stats, tokens in zip(all_stats, capacities, strict=True))
        running, waiting = sum(one.num_running for one in all_stats), sum(one.num_waiting for one in all_stats)
        prompt_tokens = sum(one.prompt_tokens for one in all_stats)
        return {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            # Which of these tokens are cached is known once they are scheduled.
            "num_waiting_uncached_tokens": sum(one.num_waiting_tokens for one in all_stats),
            "num_used_tokens": used,
            "max_total_num_tokens": sum(capacities),
            "token_usage": round(used / max(sum(capacities), 1), 4),
            "cache_hit_rate": round(sum(one.cached_prompt_tokens for one in all_stats) / max(prompt_tokens, 1), 4),
            "max_running_requests": sum(service.llm.memory_plan.limits.sequences for service in services),
        }
