"""`engine bench serve`: load on a server, by a rate of arrivals, a limit on requests at once, or both."""

import asyncio
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from enginewright.errors import EngineError, UsageError
from enginewright_bench.cpu_time import cpu_seconds
from enginewright_bench.figures import PERCENTILE_METHOD, Goodput, RequestRecord, ServeFigures, serve_figures
from enginewright_bench.machine_facts import machine_facts
from enginewright_bench.workload import (
    ARRIVALS,
    WARM_UP,
    WORDS,
    WorkloadConfig,
    WorkloadPrompt,
    WorkloadRequest,
    rng,
    synthetic,
    token_ids,
    workload,
)

if TYPE_CHECKING:
    from enginewright_bench.client import Client

PROGRESS_S = 5.0  # seconds between two lines of progress
OTHER_FILES = 64  # files other than connections that the process has open


@dataclass(frozen=True)
class Chat:
    """The endpoint /v1/chat/completions; a text is a message of the user."""

    path = "/v1/chat/completions"
    name = "chat"

    @property
    def alphabet(self) -> Sequence[str]:
        """Words of synthetic prompts."""
        return WORDS

    def convert(self, prompt: WorkloadPrompt) -> WorkloadPrompt:
        """Converts a prompt to messages. Raises UsageError if it is token ids."""
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt[0], int):
            raise UsageError("has token ids, which a chat does not accept; use --endpoint completions")
        return prompt

    def fields(self, prompt: WorkloadPrompt) -> dict[str, Any]:
        """Makes the body's fields of a prompt."""
        return {"messages": self.convert(prompt)}


@dataclass(frozen=True)
class Completions:
    """The endpoint /v1/completions."""

    vocab_size: int = 10_000  # limit of synthetic token ids
    path = "/v1/completions"
    name = "completions"

    @property
    def alphabet(self) -> Sequence[int]:
        """Token ids of synthetic prompts."""
        return token_ids(self.vocab_size)

    def convert(self, prompt: WorkloadPrompt) -> WorkloadPrompt:
        """Checks that a prompt is a text or token ids. Raises UsageError if it is messages."""
        if isinstance(prompt[0], dict):
            raise UsageError("has messages; use --endpoint chat")
        return prompt

    def fields(self, prompt: WorkloadPrompt) -> dict[str, Any]:
        """Makes the body's fields of a prompt."""
        return {"prompt": prompt}


@dataclass(frozen=True)
class ServeConfig:
    """Options of the benchmark.

    Raises:
        UsageError: a number makes no sense.
    """

    base_url: str  # address of the server
    workload: WorkloadConfig  # requests
    endpoint: Chat | Completions = Completions()  # endpoint of the requests
    model: str | None = None  # name of the model; None is the server's first
    api_key: str | None = None  # key of the server
    request_rate: float = float("inf")  # requests per second, at random times (Poisson); infinite is all at once
    max_concurrency: int | None = None  # limit of requests at once
    warm_up: int = 1  # requests before the run that are not counted
    goodput: Goodput | None = None  # limits of good requests
    server_pid: int | None = None  # process of this machine whose CPU time is measured
    timeout_s: float = 600.0  # limit of one request, in seconds

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate is {self.request_rate:g}", "it must be above 0", "Or inf: all at once.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"--max-concurrency is {self.max_concurrency}", "it must be at least 1")
        if self.warm_up < 0:
            raise UsageError(f"--warm-up is {self.warm_up}", "it must not be negative")
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"--timeout is {self.timeout_s:g}", "it must be a number of seconds above 0")

    def to_dict(self) -> dict[str, Any]:
        """Converts the options for a JSON report, without the key."""
        return {
            "base_url": self.base_url,
            "endpoint": self.endpoint.name,
            "model": self.model,
            **self.workload.to_dict(),
            "request_rate": self.request_rate if self.request_rate < float("inf") else None,
            "max_concurrency": self.max_concurrency,
            "warm_up": self.warm_up,
            "goodput_ms": None if self.goodput is None else asdict(self.goodput),
            "timeout_s": self.timeout_s,
        }


@dataclass(frozen=True)
class ServeReport:
    """The result of the benchmark."""

    config: ServeConfig  # options
    model: str  # name of the model that was used
    machine: Mapping[str, Any]  # facts about the machine of the client
    answers: Sequence[RequestRecord]  # records of all requests
    figures: ServeFigures  # figures of the run
    server_cpu_s: float | None  # CPU time of the server, in seconds; None is not measured
    client_cpu_s: float  # CPU time of the client, in seconds

    @property
    def tokens_per_cpu_s(self) -> float | None:
        """Generated tokens per second of the server's CPU time."""
        return self.figures.generated_tokens / self.server_cpu_s if self.server_cpu_s else None

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to JSON's types."""
        return {
            "benchmark": "serve",
            "config": self.config.to_dict() | {"model": self.model, "num_prompts": len(self.answers)},
            "machine": dict(self.machine),
            "percentiles": PERCENTILE_METHOD,
            **asdict(self.figures),
            "server_cpu_s": self.server_cpu_s,
            "client_cpu_s": self.client_cpu_s,
            "generated_tokens_per_server_cpu_s": self.tokens_per_cpu_s,
        }

    def check(self) -> None:
        """Raises EngineError if no request was completed."""
        if not self.figures.done:
            kind, error = next(iter(self.figures.errors.items()))
            raise EngineError("no request was completed", f"{kind}: {error.example}")


