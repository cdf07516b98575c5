"""A real server of a tiny engine, in a thread of its own, and a plain client for it."""

import asyncio
import atexit
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.hosting import Shutdown, bind
from enginewright.runtime.server.serve import host
from enginewright.runtime.server.service import Service
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

LENGTH = 4096
NAN_TOKEN = 300
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": 64 << 20, "threads": 1}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


# Chat templates of tiny_engine, by its kind.
TEMPLATES = {
    "fails at one message": "{{ messages[1].content + 'x' }}",
    "calls tools": "{# <tool_call> arguments <think></think> #}{% for tool in tools or [] %}{{ tool.function.name }} "
    "{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.a }}"
    "{% endfor %}; {% endfor %}assistant: {{ '<think>\n' if enable_thinking | default(false) }}",
    "shows all": "{# tools #}{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set arguments = call.function.arguments %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ arguments if arguments is string else arguments | tojson }}}</tool_call>{% endfor %}; {% endfor %}assistant: ",
    "always thinks": "{# </think> #}{{ messages[0].content }}<think>\n",
    "calls tools at once": "{# <tool_call> arguments #}{{ (tools or []) | length }}{{ messages[0].content }}",
    "calls tools in turns": "{# <tool_call> arguments #}{{ (tools or []) | length }} "
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments }}{% endfor %}; {% endfor %}assistant: ",
    "thinks": "{{ messages | map(attribute='reasoning_content') | select | join }}{{ messages[0].content }}"
    "{% if add_generation_prompt %}{{ '' if enable_thinking | default(true) else 'no thinking' }}{% endif %}",
}


@dataclass
class OtherTemplate(MemoryCheckpoint):
    kind: str = ""

    @property
    def tokenizer(self) -> TokenizerFiles:
        return replace(super().tokenizer, chat_template=TEMPLATES[self.kind])


