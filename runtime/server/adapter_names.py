"""The adapters that requests of an engine may name."""

from collections.abc import Mapping
from pathlib import Path

SUFFIX = ".lora"  # of adapter files in a folder


class AdapterNames:
    """Files of adapters by name. Everything belongs to the thread of the event loop.

    Args:
        modules: name → adapter file.
        folder: folder whose files NAME.lora are adapters as well, also those that come later; None: there is none.
    """

    def __init__(self, modules: Mapping[str, Path], folder: Path | None = None) -> None:
        self._modules, self._folder = dict(modules), folder

    def find(self, name: str) -> Path | None:
        """Returns the file of an adapter; None if there is none of this name."""
        if name in self._modules or self._folder is None:
            return self._modules.get(name)
        path = self._folder / f"{name}{SUFFIX}"
        is_inside = "/" not in name and "\0" not in name and not name.startswith(".")
        return path if is_inside and path.is_file() else None

    def names(self) -> list[str]:
        """Lists the names of all adapters, sorted."""
        files = () if self._folder is None else self._folder.glob(f"*{SUFFIX}")
        stems = (file.stem for file in files)
        return sorted({*self._modules, *(stem for stem in stems if stem.isprintable() and not stem.startswith("."))})

    def add(self, name: str, path: Path) -> None:
        """Adds an adapter, or replaces the file of this name."""
        self._modules[name] = path

    def remove(self, name: str) -> bool:
        """Removes an adapter that was given by name; False if there is none."""
        return self._modules.pop(name, None) is not None
