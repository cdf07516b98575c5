"""Token ids of texts and conversations, over HTTP."""

from typing import Any

import pytest

from enginewright import __version__
from enginewright.runtime.engine import Engine
from tests.helpers.serving import HELLO, LENGTH, Running, tiny_engine

SERVER = {"served_model_names": ("tiny",)}


def test_a_text_and_back(server: Running) -> None:
    text = "The capital of Größe 🙂"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True, "model": "tiny"}).json
    with Engine.open(tiny_engine()) as engine:
        assert answer["tokens"] == engine.tokenizer.encode(text)
        plain = engine.tokenizer.encode(text, add_special_tokens=False)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), LENGTH)
    assert len(answer["token_strs"]) == answer["count"]
    bare = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert bare["tokens"] == plain and bare["token_strs"] is None
    assert server.post("/detokenize", {"tokens": plain}).json == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_a_conversation_is_what_a_chat_reads(server: Running) -> None:
    usage = server.chat(HELLO)["usage"]
    assert server.post("/tokenize", {"messages": HELLO}).json["count"] == usage["prompt_tokens"]
    shorter = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json["count"]
    assert shorter < usage["prompt_tokens"]


def test_the_version(server: Running) -> None:
    assert server.ask("GET", "/version").json == {"version": __version__}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x " * LENGTH}, 200, None),
        ("/tokenize", {"prompt": "x" * 8_000_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, 400, "tools"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [307]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * (LENGTH + 1)}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_refusals(server: Running, path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    answer = server.post(path, body)
    assert answer.status == status
    assert status == 200 or answer.error["param"] == param, answer.error
