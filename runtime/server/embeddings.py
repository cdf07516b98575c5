"""POST /v1/embeddings, in OpenAI's form, /v1/rerank, in Jina's and Cohere's, and /v1/score, in vLLM's."""

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
from enginewright.runtime.server.keys import UnusedKeys, known_of
from enginewright.runtime.server.log import RequestLog
from enginewright.runtime.server.protocol import UNREAD, decode, prompts_of
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.wire import ClientGone, send_json, until_gone
from enginewright.runtime.server.work import work_of
from enginewright.runtime.step.work_class import WorkClass

Answer = dict[str, Any]


class TextsBody(Protocol):
    """What is asked of texts."""

    model: str | None
    truncate_prompt_tokens: int | None
    priority: int | None

    def characters(self) -> int:
        """Of all its texts, or as many as their tokens stand for."""

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        """What has to be computed. Raises UsageError."""

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        """Of what was computed; without the keys that all answers have."""


class EmbeddingBody(msgspec.Struct, kw_only=True):
    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None  # which of the model's prompts texts begin with
    truncate_prompt_tokens: int | None = None
    priority: int | None = None  # the lower, the more urgent

    def characters(self) -> int:
        return sum(map(len, prompts_of(self.input, "input")))  # type: ignore[arg-type]

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        refuse_vectors(engine)
        check_dimensions(engine, self.dimensions)
        return [reader.text(each, self.prompt_name) for each in prompts_of(self.input, "input")]

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
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
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None  # the lower, the more urgent

    def pairs(self) -> list[tuple[str, str]]:
        return pairs_of(self.text_1, self.text_2)

    def characters(self) -> int:
        return sum(map(len, (text for pair in self.pairs() for text in pair)))

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        refuse_scores(engine)
        return tokens_to_score(engine, reader, self.pairs())

    def scores(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> list[Score]:
        return scores_of(engine, self.pairs(), texts, rows)

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        found = self.scores(engine, texts, rows)
        data = [{"object": "score", "index": index, "score": each.score} for index, each in enumerate(found)]
        return {"object": "list", "created": int(time.time()), "data": data}


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None  # the best so many; 0 is all
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None  # the lower, the more urgent

    def _asked(self) -> ScoreBody:
        documents = [each if isinstance(each, str) else each.text for each in self.documents]
        if not documents:
            raise ApiError(400, "documents is empty", param="documents", code="invalid_type")
        if self.top_n is not None and self.top_n < 0:
            raise ApiError(400, f"top_n is {self.top_n}: it must be at least 0", param="top_n")
        return ScoreBody(text_1=self.query, text_2=documents)

    def characters(self) -> int:
        return self._asked().characters()

    def tokens(self, engine: Engine, reader: TextReader) -> list[TextTokens]:
        return self._asked().tokens(engine, reader)

    def answer(self, engine: Engine, texts: Sequence[TextTokens], rows: Sequence[Vector]) -> Answer:
        asked = self._asked()
        found = asked.scores(engine, texts, rows)
        order = sorted(range(len(found)), key=lambda index: -found[index].score)  # of two alike, the earlier one
        results = []
        for index in order[: self.top_n or None]:
            result: Answer = {"index": index, "relevance_score": found[index].score}
            if self.return_documents is not False:
                result["document"] = {"text": asked.text_2[index]}
            results.append(result)
        return {"results": results}


class TextsRoute:
    """POST of one of these APIs.

    Args:
        body: the type of the request's body.
        id_prefix: of an answer's id.
        key: of the body, which holds its texts.
    """

    def __init__(
        self, engines: Engines, body: type[EmbeddingBody] | type[ScoreBody] | type[RerankBody], id_prefix: str, key: str
    ) -> None:
        self._engines, self._known, self._id_prefix, self._key = engines, known_of(body, UNREAD), id_prefix, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, log = time.perf_counter(), scope["log"]
        try:
            data = await self._engines.bodies.read(scope, receive)
            unused = log.unused = UnusedKeys(is_strict=self._engines.config.strict_keys)
            body: TextsBody = decode(data, self._known, self._engines.max_vocab_size, unused)
            work = work_of(scope, body.priority)
            async with self._engines.use(body.model, receive) as (model, service):
                log.model, log.request_id = model, f"{self._id_prefix}-{token_hex(12)}"
                texts, rows = await Texts(service, log, arrived, work).run(body, receive)
                count = sum(len(text.ids) for text in texts)
                usage = {"prompt_tokens": count, "total_tokens": count}
                answer = body.answer(service.llm.engine, texts, rows)
                whole = {"id": log.request_id, "model": log.model, "usage": usage, **answer}
                await send_json(send, 200, await asyncio.to_thread(encode, whole))
        except EngineError as error:
            raise from_engine(error, self._key) from None
        except ClientGone:
            log.is_gone = True


class Texts:
    """The texts of one request, computed together."""

    def __init__(self, service: Service, log: RequestLog, arrived: float, work: WorkClass) -> None:
        """arrived: when the request came, by time.perf_counter."""
        self._service, self._log, self._arrived, self._class = service, log, arrived, work
        self._work: asyncio.Task[tuple[list[TextTokens], list[Vector]]] | None = None
        self._stopped: Exception | None = None  # why it may not go on

    async def run(self, body: TextsBody, receive: Receive) -> tuple[list[TextTokens], list[Vector]]:
        """Their tokens and rows.

        Raises:
            ApiError, UsageError: it is refused, or fails.
            ClientGone: the client has left.
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
            service.metrics.whole.observe(time.perf_counter() - self._arrived)
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
            self._log.embedded(num_tokens, time.perf_counter() - self._arrived, end)
            service.live.discard(self)

    def stop(self, why: Exception) -> None:
        """End the request early; `why` is raised where its rows are awaited."""
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
