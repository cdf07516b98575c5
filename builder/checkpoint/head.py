"""A head that proposes draft tokens for another folder's model, in a folder of its own. It has no tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.builder.checkpoint.files import SourceFolder
from enginewright.builder.checkpoint.folder import CONFIG, TensorFolder, head_role


class HeadFolder(TensorFolder):
    """The config.json and the tensors of a head.

    Attributes:
        config: content of config.json.
        role: kind of the head, among ROLES of the manifest.
    """

    def __init__(self, files: SourceFolder, name: str | None, config: Mapping[str, Any], role: str) -> None:
        super().__init__(files, name)
        self.config, self.role = config, role


def find_head(path: Path, name: str | None = None) -> HeadFolder | None:
    """Opens the head in a folder; None if it holds none, or is not a folder.

    Args:
        path: the folder.
        name: name of the head; None is the folder's name.

    Raises:
        EngineError: it is damaged, or cannot be read.
        UnsupportedModelError: its tensors are pickles, or its config has signs of several kinds of heads.
    """
    try:
        path = path.expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # opening it as a checkpoint gives the reason
        return None
    files = SourceFolder(path)
    if not is_folder or files.find(CONFIG) is None:
        return None
    config = files.read_json(CONFIG)
    role = head_role(config)
    return None if role is None else HeadFolder(files, name, config, role)