def run_serve(config: ServeConfig) -> ServeReport:
    """Runs the load; a line on stderr now and then shows the progress.

    Raises:
        UsageError: the dataset is unusable, or the options do not fit this machine.
        EngineError: the server cannot be reached, or refuses the first request.
    """
    items = workload(config.workload, config.endpoint.alphabet, config.endpoint.convert)
    _check_open_files(min(len(items), config.max_concurrency or len(items)))
    if config.server_pid is not None:
        cpu_seconds(config.server_pid)
    return asyncio.run(_run(config, items))


async def _run(config: ServeConfig, items: Sequence[WorkloadRequest]) -> ServeReport:
    from enginewright_bench.client import Client

    async with Client(config.base_url, api_key=config.api_key, timeout_s=config.timeout_s) as client:
        model = config.model or await _first_model(client)
        await _warm_up(client, config, model)
        bodies = [_body(config, model, item) for item in items]
        answers = [RequestRecord(item.max_tokens) for item in items]
        facts = machine_facts("aiohttp")
        server, own = _server_cpu(config.server_pid), time.process_time()
        progress = asyncio.create_task(_print_progress(answers))
        try:
            await _load(client, config, bodies, answers)
        finally:
            progress.cancel()
        own = time.process_time() - own
        now = _server_cpu(config.server_pid)
    spent = None if server is None or now is None else now - server
    return ServeReport(config, model, facts, answers, serve_figures(answers, config.goodput), spent, own)


async def _load(
    client: "Client", config: ServeConfig, bodies: Sequence[bytes], answers: Sequence[RequestRecord]
) -> None:
    """Sends every request at its time, and waits for the completions."""
    slots = asyncio.Semaphore(config.max_concurrency or len(bodies))

    async def send(body: bytes, answer: RequestRecord) -> None:
        try:
            await client.send(config.endpoint.path, body, answer)
        finally:
            slots.release()

    client.start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for due, body, answer in zip(arrivals(config, len(bodies)), bodies, answers, strict=True):
            answer.due_s = due
            if (early := due - client.now()) > 0:
                await asyncio.sleep(early)
            await slots.acquire()
            group.create_task(send(body, answer))


def arrivals(config: ServeConfig, count: int) -> list[float]:
    """Computes the arrival times of requests, in seconds: the first at 0, the others after exponential pauses.

    Args:
        config: options.
        count: number of requests.
    """
    if config.request_rate == float("inf"):
        return [0.0] * count
    pauses = rng(config.workload, ARRIVALS).exponential(1 / config.request_rate, count - 1)
    return [0.0, *(float(time_s) for time_s in np.cumsum(pauses))]


def _body(config: ServeConfig, model: str, item: WorkloadRequest) -> bytes:
    """Makes a greedy, streamed request. ignore_eos is not part of OpenAI's API, and only sent if it is set."""
    fields: dict[str, Any] = {
        "model": model,
        **config.endpoint.fields(item.prompt),
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(fields | ({"ignore_eos": True} if config.workload.ignore_eos else {}))


async def _first_model(client: "Client") -> str:
    names = await client.models()
    if not names:
        raise EngineError("the server has no model", fix="Name one with --model, if it has one nevertheless.")
    return names[0]


async def _warm_up(client: "Client", config: ServeConfig, model: str) -> None:
    """Sends requests like those of the run, with other prompts; they also show problems before the run begins.

    With a dataset the prompts are words, so that the server's prefix cache does not hold the dataset's.
    """
    alphabet = WORDS if config.workload.dataset is not None else config.endpoint.alphabet
    for item in synthetic(config.workload, alphabet, config.warm_up, WARM_UP):
        answer = RequestRecord(item.max_tokens)
        await client.send(config.endpoint.path, _body(config, model, item), answer)
        if answer.failure is not None:
            why, fix = f"{answer.failure.kind}: {answer.failure.detail}", ""
            try:
                names = await client.models()
                if model not in names:
                    fix = f"It has no model {model}, but {', '.join(names)}."
            except EngineError as error:  # the first failure matters more than this one
                fix = error.fix
            raise EngineError("the server did not answer the first request", why, fix)


async def _print_progress(answers: Sequence[RequestRecord]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        ended = [answer for answer in answers if answer.end_s]
        failed = sum(answer.failure is not None for answer in ended)
        print(f"[{len(ended)} of {len(answers)} requests, {failed} failed]", file=sys.stderr, flush=True)


def _server_cpu(pid: int | None) -> float | None:
    """Returns the CPU time of a process; None without one, or if it has ended."""
    try:
        return None if pid is None else cpu_seconds(pid)
    except UsageError:
        return None


def _check_open_files(connections: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and connections > limit - OTHER_FILES:
        raise UsageError(
            f"{connections} requests at once take more open files than this process may have",
            f"its limit is {limit}",
            f"Use --max-concurrency {max(limit - OTHER_FILES, 1)} or less, or raise the limit: ulimit -n.",
        )
