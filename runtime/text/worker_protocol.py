"""Protocol between a process and its workers: limits, and frames of JSON on a pipe.

A frame is four bytes of length, the least significant first, and then this number of bytes of JSON.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

HEAD = struct.Struct("<I")
# Seconds for one frame. A long conversation takes a hundredth of them, so a busy machine still renders it in time.
MAX_CPU_SECONDS = 1.0
MAX_SECONDS = 60.0
MAX_MEMORY_BYTES = 512 << 20  # bytes of address space, of which Python itself takes 50 MB


def read_frames(stream: IO[bytes]) -> Iterator[Any]:
    """Yields the values of frames until the stream ends."""
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        (length,) = HEAD.unpack(head)
        yield json.loads(stream.read(length))


def framed(data: bytes) -> bytes:
    """Packs JSON into a frame."""
    return HEAD.pack(len(data)) + data


def to_frame(value: Any) -> bytes:
    """Packs a value into a frame. Raises TypeError, ValueError or RecursionError if JSON cannot represent it."""
    return framed(json.dumps(value).encode())


def serve(answer: Callable[[Any], dict[str, str]]) -> None:
    """Answers the frames of stdin, each within the limits; the kernel ends the process at a time limit, wherever it is.

    Args:
        answer: returns the reply to the value of a frame.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            frame = next(read_frames(sys.stdin.buffer), None)
            if frame is None:
                return
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
            reply = to_frame(answer(frame))
        except MemoryError:
            reply = to_frame({"too_long": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()