@cache
def tiny_engine(kind: str = "") -> Path:
    """A llama with random weights, which samples greedily unless a request says otherwise.

    Args:
        kind: "NaN": everything with NAN_TOKEN is NaN. Others are of TEMPLATES.
    """
    config = tiny_config("llama", tie_word_embeddings=False, max_position_embeddings=LENGTH)
    checkpoint = MemoryCheckpoint(config, MemoryCheckpoint.of(tiny_model(config), config).stored)
    if kind in TEMPLATES:
        checkpoint = OtherTemplate(config, checkpoint.stored, kind=kind)
    if kind == "NaN":
        table = checkpoint.stored["model.embed_tokens.weight"].clone()
        table[NAN_TOKEN] = float("nan")
        checkpoint = replace(checkpoint, stored={**checkpoint.stored, "model.embed_tokens.weight": table})
    folder = Path(mkdtemp(prefix="enginewright-serving-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build_engine(checkpoint, BuildConfig(gate=None), folder / "tiny.engine")
    return folder / "tiny.engine"


def exactly(text: str) -> dict[str, Any]:
    """The structured_outputs that make a completion exactly this text, its reasoning included."""
    return {"choice": [text], "before": 'start: ""'}


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. headers: by names in lower case. body: the received bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of the body, after checks of what every error must have."""
        error = self.json["error"]
        assert set(self.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        assert all(isinstance(error[name], str | None) for name in ("param", "code"))
        assert "Traceback" not in error["message"] and " at 0x" not in error["message"]
        return error  # type: ignore[no-any-return]

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last one is "[DONE]" if it ended well."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *lines, rest = self.body.decode().split("\n\n")
        assert rest == "" and all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def named_events(answer: Answer) -> list[Any]:
    """The events of a stream in which each names its type twice."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.body.decode().split("\n\n")
    values = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert rest == "" and [f"event: {value['type']}" for value in values] == [block.split("\n")[0] for block in blocks]
    return values


class Served(ABC):
    """A server in a thread of its own. `call` goes to that thread."""

    port: int  # TCP port
    _loop: asyncio.AbstractEventLoop
    shutdown: Shutdown

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="server")

    @abstractmethod
    async def _main(self) -> None:
        """Serves until the shutdown; sets `_ready` once connections are accepted."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.end()
            self.end()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def end(self) -> None:
        """Requests the shutdown, as a signal does."""
        self._loop.call_soon_threadsafe(self.shutdown.request)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def there() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(30)

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}) -> Answer:
        """Sends a request and reads the answer. body: bytes, or a value that is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> Answer:
        return self.ask("POST", path, body, headers)

    def complete(self, prompt: Any, **options: Any) -> Any:
        """Requests a completion, which must succeed."""
        answer = self.post(COMPLETIONS, {"prompt": prompt, "ignore_eos": True, **options})
        assert answer.status == 200, answer.body
        return answer.json if not options.get("stream") else answer.events

    def chat(self, messages: Any = HELLO, **options: Any) -> Any:
        """Requests a chat completion, which must succeed."""
        answer = self.post(CHAT, {"messages": messages, "max_tokens": 8, "ignore_eos": True, **options})
        assert answer.status == 200, answer.body
        return answer.json if not options.get("stream") else answer.events

    @contextmanager
    def connect(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            yield connection

    def send(self, connection: socket.socket, path: str, body: Any) -> None:
        """Sends a POST request without waiting for its answer."""
        data = json.dumps(body).encode()
        connection.sendall(
            head_of(f"POST {path}", "Content-Type: application/json", f"Content-Length: {len(data)}") + data
        )

    def begin(self, path: str, body: Mapping[str, Any]) -> Callable[[], Answer]:
        """Starts a stream and waits for its first event; the returned function reads the rest."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        response = connection.getresponse()  # the head comes with the first event
        named = {name.lower(): value for name, value in response.getheaders()}

        def rest() -> Answer:
            with closing(connection):
                return Answer(response.status, named, response.read())

        return rest

    def begin_with_timeout(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> Answer:
        """Starts a stream with the shortest timeout that lets its first event come, so that the timeout ends it."""
        for timeout_s in (0.25, 1, 4, 16):
            answer = self.post(path, {**body, "stream": True, "timeout": timeout_s}, headers)
            if answer.status == 200:
                return answer
            assert answer.status == 504, answer.body
        raise AssertionError("no token has come within 16 s")


class Running(Served):
    """engines: belongs to the server's thread; `call` goes there. So do llm and service, of an engine that stays open.

    Args:
        engine: a file, or several that are opened on demand.
    """

    def __init__(self, engine: Path | Sequence[Path], config: ServerConfig, limits: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        self._engine, self._limits = engine, {**LIMITS, **limits}
        self._is_holding = threading.Event()

    async def _main(self) -> None:
        self._loop, self.shutdown = asyncio.get_running_loop(), Shutdown()
        if isinstance(self._engine, Path):
            self.llm = AsyncLLM(self._engine, **self._limits)
            self.service = Service(self.llm, self.config)
            self.engines = Engines.of(self.service)
        else:
            self.engines = Engines.of_files(self._engine, self.config, runtime_config(**self._limits))
        try:
            with bind(self.config.host, 0) as listener:
                self.port = listener.getsockname()[1]
                await host(self.engines, listener, self.shutdown, self._ready.set)
        finally:
            await self.engines.close()

    @contextmanager
    def held_steps(self, once: Callable[[AsyncLLM], bool] = lambda _: True) -> Iterator[threading.Event]:
        """Holds the steps of open engines until the event is set.

        Args:
            once: tells if an engine's steps are to be held; called before each of them.
        """
        llms = [service.llm for service in self.engines.services]
        executors = [llm._core.executor for llm in llms]
        runs, free = [executor.run for executor in executors], threading.Event()

        def held(llm: AsyncLLM, run: Callable[[Any], Any], plan: Any) -> Any:
            if once(llm):
                self._is_holding.set()
                assert free.wait(60)
            return run(plan)

        self._is_holding.clear()
        holding = [partial(held, llm, run) for llm, run in zip(llms, runs, strict=True)]
        for executor, one in zip(executors, holding, strict=True):
            executor.run = one  # type: ignore[method-assign]
        try:
            yield free
        finally:
            free.set()
            for executor, one, run in zip(executors, holding, runs, strict=True):
                if executor.run is one:  # the test has not broken it meanwhile
                    executor.run = run  # type: ignore[method-assign]

    def until_held(self) -> None:
        """Waits for a step that `held_steps` holds; a client that left earlier might cause no step."""
        assert self._is_holding.wait(60)

    def is_idle(self) -> bool:
        """True if nothing runs, nothing waits, and every block is free."""
        counts = [len(one.users) + len(one.waiting) for one in self.engines.all]
        for service in self.engines.services:
            stats, queue = service.llm.stats(), service.admission
            counts += [stats.num_running, stats.num_waiting, len(service.live), int(stats.kv_usage > 0)]
            counts += [queue.num_answers, queue.num_tokens, queue.logprob_bytes]
        return not any(counts)


@contextmanager
def running(
    *, kind: str = "", engine: Path | Sequence[Path] | None = None, limits: Mapping[str, Any] = {}, **config: Any
) -> Iterator[Running]:
    """Runs a server; all that it held must be free again at the end of the context.

    Args:
        kind: of the tiny engine, if no engine is given.
        config: fields of ServerConfig.
    """
    with Running(engine or tiny_engine(kind), ServerConfig(**config), limits) as server:
        yield server
        if server._thread.is_alive() and all(service.llm.is_alive for service in server.engines.services):
            wait_until(server.is_idle)


def head_of(request: str, *headers: str) -> bytes:
    """Writes the head of a request: its method and path, Host, and further headers."""
    return "\r\n".join([f"{request} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


POLL_S = 0.005


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Checks a condition repeatedly until it holds.

    Checks are counted instead of seconds: a process that was stopped, or that gets little time on a busy machine,
    checks as often as any other.
    """
    for _ in range(round(seconds / POLL_S)):
        if holds():
            return
        time.sleep(POLL_S)
    raise AssertionError("it does not come true")


def read_all(connection: socket.socket) -> bytes:
    """Reads until the other side closes the connection."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass  # it closed while we were still writing
    return data


PROGRAM = """
import json, sys
from enginewright.errors import EngineError
from enginewright.runtime.server import ServerConfig, serve
try:
    serve(sys.argv[1], ServerConfig(**json.loads(sys.argv[2])), threads=1, max_num_seqs=2, **json.loads(sys.argv[3]))
except EngineError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@contextmanager
def process(before: str = "", limits: Mapping[str, Any] = {}, **config: Any) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own.

    Args:
        before: code that it runs first.
        limits: of the engine, further ones.
        config: fields of ServerConfig.
    """
    command = [sys.executable, "-c", before + PROGRAM, str(tiny_engine()), json.dumps({"port": 0, **config})]
    command.append(json.dumps(limits))
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as opened:
        try:
            yield opened
        finally:
            opened.kill()


def port_of(opened: subprocess.Popen[str]) -> int:
    """Waits until a server that has just been started accepts connections; gives its port."""
    assert opened.stderr is not None
    line = opened.stderr.readline()
    found = re.fullmatch(
        r"serving tiny at http://127\.0\.0\.1:(\d+)/v1 \(2 completions at a time, .*4096 positions\)\n", line
    )
    assert found, line
    return int(found[1])
