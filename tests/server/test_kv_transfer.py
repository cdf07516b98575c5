"""Prefill and decode apart: two real servers, and a client that does what routers do."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.serve import serve
from tests.helpers.serving import COMPLETIONS, HELLO, Running, exactly, tiny_engine, wait_until
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

PROMPT = [5 + number % 200 for number in range(150)]
WANTED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}


@dataclass
class Pair:
    """A server that prefills, and one that decodes."""

    prefill: Running
    decode: Running

    def lease(self, prompt: Any = PROMPT, **options: Any) -> Any:
        answer = self.prefill.complete(prompt, max_tokens=1, kv_transfer_params=WANTED, **options)
        return answer["kv_transfer_params"]

    def stats(self) -> Any:
        transfer = self.decode.llm.stats().transfer
        assert transfer is not None
        return transfer


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text("a secret of the test, long enough\n")
    return file


def running(engine: Path, role: str | None, secret: Path) -> Running:
    limits = {} if role is None else {"kv_role": role, "kv_secret_file": str(secret)}
    return Running(engine, ServerConfig(port=0), limits)


@pytest.fixture(params=["llama", "qwen3_5_text", "deepseek_v3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines with paged keys and values, with a recurrent state too, and with a latent cache."""
    file = tmp_path_factory.mktemp("engine") / "one.engine"
    config = tiny_config(request.param)
    build_engine(
        MemoryCheckpoint(config, MemoryCheckpoint.of(tiny_model(config), config).stored), BuildConfig(gate=None), file
    )
    return file


@pytest.fixture
def pair(secret: Path) -> Iterator[Pair]:
    with running(tiny_engine(), "prefill", secret) as prefill, running(tiny_engine(), "decode", secret) as decode:
        yield Pair(prefill, decode)


def test_an_answer_is_that_of_one_server(engine: Path, secret: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "seed": 7, "temperature": 1.0}
    with running(engine, None, secret) as alone:
        prompt = [number % alone.llm.engine.plan.vocab_size for number in PROMPT]
        expected = alone.complete(prompt, **options)
    with running(engine, "both", secret) as prefill, running(engine, "both", secret) as decode:
        pair = Pair(prefill, decode)
        params = pair.lease(prompt, seed=7, temperature=1.0)
        answer = decode.complete(prompt, kv_transfer_params=params, **options)
        assert answer["choices"] == expected["choices"]
        stats, sent = pair.stats(), prefill.llm.stats().transfer
        assert sent is not None and stats.num_received_bytes == sent.num_sent_bytes > 0 and stats.num_failures == 0
        assert (
            decode.llm.stats().restored_tokens > 100 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        )
        wait_until(lambda: prefill.llm.stats().transfer.leased_bytes == 0)  # type: ignore[union-attr]


def test_a_chat_and_a_stream(pair: Pair) -> None:
    messages = [{"role": "user", "content": "Hello " * 60}]
    expected = pair.decode.chat(messages, cache_salt="another")
    leased = pair.prefill.chat(messages, max_tokens=1, kv_transfer_params=WANTED)["kv_transfer_params"]
    events = pair.decode.chat(messages, stream=True, kv_transfer_params=leased)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1] if event["choices"])
    assert text == expected["choices"][0]["message"]["content"] and pair.stats().num_received_bytes > 0


def test_only_missing_blocks_move(pair: Pair) -> None:
    pair.decode.complete(PROMPT, kv_transfer_params=pair.lease(), max_tokens=2)
    first = pair.stats().num_received_bytes
    longer = [*PROMPT, *range(200, 250)]
    pair.decode.complete(longer, kv_transfer_params=pair.lease(longer), max_tokens=2)
    assert 0 < pair.stats().num_received_bytes - first < first


def test_a_prompt_is_computed_if_its_lease_is_gone(pair: Pair) -> None:
    expected = pair.decode.complete(PROMPT, max_tokens=8, cache_salt="another")["choices"]
    params = pair.lease()
    pair.decode.complete(PROMPT, kv_transfer_params=params, max_tokens=1)
    again = pair.decode.complete([*PROMPT, 9], kv_transfer_params=params, max_tokens=1)
    assert again["choices"] and pair.stats().num_failures == 1
    left = pair.lease(PROMPT[:140])
    pair.prefill.__exit__()
    answer = pair.decode.complete(PROMPT, kv_transfer_params=left, max_tokens=8, cache_salt="third")
    assert answer["choices"] == expected and pair.stats().num_failures == 2


def test_a_lease_of_another_prompt_changes_nothing(pair: Pair) -> None:
    other = [token + 1 for token in PROMPT]
    expected = pair.decode.complete(PROMPT, max_tokens=8, cache_salt="another")["choices"]
    answer = pair.decode.complete(PROMPT, max_tokens=8, kv_transfer_params=pair.lease(other))
    assert answer["choices"] == expected and pair.decode.llm.stats().restored_tokens == 0


