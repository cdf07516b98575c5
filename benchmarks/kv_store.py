"""Time to the first token after a prefix that another server has computed, and left in a store that servers share.

    PYTHONPATH=. python benchmarks/kv_store.py [MODEL] [--tokens 1000] [--rounds 5] [--quant int8-wo] [--models FOLDER]

MODEL is a checkpoint, or the name of a model of protocol/models.py such as llama-1b, which is written to --models. In
each round and for each store, an engine computes a random prefix and a question, and ends. Then another one starts,
answers a prompt of which nothing is known, so that first steps are not measured, and gets the prefix with another
question.

    cold   the first engine: the prefix is computed, after a search in vain
    s3     the second engine, from rclone's S3 server on this machine (`make .cache/object_store/installed.stamp`)
    peer   the second engine, from the memory of another server on this machine

Prints medians, and the ratios within rounds with their range.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prefix_ttft import first_token_s, report, tokens
from protocol.models import KINDS, SMOLLM2, model
from protocol.server import Server

from enginewright import LLM
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.device.machine import num_cores
from tests.helpers.object_store import KEY, PROGRAM, object_store
from tests.helpers.serving import free_port

SHARED = "8g"  # memory of the server that keeps blocks for others


@contextmanager
def stores(engine: Path, secret: Path, folder: Path, program: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Runs the stores, and gives the limits of an engine that uses each."""
    with ExitStack() as running:
        bucket, port = running.enter_context(object_store(folder / "objects", program)), free_port()
        options = ["--kv-cache-share", SHARED, "--kv-cache-listen", f"127.0.0.1:{port}"]
        options += ["--kv-secret-file", str(secret), "--threads", "1", "--kv-cache-memory", "256m"]
        peer = Server(engine, options, folder / "log")
        running.callback(peer.close)
        yield {
            name: {"kv_cache_remote": url, "kv_secret_file": str(secret)}
            for name, url in (("s3", bucket.url), ("peer", f"tcp://127.0.0.1:{port}"))
        }


@contextmanager
def opened(engine: Path, arguments: argparse.Namespace, limits: dict[str, Any]) -> Iterator[LLM]:
    """An engine, after a prompt of which nothing is measured."""
    with LLM(engine, threads=arguments.threads, **limits) as llm:
        first_token_s(llm, tokens(llm, arguments.tokens), is_cached=False)
        yield llm


def measure(engine: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of each case by round; the first engine's by store."""
    secret = folder / "secret"
    secret.write_text("s" * 32)
    times: dict[str, list[float]] = {}
    with stores(engine, secret, folder, arguments.rclone) as found:
        for number in range(arguments.rounds):
            for name, limits in found.items():
                with opened(engine, arguments, limits) as llm:
                    prefix = tokens(llm, arguments.tokens)
                    cold = first_token_s(llm, prefix, is_cached=False)
                with opened(engine, arguments, limits) as llm:
                    times.setdefault(name, []).append(first_token_s(llm, prefix, is_cached=True))
                    remote = llm.stats().remote
                    assert remote is not None
                times.setdefault(f"cold, {name}", []).append(cold)
                line = f"round {number + 1} {name:5} {cold:6.2f} s cold, {times[name][-1]:6.3f} s from the store, "
                print(f"{line}{remote.num_received_bytes / 1e6:.1f} MB read", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SMOLLM2), help=f"a checkpoint, or one of {', '.join(KINDS)}")
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--tokens", type=int, default=1000, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--models", type=Path, default=Path(".cache/bench/models"), help="where models are written")
    parser.add_argument("--rclone", type=Path, default=PROGRAM, help="the program of the S3 server")
    arguments = parser.parse_args()
    os.environ.update(KEY)
    source = arguments.model
    if source in KINDS:
        arguments.models.mkdir(parents=True, exist_ok=True)
        source = str(model(source, arguments.models, SMOLLM2).folder)
    with tempfile.TemporaryDirectory() as place:
        engine = Path(place) / "one.engine"
        build_engine(open_checkpoint(source), BuildConfig(quant=quant_config(arguments.quant), gate=None), engine)
        prefix = f"a prefix of {arguments.tokens} tokens"
        print(f"{arguments.model}, {arguments.quant}, {prefix}, {arguments.threads} threads")
        times = measure(engine, arguments, Path(place))
    for name in ("s3", "peer"):
        report({"cold": times[f"cold, {name}"], name: times[name]})


if __name__ == "__main__":
    main()
