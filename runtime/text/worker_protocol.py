"""What a process and its workers agree on: limits, and frames of JSON on a pipe.

A frame is four bytes of length, the least significant first, and so many bytes of JSON.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

HEAD = struct.Struct("<I")
# For a frame. A long conversation takes a hundredth of it, so that a busy machine refuses nobody.
MAX_CPU_SECONDS = 1.0
MAX_SECONDS = 60.0
MAX_MEMORY_BYTES = 512 << 20  # of addresses, Python's own 50 MB among them


def read_frames(stream: IO[bytes]) -> Iterator[Any]:
    """Frames until the stream ends."""
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        (length,) = HEAD.unpack(head)
        yield json.loads(stream.read(length))


def framed(data: bytes) -> bytes:
    """JSON as a frame."""
    return HEAD.pack(len(data)) + data


def to_frame(value: Any) -> bytes:
    """Raises TypeError, ValueError or RecursionError for what JSON does not hold."""
    return framed(json.dumps(value).encode())


def serve(answer: Callable[[Any], dict[str, str]]) -> None:
    """What a worker does: answer the frames of stdin, each within the limits; the kernel ends it beyond those of time,
    wherever it is.
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
