"""How a build tells people where it is; the command line draws it, other callers may ignore it."""

from typing import Protocol


class Progress(Protocol):
    def phase(self, name: str, total: int = 0) -> None:
        """A phase begins.

        Args:
            total: of the work in it, in units of the phase's own (bytes, multiplications); 0 where nothing is counted.
        """

    def advance(self, amount: int) -> None:
        """So much of the phase's work has been done since the last call."""


class Silent:
    def phase(self, name: str, total: int = 0) -> None:
        del name, total

    def advance(self, amount: int) -> None:
        del amount
