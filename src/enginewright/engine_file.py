"""The engine file: a safetensors file of sections, written in one stream and read with every bound checked.

    u64 N | JSON header, space-padded to N bytes | sections, each 64-byte aligned and zero-padded to 64 bytes

docs/engine-file.md specifies the format. Whatever the bytes, reading raises only EngineError.
"""

import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType

from enginewright.checkpoint_ref import no_such_file, refuse_checkpoint
from enginewright.engine_header import ALIGN, REBUILD, EngineHeader, encode_header, header_end, padded, parse_header
from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.manifest import WEIGHTS, About, Manifest, SectionForm, check_form
from enginewright.new_file import NewFile
from enginewright.regular_file import open_regular

HEADER_BASE_BYTES = 16 << 10  # bytes; for the manifest without its sections
HEADER_SECTION_BYTES = 640  # bytes; for a section in header and manifest, with a name of 100 characters
PIECE_BYTES = 1 << 20  # bytes that are read and hashed in one piece
_BUILD_IT = "Make an engine of it with `engine build`."
_REPLACE = (
    "Start again, with a whole engine. Replace an engine that is in use by a new file that is renamed over it, "
    "or run it with --no-mmap, which reads it once."
)

BytesLike = bytes | bytearray | memoryview


class EngineFile:
    """An engine, open for reading; it closes at the end of `with`, or by `close`. Threads may share it."""

    def __init__(self, path: Path, fd: int, header: EngineHeader, status: os.stat_result) -> None:
        self.path = path
        self.manifest = header.manifest
        self.manifest_hash = header.manifest_hash
        self.offsets = header.offsets
        self.file_bytes = status.st_size
        self._modified_ns = status.st_mtime_ns
        self._fd = fd
        self._map = mmap.mmap(fd, self.file_bytes, access=mmap.ACCESS_READ)

    @classmethod
    def open(cls, path: str | Path, *, check_sections: bool = True, adapters: bool = False) -> "EngineFile":
        """Opens an engine, and checks its header and the hashes of all sections but weights (see `verify_sections`).

        Args:
            path: the engine file.
            check_sections: False checks the header alone.
            adapters: True opens adapters as well, whose files have the same form.

        Raises:
            UsageError: there is no such file, or it is a checkpoint (a folder, a GGUF file, or a hub id) or an adapter.
            CorruptEngineError: the file is cut short, altered, or not an engine, or it is a FIFO or the like.
            EngineError: it cannot be read, or a newer release wrote it.
        """
        refuse_checkpoint(path)
        path = Path(path)
        with _failing(f"{path} cannot be opened"):
            try:
                fd = open_regular(path)
            except IsADirectoryError:
                why = "this is a folder, not an engine"
                raise CorruptEngineError(f"{path} cannot be read", why, _BUILD_IT) from None
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise no_such_file(path) from None
                if error.errno == errno.EINVAL:
                    raise CorruptEngineError(f"{path} cannot be read", "it is not a file", _BUILD_IT) from None
                raise
        try:
            with _failing(f"{path} cannot be read"):
                status = os.fstat(fd)
                end = header_end(os.pread(fd, 8, 0), status.st_size, str(path))
                header = parse_header(b"".join(_pieces(fd, path, 0, end)), status.st_size, str(path))
                engine = cls(path, fd, header, status)
        except BaseException:
            os.close(fd)
            raise
        try:
            if engine.manifest.engine is not None and not adapters:
                why = f"it is for the engine with the content {engine.manifest.engine}"
                fix = "Name its engine, and this file with --lora-modules."
                raise UsageError(f"{path} is an adapter, not an engine", why, fix)
            if check_sections:
                damaged = engine.verify_sections(name for name in engine.sections if not name.startswith(WEIGHTS))
                if damaged:
                    raise CorruptEngineError(f"{path} is damaged", f"section {', '.join(damaged)}", REBUILD)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def sections(self) -> Mapping[str, SectionForm]:
        """Name → form of each section."""
        return self.manifest.sections

    def section(self, name: str) -> memoryview:
        """Returns a read-only view of a section in the mapping; valid as long as the view exists.

        If somebody truncates the file afterwards, reading the view raises SIGBUS: `read_section` copies instead, and
        checks the hash.
        """
        form, start = self._find(name)
        return memoryview(self._map)[start : start + form.nbytes]

    @property
    def mapping(self) -> memoryview:
        """View of the whole mapped file."""
        return memoryview(self._map)

    def check_unchanged(self) -> None:
        """Checks that nobody has written to the file since it was opened; takes about a microsecond.

        The open file counts, not its path: a new file that is renamed over it, or its deletion, does it no harm. A
        write changes the time of modification before it changes a byte, so whatever was read between opening the file
        and this call is what was built.

        Raises:
            CorruptEngineError: the file was written to, cut short or extended.
            EngineError: it is closed, or its file system has gone.
        """
        try:
            status = os.fstat(self._fd)
        except OSError as error:
            why = "it is closed" if self._fd < 0 else str(error.strerror)
            raise EngineError(f"{self.path} cannot be read any more", why) from error
        if status.st_size != self.file_bytes:
            changed = "cut short" if status.st_size < self.file_bytes else "extended"
            why = f"it was {changed} from {self.file_bytes:,} to {status.st_size:,} bytes"
        elif status.st_mtime_ns != self._modified_ns:
            time = datetime.fromtimestamp(status.st_mtime).astimezone().isoformat(" ", "seconds")
            why = f"it was written to; it was last modified at {time}"
        else:
            return
        raise CorruptEngineError(f"{self.path} was changed while it is in use", why, _REPLACE)

    def read_section(self, name: str) -> bytes:
        """Returns a copy of a section's bytes, read without the mapping and checked against their hash.

        Raises:
            CorruptEngineError: the bytes are damaged, or there is no such section.
        """
        form, start = self._find(name)
        data = b"".join(_pieces(self._fd, self.path, start, form.nbytes))
        if hashlib.sha256(data).hexdigest() != form.sha256:
            raise CorruptEngineError(f"{self.path} is damaged", f"section {name}", REBUILD)
        return data

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        """Fills a buffer with bytes of a section, read without the mapping.

        Args:
            name: the section.
            begin: first byte to read, counted from the section's start.
            buffer: memory to fill.

        Raises:
            CorruptEngineError: there is no such section, or it is too short.
        """
        form, start = self._find(name)
        filled, view = 0, memoryview(buffer).cast("B")
        while filled < len(view):
            with _failing(f"{self.path} cannot be read"):
                count = os.preadv(self._fd, [view[filled:]], start + begin + filled)
            if count == 0 or begin + len(view) > form.nbytes:
                raise CorruptEngineError(f"{self.path} is cut short", f"section {name}", REBUILD)
            filled += count

    def verify_sections(
        self, names: Iterable[str] | None = None, progress: Callable[[int], None] | None = None
    ) -> list[str]:
        """Hashes sections and compares.

        Args:
            names: the sections; None is all.
            progress: called with the number of bytes that were just hashed.

        Returns:
            Names of damaged sections, in the order of `names` or of the file.
        """
        in_file_order = sorted(self.sections, key=lambda name: (self.offsets[name], self.sections[name].nbytes))
        return [name for name in (in_file_order if names is None else names) if not self._intact(name, progress)]

    def close(self) -> None:
        """Closes the file. Views of sections stay valid: the last one releases the mapping."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            del self._map  # closes it, unless a view still uses it

    def __enter__(self) -> "EngineFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[SectionForm, int]:
        if name not in self.sections:
            raise CorruptEngineError(f"{self.path} is incomplete", f"it has no section {name!r}", REBUILD)
        return self.sections[name], self.offsets[name]

    def _intact(self, name: str, progress: Callable[[int], None] | None) -> bool:
        form, start = self._find(name)
        digest, filling = hashlib.sha256(), padded(form.nbytes) - form.nbytes
        for piece in _pieces(self._fd, self.path, start, form.nbytes):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
        zeros = b"".join(_pieces(self._fd, self.path, start + form.nbytes, filling))
        return digest.hexdigest() == form.sha256 and zeros == bytes(filling)


def _pieces(fd: int, path: Path, start: int, nbytes: int) -> Iterator[bytes]:
    """Reads up to `nbytes` bytes of a file from `start` on, in pieces; fewer where the file ends."""
    end = start + nbytes
    while start < end:
        with _failing(f"{path} cannot be read"):
            piece = os.pread(fd, min(end - start, PIECE_BYTES), start)
        if not piece:
            return
        start += len(piece)
        yield piece


@contextlib.contextmanager
def _failing(what: str, fix: str = "") -> Iterator[None]:
    """Turns the system's errors into EngineError; mmap raises ValueError for a file that has become shorter."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise EngineError(what, why or str(error), fix) from error


