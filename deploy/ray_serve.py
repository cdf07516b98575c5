"""A server of engines in Ray Serve, from Python: `python deploy/ray_serve.py smollm2.engine`.

`serve run enginewright.ray.app:build engines=smollm2.engine replicas=2` does the same from the command line, and
docs/ray.md has a config file for `serve deploy`.
"""

import argparse
import os

from ray import serve

from enginewright.ray.app import build


def main() -> None:
    """Runs one to four replicas, as many as the engines' queues need, until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("engines", nargs="+", help="engine files, or folders of them")
    parser.add_argument("--host", default="127.0.0.1", help="address of Ray's HTTP proxies")
    parser.add_argument("--port", type=int, default=8000, help="port of Ray's HTTP proxies")
    options = parser.parse_args()
    arguments = {
        "engines": options.engines,
        "replicas": 1,
        "max_replicas": 4,
        "cpus": 1,
        "api_keys": os.environ.get("ENGINEWRIGHT_API_KEY", "").split(),
    }
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(build(arguments), blocking=True)


if __name__ == "__main__":
    main()
