"""ik_llama.cpp as a worker process: python ik_llama_cpu.py LLAMA_BATCHED_BENCH FILE.gguf THREADS FLAGS

ik_llama.cpp has no package: its own llama-batched-bench, of a built copy, is started for every request, and takes the
times itself. FLAGS is a JSON list of more of its options, such as ["-rtr"]. All that it computes is of token 0, whose
arithmetic is that of any other.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from exchange import Cannot, Prompts, Seconds, private_stdout, serve

BATCH, UBATCH = 2048, 512


class IkLlama:
    def __init__(self, program: str, file: str, threads: int, flags: list[str]) -> None:
        numbers = ["-t", str(threads), "-b", str(BATCH), "-ub", str(UBATCH)]
        paths = [str(Path(program).resolve()), "-m", str(Path(file).resolve())]
        self.command, self.shape = [*paths, *numbers, *flags], (0, 0)

    def _rates(self, prompts: int, length: int, tokens: int) -> tuple[float, float]:
        """Tokens a second of reading the prompts and of generating, from the one row of its table."""
        context = str(prompts * (length + tokens))
        sizes = ["-c", context, "-npp", str(length), "-ntg", str(tokens), "-npl", str(prompts)]
        # It writes llama.log where it runs.
        with TemporaryDirectory() as folder:
            done = subprocess.run([*self.command, *sizes], capture_output=True, text=True, cwd=folder)
        rows = [line.strip("|\n ").split("|") for line in (done.stdout + done.stderr).splitlines() if line[:1] == "|"]
        numbers = [row for row in rows if row[0].strip().isdecimal()]
        if done.returncode != 0 or not numbers:
            last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
            raise Cannot(f"{' '.join(self.command)} ended with {done.returncode}: {' '.join(last)}")
        return float(numbers[0][5]), float(numbers[0][7])

    def open(self, prompts: Prompts, room: int) -> Seconds | None:
        self.shape = len(prompts), len(prompts[0])
        if room > 1:  # steps follow, each after prompts of its own: nothing can be held
            return None
        return Seconds(len(prompts) * len(prompts[0]) / self._rates(*self.shape, 1)[0])

    def step(self, tokens: int) -> Seconds:
        return Seconds(self.shape[0] * tokens / self._rates(*self.shape, tokens)[1])

    def close(self) -> None: ...

    def generate(self, prompts: Prompts, tokens: int) -> Seconds:
        length = len(prompts[0])
        reading, generating = self._rates(len(prompts), length, tokens)
        return Seconds(len(prompts) * (length / reading + tokens / generating))


def main() -> None:
    program, file, threads, flags = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    answers = private_stdout()
    version = subprocess.run([program, "--version"], capture_output=True, text=True)
    said = [line for line in (version.stdout + version.stderr).splitlines() if line.startswith("version")]
    serve(
        answers, {"version": " ".join(said) or "unknown", "flags": sys.argv[4]}, IkLlama(program, file, threads, flags)
    )


if __name__ == "__main__":
    main()
