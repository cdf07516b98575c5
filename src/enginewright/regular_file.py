"""Opens files that somebody else made, for reading: regular files only, without waiting, and with a limit of bytes.

Where a file is expected there may be a FIFO, which would hang the program, a socket, a device, or a sparse file that is
larger than the memory.
"""

import errno
import os
import stat
from pathlib import Path

SMALL_FILE_BYTES = 4 << 20  # limit of files that people write by hand: keys, certificates, recipes


def open_regular(path: str | Path, *, follow_links: bool = True) -> int:
    """Opens a regular file for reading.

    Args:
        path: the file.
        follow_links: False refuses a link as the last part of the path.

    Returns:
        A descriptor.

    Raises:
        OSError: it cannot be opened, or is a folder, a FIFO, a socket or a device.
    """
    links = 0 if follow_links else os.O_NOFOLLOW
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | links)
    except OSError as error:
        raise _irregular(path) if error.errno == errno.ENXIO else error from None  # ENXIO: a socket
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path)) if stat.S_ISDIR(mode) else _irregular(path)


def read_regular(path: str | Path, limit_bytes: int, *, follow_links: bool = True) -> bytes:
    """Reads all bytes of a regular file.

    Args:
        path: the file.
        limit_bytes: bytes that the file may have.
        follow_links: False refuses a link as the last part of the path.

    Raises:
        OSError: as `open_regular`, or the file has more than limit_bytes.
    """
    with open(open_regular(path, follow_links=follow_links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # one byte more shows that the file has grown meanwhile
        data = file.read(size + 1) if size <= limit_bytes else b""
    if size > limit_bytes or len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes:,} bytes", str(path))
    return data


def _irregular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
