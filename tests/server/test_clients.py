"""Bodies that clients send, as tests/server/requests/README.md describes them: each is answered."""

import json
from pathlib import Path

import pytest

from tests.helpers.serving import Running

FOLDER = Path(__file__).parent / "requests"
LENGTHS = {"/v1/responses": "max_output_tokens"}  # the key that limits the tokens of an answer; elsewhere max_tokens
NO_EFFORT = "is not implemented: the model's chat template knows none"
# What the answers' warnings name, by client.
UNUSED: dict[str, set[str]] = {
    "claude_code": {
        f"output_config.effort {NO_EFFORT}",
        "tools[5] is not implemented: its type is web_search_20250305, not custom",
    },
    "codex": {
        f"reasoning.effort {NO_EFFORT}",
        *(
            f"tools[{place}] is not implemented: its type is {kind}, not function"
            for place, kind in enumerate(
                ("custom", "local_shell", "web_search", "image_generation", "namespace"), start=2
            )
        ),
    },
    "codex_cli": {
        "tools[4] is not implemented: its type is namespace, not function",
        "tools[8] is not implemented: its type is web_search, not function",
    },
    "litellm": {f"reasoning_effort {NO_EFFORT}"},
    "openai_agents_chat": {f"reasoning_effort {NO_EFFORT}"},
    "openai_agents_responses": {
        f"reasoning.effort {NO_EFFORT}",
        "tools[1] is not implemented: its type is web_search, not function",
    },
}
SERVER = {"kind": "calls tools"}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_requests_of_a_client_are_answered(server: Running, name: str) -> None:
    """Recorded requests are sent as they are, but for the length of completions, which are random text."""
    warned: set[str] = set()
    for request in json.loads((FOLDER / f"{name}.json").read_text())["requests"]:
        path, body = request["path"], request["body"]
        body.pop("max_completion_tokens", None)
        answer = server.post(path, {**body, LENGTHS.get(path, "max_tokens"): 2})
        assert answer.status == 200, (path, answer.body)
        warned |= set(filter(None, answer.headers.get("x-enginewright-warning", "").split("; ")))
    assert warned == UNUSED.get(name, set())