def test_no_more_than_a_leased_prompt_is_computed(pair: Pair) -> None:
    for options in ({"min_tokens": 40}, {"structured_outputs": exactly("x" * 40)}):
        body = {"prompt": PROMPT, "max_tokens": 50, "kv_transfer_params": WANTED, **options}
        answer = pair.prefill.post(COMPLETIONS, body).json
        assert answer["kv_transfer_params"] and answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hello " * 60, "max_output_tokens": 8}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello " * 60}], "max_tokens": 8}),
    ],
)
def test_other_apis(pair: Pair, path: str, body: dict[str, Any]) -> None:
    expected = pair.decode.post(path, {**body, "cache_salt": "another"}).json
    leased = pair.prefill.post(path, {**body, "kv_transfer_params": WANTED}).json
    answer = pair.decode.post(path, {**body, "kv_transfer_params": leased["kv_transfer_params"]}).json
    (key,) = {"output", "content"} & answer.keys()
    answers = [one[key][0] if key == "content" else one[key][0]["content"] for one in (answer, expected)]
    assert answers[0] == answers[1] and pair.stats().num_received_bytes > 0 and pair.stats().num_failures == 0
    assert pair.prefill.ask("GET", f"/v1/responses/{leased['id']}").status == 404  # nobody continues it


def test_short_prompts_have_no_lease(pair: Pair) -> None:
    answer = pair.prefill.complete([5, 6], max_tokens=1, kv_transfer_params=WANTED)
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize(
    ("server", "options", "text"),
    [
        ("decode", {"kv_transfer_params": WANTED}, "--kv-role is not prefill or both"),
        ("prefill", {"kv_transfer_params": {"do_remote_prefill": True}}, "--kv-role is not decode or both"),
        ("decode", {"kv_transfer_params": {"do_remote_prefill": True}}, "not those of a prefill server"),
        ("prefill", {"kv_transfer_params": WANTED, "n": 2}, "one answer"),
        ("prefill", {"kv_transfer_params": WANTED, "prompt": ["a", "b"]}, "for one prompt"),
        ("prefill", {"kv_transfer_params": WANTED, "stream": True}, "cannot be streamed"),
        ("prefill", {"kv_transfer_params": 5}, "kv_transfer_params"),
    ],
)
def test_what_is_refused(pair: Pair, server: str, options: dict[str, Any], text: str) -> None:
    refused = getattr(pair, server).post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, **options})
    assert refused.status == 400 and refused.error["param"] == "kv_transfer_params"
    assert text in refused.error["message"]


def test_clients_name_no_servers(pair: Pair) -> None:
    params = pair.lease() | {"remote_host": "127.0.0.2"}
    refused = pair.decode.post(COMPLETIONS, {"prompt": PROMPT, "kv_transfer_params": params})
    assert refused.status == 400 and "not signed" in refused.error["message"]


def test_keys_that_ask_for_nothing(pair: Pair) -> None:
    nothing = {"do_remote_decode": False, "do_remote_prefill": False}
    for params in ({}, nothing, None):
        assert "kv_transfer_params" not in pair.decode.complete("a", kv_transfer_params=params)
    with running(tiny_engine(), None, Path()) as plain:
        assert plain.chat(HELLO, kv_transfer_params=nothing)
        refused = plain.post(COMPLETIONS, {"prompt": PROMPT, "kv_transfer_params": WANTED})
        assert refused.status == 400 and "--kv-role" in refused.error["message"]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"kv_role": "some"}, "kv_role is 'some': it must be one of prefill, decode, both"),
        ({"kv_role": "both"}, "kv_role needs kv_secret_file"),
        ({"kv_listen": "127.0.0.1:5"}, "kv_listen needs kv_role"),
        ({"kv_secret_file": "x"}, "kv_secret_file needs kv_role or kv_cache_remote"),
        ({"kv_role": "decode", "kv_secret_file": "x", "kv_listen": "127.0.0.1:5"}, "kv_listen is for servers that"),
        ({"kv_role": "both", "kv_secret_file": "x", "kv_listen": "127.0.0.1"}, "it must be HOST:PORT"),
        ({"kv_role": "both", "kv_secret_file": "x", "kv_listen": "host:99999"}, "it must be HOST:PORT"),
        ({"kv_role": "both", "kv_secret_file": "x", "kv_listen": "0.0.0.0:5"}, "cannot reach this address"),
    ],
)
def test_limits(limits: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        RuntimeConfig(**limits)
    assert text in str(error.value)


def test_engines_share_no_address(secret: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.engine").symlink_to(tiny_engine())
    limits: dict[str, Any] = {"kv_role": "both", "kv_secret_file": str(secret), "kv_listen": "127.0.0.1:5"}
    with pytest.raises(UsageError, match="kv_listen is for one engine: 2 cannot share an address"):
        serve([tmp_path], ServerConfig(port=0), **limits)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        ("short", "shorter than 16 bytes"),
        ("s" * 5000, "cannot be read: it has more"),
    ],
)
def test_secrets(tmp_path: Path, content: str | None, text: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError) as error:
        serve(tiny_engine(), ServerConfig(port=0), kv_role="both", kv_secret_file=str(file))
    assert text in str(error.value)
