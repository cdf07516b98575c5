"""Modules that the runtime does without, checked in a process that answers a prompt."""

import json
import subprocess
import sys
from pathlib import Path

from enginewright.builder.build import BuildConfig, build_engine
from tests.helpers.tiny import MemoryCheckpoint

BUILDER = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "rich",
    "safetensors",
    "gguf",
    "transformers",
    "cryptography",
    "model_signing",
    "enginewright.builder",
    "enginewright.passes",
    "enginewright.plugins",
)
SLOW = (
    "asyncio",
    "jinja2",
    "starlette",
    "uvicorn",
)  # needed by some commands, and too slow to import for the others


def test_an_answer_needs_no_builder_and_starts_without_slow_imports(tmp_path: Path) -> None:
    build_engine(MemoryCheckpoint.tiny("llama"), BuildConfig(), tmp_path / "tiny.engine")
    code = (
        "import json, sys\n"
        "from enginewright import LLM, SamplingParams\n"
        f"with LLM({str(tmp_path / 'tiny.engine')!r}) as llm:\n"
        "    params = SamplingParams(max_tokens=3, ignore_eos=True)\n"
        "    tokens = llm.generate(['Hello'], params)[0].outputs[0].token_ids\n"
        "    llm.chat([{'role': 'user', 'content': 'Hello'}], params)\n"  # rendered in a process of its own
        "print(json.dumps([len(tokens), sorted(sys.modules)]))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    count, modules = json.loads(process.stdout)
    assert count == 3 and "enginewright.runtime.text.chat_template" in modules
    assert set(modules) & {*BUILDER, *SLOW} == set()
