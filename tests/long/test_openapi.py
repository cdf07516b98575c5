"""schemathesis against a server: what /openapi.json describes is what comes, whatever is sent, and never a 5xx.

`make test-long` installs it (clients.txt).
"""

import subprocess
from pathlib import Path

import pytest

from enginewright.passes.quant import Bf16
from tests.api.test_embeddings import engine_of
from tests.helpers.serving import running, tiny_engine

PROGRAM = Path(__file__).parents[2] / ".cache/clients/bin/schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = [
    "--mode",
    "all",
    "--phases",
    "examples,coverage,fuzzing",
    "--max-examples",
    "40",
    "--generation-deterministic",
]


@pytest.mark.parametrize("kind", ["chat", "mean", "pair"])
def test_answers_are_as_documented(kind: str, tmp_path: Path) -> None:
    """Valid bodies and invalid ones."""
    assert PROGRAM.is_file(), "run `make test-long`, which installs it"
    engine = tiny_engine("calls tools") if kind == "chat" else engine_of("bert", kind, Bf16())
    with running(engine=engine, limits={"max_model_len": 64}, max_body_bytes=100_000) as server:
        address = f"http://127.0.0.1:{server.port}/openapi.json"
        command = [str(PROGRAM), "run", address, "--checks", CHECKS, *OPTIONS, "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-1000:]
        assert "Tested: 28" in done.stdout, done.stdout[-3000:]
