"""Opens the checkpoint that a user names: a folder, a GGUF file, or a hub id."""

import difflib
from pathlib import Path

from enginewright.builder.checkpoint.base import Checkpoint
from enginewright.builder.checkpoint.files import cached_repository
from enginewright.builder.checkpoint.folder import PICKLE_SUFFIXES, FolderCheckpoint, refuse_pickle
from enginewright.builder.checkpoint.gguf.file import GgufCheckpoint
from enginewright.builder.checkpoint.hub import CheckConfig, download, parse_hub_id
from enginewright.errors import UsageError

FORMS = "Name a checkpoint's folder, a GGUF file, or a hub id (owner/name, or owner/name@revision)."


def open_checkpoint(
    ref: str, *, only_cached: bool = False, check_config: CheckConfig | None = None, name: str | None = None
) -> Checkpoint:
    """Opens a checkpoint; reads its headers, not its weights.

    Args:
        ref: path of a folder with safetensors files, of a GGUF file or of a folder with one, or a hub id.
        only_cached: True uses only earlier downloads of the hub.
        check_config: called with a hub model's config before its weights are downloaded (models.check_config).
        name: name of the checkpoint; None is the last part of its path or id.

    Raises:
        UsageError: there is nothing of that name; the message has what was tried, and a similar name if there is one.
        UnsupportedModelError: the checkpoint has a form that cannot be read, such as pickled weights.
        EngineError: it is damaged, incomplete, or the hub cannot be reached.
    """
    try:
        path = Path(ref).expanduser()
        if path.is_dir():
            return open_folder(path, name)
        if path.is_file():
            return _open_file(path, name)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        raise UsageError(f"{ref} cannot be read", str(error)) from error
    hub_id = None if path.suffix.lower() == ".gguf" else parse_hub_id(ref)
    if hub_id is None:
        raise UsageError(
            f"there is no checkpoint {ref}", "no such folder or file, and not a hub id", _did_you_mean(path) or FORMS
        )
    snapshot = download(hub_id, hint=_did_you_mean(path), only_cached=only_cached, check_config=check_config)
    return open_folder(snapshot.path, name or hub_id.name, snapshot.root)


def open_folder(path: Path, name: str | None = None, root: Path | None = None) -> Checkpoint:
    """Opens a folder of safetensors files, or one whose only weights are a GGUF file.

    Args:
        path: the folder.
        name: name of the checkpoint; None is the folder's.
        root: as in `SourceFolder`.
    """
    root = root or cached_repository(path)
    ggufs = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if ggufs and not any(path.glob("*.safetensors")):
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs)
            raise UsageError(f"{path} holds {len(ggufs)} GGUF files", names, "Name the one to read.")
        return GgufCheckpoint(ggufs[0], name, folder_root=root or path)
    return FolderCheckpoint(path, name, root)


def _open_file(path: Path, name: str | None) -> Checkpoint:
    if path.suffix.lower() == ".gguf":
        return GgufCheckpoint(path, name)
    if path.suffix in PICKLE_SUFFIXES:
        raise refuse_pickle(path.name, path.parent)
    fix = f"Name the folder: {path.parent}" if path.suffix in (".safetensors", ".json") else FORMS
    raise UsageError(f"{path} is not a checkpoint", "it is a file, and not a GGUF file", fix)


def _did_you_mean(path: Path) -> str:
    """Suggests the existing path most similar to one that does not exist; "" if none is similar."""
    try:
        candidates = [
            entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix.lower() == ".gguf"
        ]
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, candidates, n=1, cutoff=0.7)
    return f"Did you mean {path.parent / near[0]}?" if near else ""
