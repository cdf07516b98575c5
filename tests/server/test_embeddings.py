"""Embeddings, reranking and scores over HTTP."""

import struct
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginewright import LLM
from enginewright.passes.quant import Bf16
from tests.api.test_embeddings import engine_of
from tests.helpers.serving import HELLO, Running, running

DOCUMENTS = ["dog", "The capital of France is Paris.", "fox"]


@pytest.fixture(scope="module")
def encoder() -> Iterator[Running]:
    with running(engine=engine_of("bert", "mean", Bf16()), served_model_names=("tiny",)) as opened:
        yield opened


@pytest.fixture(scope="module")
def cross_encoder() -> Iterator[Running]:
    with running(engine=engine_of("bert", "pair", Bf16())) as opened:
        yield opened


def test_embeddings(encoder: Running) -> None:
    """Texts and tokens, as numbers and as bytes; the same as by the library."""
    with LLM(engine_of("bert", "mean", Bf16()), threads=1) as llm:
        expected = [output.outputs.embedding for output in llm.embed(DOCUMENTS)]
        ids = [output.prompt_token_ids for output in llm.embed(DOCUMENTS)]
    answer = encoder.post("/v1/embeddings", {"input": DOCUMENTS, "model": "tiny", "user": "me"}).json
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("list", "tiny", "embd-")
    assert [entry["embedding"] for entry in answer["data"]] == expected
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(n, "embedding") for n in range(3)]
    count = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    by_tokens = encoder.post("/v1/embeddings", {"input": ids, "encoding_format": "float"}).json
    assert by_tokens["data"] == answer["data"]
    (one,) = encoder.post("/v1/embeddings", {"input": ids[0], "encoding_format": "base64"}).json["data"]
    assert list(struct.unpack("<60f", b64decode(one["embedding"]))) == pytest.approx(expected[0], rel=1e-7)
    (short,) = encoder.post("/v1/embeddings", {"input": "dog", "dimensions": 8, "prompt_name": "query"}).json["data"]
    assert len(short["embedding"]) == 8


def test_rerank(encoder: Running) -> None:
    asked = {"query": "fox", "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]}
    whole = encoder.post("/v1/rerank", asked).json
    assert whole["results"][0]["index"] == 2
    scores = [result["relevance_score"] for result in whole["results"]]
    assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1)
    assert [result["document"]["text"] for result in whole["results"]] == [
        DOCUMENTS[result["index"]] for result in whole["results"]
    ]
    best = encoder.post("/rerank", {**asked, "top_n": 1, "return_documents": False}).json
    assert best["results"] == [{"index": 2, "relevance_score": scores[0]}]
    assert best["usage"]["total_tokens"] > 0


def test_score(encoder: Running, cross_encoder: Running) -> None:
    data = encoder.post("/v1/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS}).json["data"]
    assert [entry["score"] for entry in data] == pytest.approx([1, 1, 1])
    crossed = cross_encoder.post("/score", {"text_1": "fox", "text_2": DOCUMENTS}).json
    with LLM(engine_of("bert", "pair", Bf16()), threads=1) as llm:
        expected = [output.outputs.score for output in llm.score("fox", DOCUMENTS)]
    assert [entry["score"] for entry in crossed["data"]] == expected
    ranked = cross_encoder.post("/v1/rerank", {"query": "fox", "documents": DOCUMENTS}).json["results"]
    assert [result["index"] for result in ranked] == np.argsort(expected)[::-1].tolist()


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("embeddings", {"input": []}, "input", "input is empty"),
        ("embeddings", {"input": ["a", 5]}, "input", "mixes"),
        ("embeddings", {"input": [307]}, "input", "token ids are 0 to 306"),
        ("embeddings", {"input": "fox " * 900}, "input", "maximum context length is 300 tokens"),
        ("embeddings", {"input": "a", "dimensions": 9}, "dimensions", "8, 20"),
        ("embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "there are other, query"),
        ("embeddings", {"input": [5], "prompt_name": "query"}, "prompt_name", "prompt_name is only for texts"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "from 1 to 60"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 301}, "truncate_prompt_tokens", "300 tokens"),
        ("embeddings", {"input": "a", "priority": 1001}, "priority", "priority must be between"),
        ("embeddings", {"input": [[]]}, "input", "the prompt is empty"),
        ("rerank", {"query": "a"}, "documents", "missing"),
        ("rerank", {"query": "a", "documents": ["b"], "priority": 1001}, "priority", "priority must be between"),
        ("rerank", {"query": "a", "documents": [5]}, "documents[0]", "expected `str | object`"),
        ("rerank", {"query": "a", "documents": [{"text": 5}]}, "documents[0].text", "expected `str`"),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "at least 1",
        ),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5},
            "max_tokens_per_doc",
            "is not implemented: truncate_prompt_tokens replaces it",
        ),
        ("score", {"text_1": "a"}, "text_2", "missing"),
        ("score", {"text_1": [], "text_2": "a"}, "text_1", "text_1 is []"),
        ("score", {"text_1": "a", "text_2": [5]}, "text_2[0]", "expected `str`"),
        ("score", {"text_1": "a", "text_2": "b", "priority": -1001}, "priority", "priority must be between"),
        ("score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("embeddings", {"input": "a", "input_type": "query"}, "input_type", "is not implemented: prompt_name chooses"),
        ("embeddings", {}, "input", "missing"),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts"),
        ("chat/completions", {"messages": HELLO}, None, "it is a model that gives a vector for a text"),
        ("completions", {"prompt": "a"}, None, "it is a model that gives a vector for a text"),
    ],
)
def test_refusals(encoder: Running, path: str, body: dict[str, Any], param: str | None, message: str) -> None:
    answer = encoder.post(f"/v1/{path}", body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and message in answer.error["message"]


def test_an_engine_that_writes_refuses_texts() -> None:
    with running() as writer:
        for path, body in (("embeddings", {"input": "a"}), ("score", {"text_1": "a", "text_2": "b"})):
            answer = writer.post(f"/v1/{path}", body)
            assert answer.status == 400 and "it writes text" in answer.error["message"]


def test_other_requests_go_on(encoder: Running, cross_encoder: Running) -> None:
    """Metrics, models, tokens; and a cross-encoder has no vectors."""
    assert encoder.post("/tokenize", {"prompt": "fox"}).status == 200
    assert b"enginewright" in encoder.ask("GET", "/metrics").body
    assert encoder.ask("GET", "/health").status == 200
    refused = cross_encoder.post("/v1/embeddings", {"input": "a"})
    assert refused.status == 400 and "Use score" not in refused.error["message"]
    assert "it gives scores to pairs of texts" in refused.error["message"]
