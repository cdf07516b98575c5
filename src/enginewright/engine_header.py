"""Encodes and decodes the header of an engine file; every bound is checked before anything is allocated or mapped.

Readers accept exactly the bytes that `encode_header` writes, so that there is one header for one set of sections, and
no byte of it can change unnoticed. Whatever the bytes, only EngineError is raised.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from enginewright.errors import CorruptEngineError, EngineError
from enginewright.manifest import FORMAT_VERSION, Manifest, SectionForm
from enginewright.printable import printable

ALIGN = 64  # bytes; sections start at multiples of this, and are filled up to one
MAX_HEADER_BYTES = 100_000_000  # limit of safetensors readers
MESSAGE_CHARACTERS = 300  # characters of a reason that messages quote
REBUILD = "Copy the file again, or build it again with `engine build`."
_BUILD_IT = "Make an engine of it with `engine build`."
_FOREIGN = {  # first bytes of files that are mistaken for engines → what they are, what to do
    b"GGUF": ("this is a GGUF checkpoint, not an engine", _BUILD_IT),
    b"version ": ("this is a Git LFS pointer, not an engine", "Fetch the file itself with `git lfs pull`."),
    b"PK\x03\x04": ("this is a zip archive (a pickle checkpoint?), not an engine", ""),
}


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Literal["U8"]  # type of the bytes, for safetensors readers
    shape: tuple[int]  # number of bytes
    data_offsets: tuple[int, int]  # [begin, end) in the data


class _Version(msgspec.Struct):
    """The part of a manifest that is common to all versions of the format."""

    format_version: int  # version of the format


_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str])
_TENSOR = msgspec.json.Decoder(_Tensor)
_VERSION = msgspec.json.Decoder(_Version)


@dataclass(frozen=True)
class EngineHeader:
    """A header whose parts agree with each other."""

    manifest: Manifest  # description of the engine
    manifest_hash: str  # SHA-256 of the manifest's text: the engine's identity
    offsets: Mapping[str, int]  # section → its start in the file, in bytes


def padded(nbytes: int) -> int:
    """Rounds a number of bytes up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def encode_header(manifest_text: bytes, offsets: Mapping[str, tuple[int, int]]) -> bytes:
    """Encodes the one header of these sections.

    Args:
        manifest_text: the manifest as JSON.
        offsets: section → [begin, end) in the data, in bytes.
    """
    text, digest = manifest_text.decode(), hashlib.sha256(manifest_text).hexdigest()
    metadata = {"enginewright": text, "enginewright.sha256": digest, "format": "enginewright"}
    tensors = {name: _Tensor("U8", (end - begin,), (begin, end)) for name, (begin, end) in offsets.items()}
    return msgspec.json.encode({"__metadata__": metadata, **tensors}, order="sorted")


def header_end(start: bytes, file_bytes: int, name: str = "the file") -> int:
    """Computes the start of the data, in bytes, from the first eight bytes of a file.

    Args:
        start: first bytes of the file, at least eight.
        file_bytes: length of the file.
        name: name of the file in messages.

    Raises:
        CorruptEngineError: there cannot be a header of that length.
    """
    if file_bytes < 8 or len(start) < 8:
        raise CorruptEngineError(f"{name} is cut short", f"it has {file_bytes} bytes", REBUILD)
    length = int.from_bytes(start[:8], "little")
    if length > min(file_bytes - 8, MAX_HEADER_BYTES):
        for magic, (why, fix) in _FOREIGN.items():
            if start.startswith(magic):
                raise CorruptEngineError(f"{name} cannot be read", why, fix)
        why = f"its header should take {length} bytes, the file has {file_bytes}"
        raise CorruptEngineError(f"{name} is cut short, damaged, or not an engine", why, REBUILD)
    return 8 + length


def parse_header(data: bytes, file_bytes: int, name: str = "the file") -> EngineHeader:
    """Decodes and checks a header.

    Args:
        data: the file's first bytes, which include the whole header.
        file_bytes: length of the file.
        name: name of the file in messages.

    Raises:
        CorruptEngineError: the header is damaged, or belongs to another kind of file.
        EngineError: a newer release wrote the file, or an older one in a format that this one does not read.
    """
    end = header_end(data[:8], file_bytes, name)
    if len(data) < end:
        raise CorruptEngineError(f"{name} is cut short", "its header is incomplete", REBUILD)
    header = data[8:end].rstrip(b" ")
    try:
        entries = _ENTRIES.decode(header)
        metadata = _METADATA.decode(entries.pop("__metadata__", b"{}"))
        if metadata.get("format") != "enginewright" and "enginewright" not in metadata:
            why = "this is a checkpoint (safetensors), not an engine" if entries else "it holds no manifest"
            raise CorruptEngineError(f"{name} cannot be read", why, _BUILD_IT)
        text = metadata.get("enginewright", "")
        version = _VERSION.decode(text).format_version
        if version > FORMAT_VERSION:
            why = f"it has format version {version}, and this release reads {FORMAT_VERSION}"
            raise EngineError(f"{name} was built by a newer release", why, "Upgrade: pip install -U enginewright")
        if 0 < version < FORMAT_VERSION:
            why = f"it has format version {version}, and this release reads {FORMAT_VERSION}"
            raise EngineError(f"{name} was built by an older release", why, "Build it again with `engine build`.")
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get("enginewright.sha256"):
            raise ValueError("the manifest does not match its hash")
        tensors = {section: _TENSOR.decode(entry) for section, entry in entries.items()}
        manifest = Manifest.from_json(text)
        _check_places(tensors, manifest.sections, file_bytes - end)
        places = {section: tensor.data_offsets for section, tensor in tensors.items()}
        if encode_header(text.encode(), places) != header:
            raise ValueError("it is not canonical JSON")
        if end % ALIGN:
            raise ValueError(f"the data starts at {end}, which is no multiple of {ALIGN}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = printable(str(error)[:MESSAGE_CHARACTERS])
        raise CorruptEngineError(f"the header of {name} is damaged", why, REBUILD) from error
    offsets = {section: end + begin for section, (begin, _) in places.items()}
    return EngineHeader(manifest, metadata["enginewright.sha256"], offsets)


def _check_places(tensors: Mapping[str, _Tensor], forms: Mapping[str, SectionForm], data_bytes: int) -> None:
    """Checks that the sections are the manifest's, each of its length, and fill the data without gap or overlap."""
    if tensors.keys() != forms.keys():
        odd = min(tensors.keys() ^ forms.keys())
        raise ValueError(f"section {odd[:80]!r} is not in both header and manifest")
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != position or end - begin != padded(forms[name].nbytes) or tensor.shape != (end - begin,):
            raise ValueError(f"section {name!r} does not have the position or length that it must have")
        position = end
    if position != data_bytes:
        raise ValueError(f"the sections take {position} bytes, the file has {data_bytes} for them")
