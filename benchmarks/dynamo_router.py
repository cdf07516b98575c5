"""Prompt tokens that Dynamo's workers compute with its KV router, compared with round robin.

Conversations of ten turns go through Dynamo's frontend to two workers of ours, each turn with all that was said before.
All conversations have a turn, in random order, before any has the next. The KV router learns from the workers' KV
events what they have cached. The workers' own counters say how many prompt tokens were not in their prefix caches.
Everything is started again for each case. `make test-long` installs Dynamo.

    PYTHONPATH=. python benchmarks/dynamo_router.py ENGINE --conversations 200
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.dynamo import computed_prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--kv-cache-memory", default="1g", help="of each worker")
    arguments = parser.parse_args()
    totals = []
    for mode in ("round-robin", "kv"):
        with TemporaryDirectory() as folder:
            counts = computed_prompt_tokens(
                Path(folder),
                mode,
                arguments.engine,
                arguments.conversations,
                *("--kv-cache-memory", arguments.kv_cache_memory),
                clients=arguments.clients,
            )
        totals.append(sum(counts))
        print(f"{mode:<12} {totals[-1]:>9} prompt tokens computed (by worker: {counts})", flush=True)
    print(f"the KV router computes {totals[1] / totals[0]:.2f} of the prompt tokens that round robin computes")


if __name__ == "__main__":
    main()
