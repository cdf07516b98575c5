"""`engine run`: opens engine files, serves them, and shuts down."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.device.memory_plan import places_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.app import App
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.engine_files import files_of, names_alone
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.hosting import (
    Shutdown,
    api_url,
    bind,
    host_app,
    host_check,
    listen_for_signals,
    print_ready,
    tls_of,
)
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.tls import Tls

# After a step, the engine's thread waits this long for the thread that holds Python's lock, which usually renders a
# chat. With Python's default of 5 ms, streams that ran at the same time got a fifth fewer tokens per second (median of
# six rounds, with a model that takes less than a millisecond per step; large models show no difference).
SWITCH_INTERVAL_S = 0.0005
CLOSE_S = 10.0  # seconds for the engine's step and the tokenizer to end; then the process ends anyway


Model = str | Path | Engine | Sequence[str | Path]  # one engine, or several files and folders of them


def serve(
    model: Model,
    config: ServerConfig,
    *,
    announce: Callable[[str], None] = print_ready,
    verify: bool = False,
    **limits: Any,
) -> None:
    """Serves engines until SIGTERM or SIGINT and a drain; a second signal ends the drain, too.

    Memory that a running step uses cannot be freed: if a step does not end, the process ends with exit code 1.

    Args:
        model: an engine file, or an open engine (which stays open). Several files or folders of them, or one with a
            config
            that limits its memory or idle time, are opened at their first request.
        config: the server's settings.
        announce: called with one line for people once connections are accepted.
        verify: whether to check the hashes of an engine's weights each time that it is opened.
        limits: fields of RuntimeConfig.

    Raises:
        UsageError: the files of the certificate are wrong.
        EngineError: the server cannot listen at the address, or the engine cannot be opened (errors.py).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        tls = tls_of(config)
        with bind(config.host, config.port) as listener:
            asyncio.run(_serve(model, config, listener, announce, limits, tls, verify=verify))
    finally:
        sys.setswitchinterval(before)


async def _serve(
    model: Model,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[str], None],
    limits: dict[str, Any],
    tls: Tls | None,
    *,
    verify: bool,
) -> None:
    engines = await open_engines(model, config, limits, verify=verify)
    try:
        shutdown = Shutdown()
        listen_for_signals(shutdown, tls)
        gc.collect()
        gc.freeze()  # these objects stay, so later collections, which delay a step, skip them

        await host(engines, listener, shutdown, lambda: announce(_ready(engines, listener, tls)), tls)
    finally:
        await _close(engines)


async def open_engines(model: Model, config: ServerConfig, limits: dict[str, Any], *, verify: bool = False) -> Engines:
    """Opens one engine now, or prepares those that are opened at their first request.

    Args:
        model: an engine file, an open engine, or several files and folders of them.
        config: the server's settings.
        limits: fields of RuntimeConfig.
        verify: whether to check the hashes of an engine's weights each time that it is opened.

    Raises:
        UsageError, EngineError: as `serve`.
    """
    if isinstance(model, Engine):
        if config.on_demand:
            raise UsageError(
                "an open engine cannot be closed by the server", "memory and idle_seconds are for engine files"
            )
        return Engines.of(Service(AsyncLLM(model, **limits), config))
    runtime = runtime_config(**limits)
    files = files_of([model] if isinstance(model, str | Path) else model)
    if len(files) > 1 and runtime.kv_events is not None:
        raise UsageError("kv_events is for one engine", f"{len(files)} cannot share an address")
    if len(files) > 1 and runtime.nnodes > 1:
        raise UsageError("nnodes is for one engine", f"{len(files)} cannot share the other machines")
    if len(files) > 1 and runtime.kv_listen is not None:
        fix = "Leave it out: each engine then listens on a free port, and its leases name it."
        raise UsageError("kv_listen is for one engine", f"{len(files)} cannot share an address", fix)
    if len(files) > 1 and runtime.kv_cache_listen is not None:
        raise UsageError("kv_cache_listen is for one engine", f"{len(files)} cannot share an address")
    if len(files) > 1 or config.on_demand:
        return Engines.of_files(files, config, runtime, verify=verify)
    engine = open_engine(files[0], runtime.device, verify=verify)
    try:
        names = names_alone(engine.manifest.name, files[0], config)
        llm = await AsyncLLM.open(engine, runtime)
        for path in config.adapter_files.values():  # what is wrong with them is an error now, and not of a request
            llm.open_adapter(path)
        return Engines.of(Service(llm, config, names))
    except BaseException:
        engine.close()
        raise


async def _close(engines: Engines) -> None:
    """Closes all engines, or ends the process if that takes too long."""
    closing = asyncio.create_task(engines.close())
    await asyncio.wait((closing,), timeout=CLOSE_S)
    if not closing.done():
        step_s = max((service.llm.step_s for service in engines.services), default=0.0)
        what = f"a step of the engine has lasted {step_s:.0f} s" if step_s else "a prompt is being tokenized"
        print(f"engine: the server ends by force: {what} and does not end", file=sys.stderr, flush=True)
        os._exit(EngineError.exit_code)
    await closing


async def host(
    engines: Engines,
    listener: socket.socket,
    shutdown: Shutdown,
    ready: Callable[[], None],
    tls: Tls | None = None,
) -> None:
    """Serves requests for engines on a bound socket, until the shutdown is requested.

    Args:
        engines: the engines.
        listener: the bound socket.
        shutdown: the request to end the server.
        ready: called once connections are accepted.
        tls: the certificate; None serves plain text.

    Raises:
        EngineError: another program uses the address, or the limit of open files is too low.
    """
    app = App(engines, host_check(listener, engines.config))
    try:
        await host_app(
            app,
            engines,
            listener,
            shutdown,
            ready,
            tls,
            engines.config,
            release=partial(_close, engines),  # requests wait for a step of the engine, or for the tokenizer
        )
    finally:
        await asyncio.to_thread(app.close)


def _ready(engines: Engines, listener: socket.socket, tls: Tls | None) -> str:
    """The line with the server's address, and the number of requests that fit at once."""
    address = api_url(listener, tls)
    if not engines.services:
        at_once = f"open on demand, in {format_bytes(engines.memory)} together"
        return f"serving {', '.join(engines.names)} at {address} ({at_once})"
    (service,) = engines.services
    memory_plan, plan = service.llm.memory_plan, service.llm.engine.plan
    length, chunk = memory_plan.max_model_len, memory_plan.limits.tokens
    places = zip(memory_plan.num_blocks, plan.caches, strict=True)
    full_length = min(count // places_of(group, length, chunk) for count, group in places)
    max_seqs = memory_plan.limits.sequences
    fit = f"{max_seqs} completions at a time, {min(full_length, max_seqs)} of them may have all {length} positions"
    return f"serving {service.models[0]} at {address} ({fit})"
