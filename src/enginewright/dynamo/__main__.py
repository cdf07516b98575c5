"""Entry of `python -m enginewright.dynamo`."""

import sys

from enginewright.errors import EngineError


def main() -> None:
    """Runs a worker until SIGTERM or SIGINT."""
    try:
        from dynamo.common.backend.run import run

        from enginewright.dynamo.worker import DynamoWorker
    except ImportError as error:
        sys.exit(f"enginewright.dynamo: {error}\ndocs/dynamo.md says how Dynamo is installed.")
    try:
        run(DynamoWorker)
    except EngineError as error:
        print(f"enginewright.dynamo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
