"""Progress of a build; the command line displays it, other callers may ignore it."""

from typing import Protocol


class Progress(Protocol):
    """A receiver of a build's progress."""

    def phase(self, name: str, total: int = 0) -> None:
        """Starts a phase.

        Args:
            name: name of the phase.
            total: work in it, in units of its own (bytes, multiplications); 0 where nothing is counted.
        """

    def advance(self, amount: int) -> None:
        """Adds the work of the phase that was done since the last call."""


class Silent:
    """A receiver that ignores progress."""

    def phase(self, name: str, total: int = 0) -> None:
        """Ignores the start of a phase.

        Args:
            name: name of the phase.
            total: work in it.
        """
        del name, total

    def advance(self, amount: int) -> None:
        """Ignores finished work."""
        del amount
