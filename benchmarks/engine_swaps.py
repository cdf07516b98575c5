"""Is all that a closed engine held given back? A folder of engines that take each other's place in the memory.

    PYTHONPATH=. python benchmarks/engine_swaps.py ENGINE [--engines 3] [--requests 60] [--memory 700m]
                                                          [--kv-cache-memory 200m]

`engine run` serves a folder of links to ENGINE, first with --mmap and then with --no-mmap, and is asked for one short
answer of each in turn; --memory has to be less than all of them want. Prints the resident memory of the server after
some of the requests, and its files, mappings of engines, threads and child processes; at the end how often an engine
was opened, and the ratio of the most memory after a request to that after each engine was asked once: about 1 if
nothing is kept.
"""

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path

from peers.worker import NotMeasured
from protocol.server import Server

from tests.helpers.process_facts import held, resident_bytes

MB = 1e6


def ask(server: Server, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()


def measure(folder: Path, options: list[str], log: Path, num_requests: int) -> None:
    """Swap the engines of a folder, and print what the server holds meanwhile."""
    server = Server(folder, options, log)
    num_engines = len(server.models)
    try:
        pid, resident = server.process.pid, list[int]()
        for number in range(1, num_requests + 1):
            ask(server, server.models[(number - 1) % num_engines])
            resident.append(resident_bytes(pid))
            if number in (1, num_engines, 10, num_requests // 2, num_requests):
                counts = ", ".join(f"{count} {name}" for name, count in held(pid).items())
                print(f"{number:>5} requests: {resident[-1] / MB:7.0f} MB, {counts}", flush=True)
    finally:
        server.close()
    openings = log.read_text().count(" is open after ")
    print(f"{openings} openings; most memory / after one of each: {max(resident) / resident[num_engines - 1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="as many as engines or more")
    parser.add_argument("--memory", default="700m")
    parser.add_argument("--kv-cache-memory", default="200m")
    arguments = parser.parse_args()
    limits = ["--memory", arguments.memory, "--kv-cache-memory", arguments.kv_cache_memory]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "engines"
        folder.mkdir()
        for number in range(arguments.engines):
            (folder / f"engine-{number}.engine").symlink_to(arguments.engine.resolve())
        for mapping in ("--mmap", "--no-mmap"):
            print(f"== {mapping}")
            try:
                measure(folder, [*limits, mapping], Path(name) / "server.log", arguments.requests)
            except NotMeasured as reason:
                raise SystemExit(f"not measured: {reason}") from None


if __name__ == "__main__":
    main()