def header_bytes(sections: int) -> int:
    """Computes the bytes that a writer reserves for the header of a file with this number of sections."""
    return padded(HEADER_BASE_BYTES + HEADER_SECTION_BYTES * sections)


class EngineWriter:
    """Writes an engine, which appears under its name complete, by `commit`, or not at all.

    with EngineWriter(path, expected_sections=300) as writer:
        writer.add("weights/…", chunks, dtype="bf16", shape=(576, 192), layout="r16")
        writer.write_header(about)  # from here on `temporary_path` is a readable engine
        writer.add("goldens", goldens, evidence=True)
        writer.commit(about)

    The file's bytes depend on the calls alone. A failure of the system raises EngineError. After any exception inside
    `add`, `write_header` or `commit`, and at the end of `with`, nothing uncommitted is left on the disk.

    Args:
        path: name of the finished file.
        expected_sections: number of sections for which the header has space; a few more do no harm.
        total_bytes: bytes of all sections, if known: a disk without that space is refused at once.
    """

    def __init__(self, path: str | Path, expected_sections: int, total_bytes: int | None = None) -> None:
        self.path = Path(path)
        self._data_start = header_bytes(expected_sections)
        self._total_bytes = None if total_bytes is None else total_bytes + ALIGN * expected_sections
        self._forms: dict[str, SectionForm] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._file: NewFile | None = None

    def __enter__(self) -> "EngineWriter":
        with self._all_or_nothing(), self._writing():
            if self.path.is_dir():
                raise UsageError(f"{self.path} cannot be written", "it is a folder", "Name a file with --output.")
            self._file = NewFile(self.path)
            free = self._file.free_bytes()
            if self._total_bytes is not None and free is not None and free < self._data_start + self._total_bytes:
                needed = f"it takes {self._data_start + self._total_bytes:,} bytes, {free:,} are free"
                raise EngineError(f"the disk has no space for {self.path}", needed, "Make room, or name another disk.")
            self._file.write(b" ", self._data_start - 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None

    @property
    def temporary_path(self) -> Path:
        """The unfinished file, readable as an engine between `write_header` and the next `add`."""
        return self._open_file.temporary_path

    @property
    def _open_file(self) -> NewFile:
        if self._file is None:
            raise EngineError(f"{self.path} cannot be written", "its writer is closed")
        return self._file

    def add(
        self,
        name: str,
        chunks: BytesLike | Iterable[BytesLike],
        *,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
        layout: str | None = None,
        evidence: bool = False,
    ) -> SectionForm:
        """Appends a section.

        Args:
            name: name of the section.
            chunks: C-contiguous buffers, written and hashed one after another.
            dtype: number type of a weight; None for plain bytes, as for `shape` and `layout`.
            shape: shape of a weight.
            layout: layout of a weight (csrc/cpu/kernel.h).
            evidence: True if the bytes were measured by the build, and so are no part of the content.

        Returns:
            The form of the section, as the manifest has it.
        """
        file, start, digest = self._open_file, padded(self._open_file.size), hashlib.sha256()
        end = start
        with self._all_or_nothing():
            if name in self._forms:
                raise EngineError(f"section {name!r} cannot be written", "a section of that name exists")
            for chunk in (chunks,) if isinstance(chunks, BytesLike) else chunks:
                view = memoryview(chunk)
                if view.nbytes:
                    view = view.cast("B")
                    with self._writing():
                        file.write(view, end)
                    digest.update(view)
                    end += view.nbytes
            with self._writing():
                file.write(bytes(padded(end) - end), end)
            form = SectionForm(end - start, digest.hexdigest(), dtype, shape, layout, evidence)
            try:
                check_form(name, form)
            except ValueError as error:
                raise EngineError("a section cannot be written", str(error)) from error
        self._forms[name] = form
        self._places[name] = (start - self._data_start, padded(end) - self._data_start)
        return form

    def write_header(self, about: About) -> Manifest:
        """Writes a header for the sections so far: the temporary file is now a complete engine. More may follow."""
        with self._all_or_nothing():
            try:
                manifest = Manifest.of(about, self._forms)
                header = encode_header(manifest.to_json(), self._places)
            except (ValueError, OverflowError, RecursionError, TypeError) as error:
                raise EngineError(f"the manifest of {self.path} cannot be written", str(error)) from error
            reserved = self._data_start - 8
            if len(header) > reserved:
                why = f"{len(self._forms)} sections take {len(header)} bytes of the {reserved} reserved"
                raise EngineError(f"the header of {self.path} cannot be written", why)
            with self._writing():
                self._open_file.write(reserved.to_bytes(8, "little") + header.ljust(reserved), 0)
        return manifest

    def commit(self, about: About) -> Manifest:
        """Writes the header and gives the file its name, durably: from here on it survives a power cut."""
        manifest = self.write_header(about)
        with self._all_or_nothing(), self._writing():
            self._open_file.publish()
        self._file = None
        return manifest

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        fix = "Nothing is left of it: make room, or name another place with --output, and build again."
        return _failing(f"{self.path} cannot be written", fix)
