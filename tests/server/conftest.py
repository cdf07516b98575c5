"""Clients of the module's server, and a server that several modules need in addition to it."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.helpers.serving import Running, running


@pytest.fixture(scope="module")
def at_once() -> Iterator[Running]:
    """A server whose model does not reason."""
    with running(kind="calls tools at once") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=key_of(server), max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key=key_of(server), max_retries=0) as opened:
        yield opened


def key_of(server: Running) -> str:
    """A key that the server accepts; clients send one even to a server without keys."""
    return next(iter(server.config.api_keys), "none")
