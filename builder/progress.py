"""How a build tells people where it is; the command line draws it, other callers may ignore it."""

from typing import Protocol


class Progress(Protocol):
    def phase(self, name: str, total_bytes: int = 0) -> None:
        """A phase begins; total_bytes is 0 where there is nothing to count."""

    def advance(self, nbytes: int) -> None:
        """Bytes done since the last call, within the current phase."""


class Silent:
    def phase(self, name: str, total_bytes: int = 0) -> None:
        del name, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes
