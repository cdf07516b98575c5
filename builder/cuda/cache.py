"""Cache of compiled kernels: a file for each kernel and architecture, named after a hash of all inputs."""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from enginewright.builder.cuda.kernel import Compiled
from enginewright.regular_file import read_regular

ENTRY_LIMIT_BYTES = 64 << 20  # bytes of an entry
_DIGEST_BYTES = hashlib.sha256().digest_size
_DECODER = msgspec.msgpack.Decoder(Compiled)


class CompileCache:
    """A folder of entries; any number of processes may use it at once. Without a disk it is empty, and raises no error.

    An entry is a SHA-256, then the bytes that it is the hash of: a `Compiled` as MessagePack.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> Compiled | None:
        """Returns an entry; None if it is missing or damaged."""
        try:
            data = read_regular(self._path(key), ENTRY_LIMIT_BYTES)
        except OSError:
            return None
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return _DECODER.decode(payload) if hashlib.sha256(payload).digest() == digest else None

    def put(self, key: str, compiled: Compiled) -> None:
        """Stores an entry; a disk that cannot be written is ignored.

        Args:
            key: hash of the inputs.
            compiled: the kernel.
        """
        payload, path = msgspec.msgpack.encode(compiled), self._path(key)
        unfinished = path.with_name(f".{key}.{os.getpid()}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(hashlib.sha256(payload).digest() + payload)
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key
