"""What a process and its template worker agree on: limits, and frames of JSON on a pipe.

A frame is four bytes of length, the least significant first, and so many bytes of JSON.
"""

import json
import struct
from collections.abc import Iterator
from typing import IO, Any

HEAD = struct.Struct("<I")
MAX_OUTPUT_CHARS = 16 << 20
# For a conversation. A long one takes a hundredth of it, so that a busy machine refuses nobody.
MAX_CPU_SECONDS = 1.0
MAX_SECONDS = 60.0
MAX_MEMORY_BYTES = 512 << 20  # of addresses, Python's own 50 MB among them


def read_frames(stream: IO[bytes]) -> Iterator[Any]:
    """Frames until the stream ends."""
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        (length,) = HEAD.unpack(head)
        yield json.loads(stream.read(length))


def to_frame(value: Any) -> bytes:
    """Raises TypeError, ValueError or RecursionError for what JSON does not hold."""
    data = json.dumps(value).encode()
    return HEAD.pack(len(data)) + data
