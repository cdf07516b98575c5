"""POST /v1/embeddings, in OpenAI's format, /v1/rerank, in Jina's and Cohere's, and /v1/score, in vLLM's."""

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.embeddings import (
    Score,
    TextReader,
    Vector,
    check_dimensions,
    pairs_of,
    scores_of,
    tokens_to_score,
    vector_of,
)
from enginewright.runtime.core.embedding_core import TextTokens
from enginewright.runtime.core.engine_kind import refuse_scores, refuse_vectors
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.errors import ApiError, from_engine
from enginewright.runtime.server.form import encode
from enginewright.runtime.server.keys import UnusedKeys, known_keys
from enginewright.runtime.server.log import RequestLog
from enginewright.runtime.server.protocol import UNREAD, decode, prompts_of
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.wire import ClientGone, send_json, until_gone
from enginewright.runtime.server.work import work_of
from enginewright.runtime.step.work_class import WorkClass

Answer = dict[str, Any]


class TextsBody(Protocol):
    """Body of a request about texts."""

    model: str | None  # name of the engine
    truncate_prompt_tokens: int | None  # number of tokens that are kept of a longer text
    priority: int | None  # priority; lower values are more urgent

    def characters(self) -> int:
        """Number of characters of all its texts, where a token id counts as one."""

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        """Tokenizes the texts. Raises UsageError if the engine does not take them."""

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        """The keys of the response that depend on the kind of the request."""


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of an embedding request."""

    input: str | list[int | str | list[int]]  # text, token ids, or several of either
    model: str | None = None  # name of the engine
    encoding_format: Literal["float", "base64"] | None = None  # format of vectors in the response
    dimensions: int | None = None  # number of elements of a vector
    prompt_name: str | None = None  # name of the model's prompt that precedes the texts
    truncate_prompt_tokens: int | None = None  # number of tokens that are kept of a longer text
    priority: int | None = None  # priority; lower values are more urgent

    def characters(self) -> int:
        """Number of characters of all texts, where a token id counts as one."""
        return sum(map(len, prompts_of(self.input, "input")))  # type: ignore[arg-type]

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        """Tokenizes the texts. Raises UsageError if the engine gives no vectors."""
        refuse_vectors(engine)
        check_dimensions(engine, self.dimensions)
        return [reader.text(each, self.prompt_name) for each in prompts_of(self.input, "input")]

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        """The vectors as keys of the response."""
        vectors = [vector_of(engine.embedding, row, self.dimensions) for row in rows]
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data}

    def _written(self, vector: Vector) -> list[float] | str:
        if self.encoding_format == "base64":
            return b64encode(np.asarray(vector, "<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


class ScoreBody(msgspec.Struct, kw_only=True):
    """Body of a request for similarity scores."""

    text_1: str | list[str]  # one text, or several
    text_2: str | list[str]  # one text, or several
    model: str | None = None  # name of the engine
    truncate_prompt_tokens: int | None = None  # number of tokens that are kept of a longer text
    priority: int | None = None  # priority; lower values are more urgent

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts to score. Raises UsageError if they do not match in number."""
        return pairs_of(self.text_1, self.text_2)

    def characters(self) -> int:
        """Number of characters of all texts."""
        return sum(map(len, (text for pair in self.pairs() for text in pair)))

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        """Tokenizes the pairs. Raises UsageError if the engine gives no scores."""
        refuse_scores(engine)
        return tokens_to_score(engine, reader, self.pairs())

    def scores(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> list[Score]:
        """The scores of the pairs from the rows that the engine computed."""
        return scores_of(engine, self.pairs(), texts, rows)

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        """The scores as keys of the response."""
        found = self.scores(engine, texts, rows)
        data = [{"object": "score", "index": index, "score": each.score} for index, each in enumerate(found)]
        return {"object": "list", "created": int(time.time()), "data": data}


class Document(msgspec.Struct):
    """Document to rank."""

    text: str  # text of the document


class RerankBody(msgspec.Struct, kw_only=True):
    """Body of a request that ranks documents by a query."""

    query: str  # text that the documents are compared with
    documents: list[str | Document]  # documents to rank
    model: str | None = None  # name of the engine
    top_n: int | None = None  # number of best documents in the response; 0 means all
    return_documents: bool | None = None  # false leaves the documents out of the response
    truncate_prompt_tokens: int | None = None  # number of tokens that are kept of a longer text
    priority: int | None = None  # priority; lower values are more urgent

    def _score_body(self) -> ScoreBody:
        documents = [each if isinstance(each, str) else each.text for each in self.documents]
        if not documents:
            raise ApiError(400, "documents is empty", param="documents", code="invalid_type")
        if self.top_n is not None and self.top_n < 0:
            raise ApiError(400, f"top_n is {self.top_n}: it must be at least 0", param="top_n")
        return ScoreBody(text_1=self.query, text_2=documents)

    def characters(self) -> int:
        """Number of characters of all texts."""
        return self._score_body().characters()

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        """Tokenizes the pairs of query and document. Raises UsageError if the engine gives no scores."""
        return self._score_body().tokens(engine, reader)

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        """The documents in the order of their relevance, as keys of the response."""
        score_body = self._score_body()
        found = score_body.scores(engine, texts, rows)
        order = sorted(range(len(found)), key=lambda index: -found[index].score)  # of equal scores, the earlier one
        results = []
        for index in order[: self.top_n or None]:
            result: Answer = {"index": index, "relevance_score": found[index].score}
            if self.return_documents is not False:
                result["document"] = {"text": score_body.text_2[index]}
            results.append(result)
        return {"results": results}


class TextsRoute:
    """POST of one of these APIs.

    Args:
        engines: the engines of the server.
        body: the type of the request's body.
        id_prefix: prefix of a response's id.
        key: the key of the body that holds the texts, for errors.
    """

    def __init__(
        self, engines: Engines, body: type[EmbeddingBody] | type[ScoreBody] | type[RerankBody], id_prefix: str, key: str
    ) -> None:
        self._engines, self._known, self._id_prefix, self._key = engines, known_keys(body, UNREAD), id_prefix, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, log = time.perf_counter(), scope["log"]
        try:
            data = await self._engines.bodies.read(scope, receive)
            unused = log.unused = UnusedKeys(is_strict=self._engines.config.strict_keys)
            body: TextsBody = decode(data, self._known, self._engines.max_vocab_size, unused)
            work = work_of(scope, body.priority)
            async with self._engines.use(body.model, receive) as (model, service, _):
                log.model, log.request_id = model, f"{self._id_prefix}-{token_hex(12)}"
                texts, rows = await Texts(service, log, arrived, work).run(body, receive)
                count = sum(len(text.ids) for text in texts)
                usage = {"prompt_tokens": count, "total_tokens": count}
                answer = body.answer(service.llm.engine, texts, rows)
                whole = {"id": log.request_id, "model": log.model, "usage": usage, **answer}
                await send_json(send, 200, await asyncio.to_thread(encode, whole))
        except EngineError as error:
            raise from_engine(error, self._key) from None


class Texts:
    """The texts of one request, computed together.

    Args:
        service: the engine.
        log: log line of the request.
        arrived: arrival of the request, by time.perf_counter.
        work: priority and tenant.
    """

    def __init__(self, service: Service, log: RequestLog, arrived: float, work: WorkClass) -> None:
        self._service, self._log, self.arrived, self._class = service, log, arrived, work
        self._work: asyncio.Task[tuple[list[TextTokens], list[Vector]]] | None = None
        self._stopped: Exception | None = None  # error that ends the request early

    async def run(self, body: TextsBody, receive: Receive) -> tuple[list[TextTokens], list[Vector]]:
        """Tokenizes and computes the texts.

        Returns:
            Tokens and rows of the texts, in their order.

        Raises:
            ApiError, UsageError: the request is refused, or fails.
            ClientGone: the client has disconnected.
        """
        service, num_tokens, end = self._service, 0, "abort"
        reservation = service.admission.enter_texts(body.characters())
        service.live.add(self)
        service.throughput.begin()
        watch = asyncio.create_task(self._watch(receive))
        try:
            self._work = asyncio.create_task(self._compute(body, reservation.tokenized))
            texts, rows = await self._work
            num_tokens, end = sum(len(text.ids) for text in texts), "stop"
            service.metrics.e2e.observe(time.perf_counter() - self.arrived)
            return texts, rows
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        except UsageError:
            raise
        except EngineError:
            end = "error"
            raise
        finally:
            watch.cancel()
            reservation.close()
            service.metrics.finished[end] += 1
            self._log.embedded(num_tokens, time.perf_counter() - self.arrived, end)
            service.live.discard(self)

    @property
    def adapter_name(self) -> str:
        """Empty: embedding models have no adapters."""
        return ""

    @property
    def is_waiting(self) -> bool:
        """False: texts are computed as soon as they are tokenized."""
        return False

    def stop(self, why: Exception) -> None:
        """Ends the request early; `why` is raised where its rows are awaited."""
        self._stopped = self._stopped or why
        if self._work is not None:
            self._work.cancel()

    async def _compute(
        self, body: TextsBody, tokenized: Callable[[int], None]
    ) -> tuple[list[TextTokens], list[Vector]]:
        llm = self._service.llm
        reader = TextReader(llm.engine, llm.max_model_len, body.truncate_prompt_tokens)
        texts = await llm.in_tokenizer(lambda: body.tokens(llm.engine, reader))
        tokenized(sum(len(text.ids) for text in texts))
        return texts, await llm.rows(texts, self._class)

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self.stop(ClientGone())
