"""A file that appears complete under its final name, or not at all, whatever fails and whenever the process dies.

Where the system can (O_TMPFILE), the file has no name while it is written, so that even SIGKILL leaves nothing.
Elsewhere it has a hidden name next to the final one, `.NAME.PID-RANDOM.building`, which its writer keeps locked; the
next build of the same target removes hidden files whose lock nobody holds.

A link with a name cannot replace a file. So a build over an existing file links the finished, synced file under a
hidden name and renames that; only a process killed between these two calls leaves something on the disk (a hidden,
complete file, until the next build). The old file stays linked until the rename is known to be durable.

Where the name is a symbolic link, the file that it leads to is made or replaced. A file that replaces another one has
its mode, and its owner where the system allows that.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_STEM_BYTES = 200  # of the final name, in a hidden name; file systems stop at 255
_ATTEMPTS = 8


class NewFile:
    """A file that is being written, and replaces the one of its name by `publish`.

    Methods raise OSError where the system does; after `discard` the folder is as it was before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = Path(os.path.realpath(path))
        self.size = 0  # bytes that are written, from the start to the end of the file
        self._fd = -1
        self._hidden: str | None = None  # temporary name of the file, if it has one
        self._leftovers: list[str] = []  # names to remove, whatever happens
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            earlier = self._earlier()
            self._remove_abandoned()
            self._open(0o666 if earlier is None else stat.S_IMODE(earlier.st_mode))
            if earlier is not None:
                _keep_mode_and_owner(self._fd, earlier)
        except BaseException:
            self.discard()
            raise

    @property
    def temporary_path(self) -> Path:
        """Path of the unfinished file, readable from this process and others of the same user."""
        if self._hidden is not None:
            return self.path.parent / self._hidden
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def free_bytes(self) -> int | None:
        """Returns the bytes that can still be written; None if the file system does not say."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Writes bytes at an offset.

        Args:
            data: bytes; a memoryview must have format "B".
            offset: position in the file, in bytes.
        """
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            offset += count
            view = view[count:]
        self.size = max(self.size, offset)

    def publish(self) -> None:
        """Gives the file its final name, durably. On any failure an earlier file of that name is still there."""
        os.fsync(self._fd)
        restore: str | None = None  # the name that holds the earlier file
        existed = True
        if self._hidden is None:
            existed = not self._link_unnamed(self.path.name)
            if existed:
                hidden = self._new_name("building")
                self._leftovers.append(hidden)
                if not self._link_unnamed(hidden):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), hidden)
                self._hidden = hidden
        if self._hidden is not None:
            restore, existed = self._keep_earlier()
            os.replace(self._hidden, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        try:
            os.fsync(self._folder)
        except BaseException:
            if restore is not None:
                os.replace(restore, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            elif not existed:
                os.unlink(self.path.name, dir_fd=self._folder)
            raise
        self._close()

    def discard(self) -> None:
        """Removes what is not published, and closes the file. Never fails."""
        self._close()

    def _earlier(self) -> os.stat_result | None:
        """Finds the file that is to be replaced. Raises FileExistsError if it is no regular file."""
        try:
            earlier = os.stat(self.path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(earlier.st_mode):
            raise FileExistsError(errno.EEXIST, "it is there, and is no file", str(self.path))
        return earlier

    def _open(self, mode: int) -> None:
        if hasattr(os, "O_TMPFILE") and self._open_unnamed(mode):  # Linux alone has it
            return
        for _ in range(_ATTEMPTS):
            self._hidden = self._new_name("building")
            self._leftovers.append(self._hidden)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._hidden, flags, mode, dir_fd=self._folder)
            if _lock(self._fd) is not False and os.fstat(self._fd).st_nlink:
                return
            os.close(self._fd)  # another build removed it as abandoned before it was locked
            self._fd = -1
        raise FileExistsError(errno.EEXIST, "another build keeps removing the temporary file", str(self.path))

    def _open_unnamed(self, mode: int) -> bool:
        try:
            self._fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=self._folder)
        except OSError as error:
            if error.errno in _NO_TMPFILE:
                return False
            raise
        _lock(self._fd)  # holds while the file has a hidden name
        if os.path.exists(f"/proc/self/fd/{self._fd}"):  # the path that a link is made from
            return True
        os.close(self._fd)
        self._fd = -1
        return False

    def _link_unnamed(self, name: str) -> bool:
        """Links the file under a name; returns False if there is a file of that name."""
        try:
            # With a folder descriptor this is linkat(AT_SYMLINK_FOLLOW), without one it would link the symlink.
            os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=self._folder, follow_symlinks=True)
        except FileExistsError:
            return False
        return True

    def _keep_earlier(self) -> tuple[str | None, bool]:
        """Links the file that is about to be replaced under a second name; returns it, and if the file exists."""
        previous = self._new_name("previous")
        self._leftovers.append(previous)
        try:
            os.link(self.path.name, previous, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None, False
        except OSError as error:
            if error.errno in _NO_LINKS:
                return None, True
            raise
        return previous, True

    def _new_name(self, role: str) -> str:
        return f"{self._prefix()}{os.getpid()}-{secrets.token_hex(4)}.{role}"

    def _prefix(self) -> str:
        return f".{os.fsdecode(os.fsencode(self.path.name)[:_STEM_BYTES])}."

    def _remove_abandoned(self) -> None:
        """Removes hidden files of dead builds of this target: those that are not locked."""
        pattern = re.compile(re.escape(self._prefix()) + r"[0-9]+-[0-9a-f]{8}\.(building|previous)")
        for name in filter(pattern.fullmatch, os.listdir(self._folder)):
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(name, flags, dir_fd=self._folder)
                try:
                    if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd):
                        os.unlink(name, dir_fd=self._folder)
                finally:
                    os.close(fd)

    def _close(self) -> None:
        for name in self._leftovers:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
        self._leftovers.clear()
        for fd in (self._fd, self._folder):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fd = self._folder = -1


def _lock(fd: int) -> bool | None:
    """Locks a file; returns if that succeeded, or None where files cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def replace_file(finished: Path, path: Path) -> None:
    """Renames a finished file to `path`, or to the target of that link, on the same file system.

    Args:
        finished: the new file.
        path: the name to give it; mode and owner of an earlier file of that name are kept.

    Raises:
        OSError: the system refuses.
    """
    target = Path(os.path.realpath(path))
    with finished.open("rb") as file:
        if target.exists():
            _keep_mode_and_owner(file.fileno(), target.stat())
        os.fsync(file.fileno())
    os.replace(finished, target)


def _keep_mode_and_owner(fd: int, earlier: os.stat_result) -> None:
    """Gives an open file the mode of the one that it replaces, and its owner where the system allows that."""
    made = os.fstat(fd)
    # some sandboxes end a process for a needless chown
    if (made.st_uid, made.st_gid) != (earlier.st_uid, earlier.st_gid):
        for owner, group in ((-1, earlier.st_gid), (earlier.st_uid, -1)):
            with contextlib.suppress(PermissionError):
                os.fchown(fd, owner, group)
    os.fchmod(fd, stat.S_IMODE(earlier.st_mode))
