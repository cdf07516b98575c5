"""A head in a folder of its own: what is trained to guess for a model of another folder. It has no tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.builder.checkpoint.files import SourceFolder
from enginewright.builder.checkpoint.folder import CONFIG, TensorFolder, head_role


class HeadFolder(TensorFolder):
    """Its config.json and its tensors.

    Attributes:
        role: what kind of head it is, among ROLES of the manifest.
    """

    def __init__(self, files: SourceFolder, name: str | None, config: Mapping[str, Any], role: str) -> None:
        super().__init__(files, name)
        self.config, self.role = config, role


def find_head(path: Path, name: str | None = None) -> HeadFolder | None:
    """The head of a folder; None where it holds none, or is none.

    Args:
        name: what it is called; None is the folder's name.

    Raises:
        EngineError: it is damaged, or cannot be read.
        UnsupportedModelError: its tensors are pickles, or its config is of several kinds of heads.
    """
    try:
        path = path.expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # why, is said where it is opened as a checkpoint
        return None
    files = SourceFolder(path)
    if not is_folder or files.find(CONFIG) is None:
        return None
    config = files.read_json(CONFIG)
    role = head_role(config)
    return None if role is None else HeadFolder(files, name, config, role)
