"""A worker that is killed at each frame, as if from outside."""

import os
import signal
from typing import Any, NoReturn

from enginewright.runtime.text.worker_protocol import serve


def answer(frame: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


if __name__ == "__main__":
    serve(answer)
