"""Errors that users see. Each says what failed, why, and what to do, and carries the exit code of `engine`."""

from enginewright.printable import printable, printable_lines

MAX_SHOWN_CHARS = 60  # characters of a value that an error message shows


class EngineError(Exception):
    """A documented failure. Its texts are made printable, whatever names they quote.

    Args:
        what: what failed, as a short clause without a full stop.
        why: the reason, if it is not plain from `what`.
        fix: what to do about it.
    """

    exit_code = 1
    is_shown_by_health = False  # True if a server may show it to anybody: it names no files

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix = printable(what), printable_lines(why), printable_lines(fix)
        sentence = f"{what}: {why}" if what and why else what or why
        super().__init__(f"{sentence}\n{fix}" if fix else sentence)


class UsageError(EngineError):
    """The command or the request is wrong, or names something that does not exist."""

    exit_code = 2


class UnsupportedModelError(EngineError):
    """The checkpoint belongs to a kind, or uses a feature, that is not implemented."""

    exit_code = 3


class NotEnoughMemoryError(EngineError):
    """There is not enough memory for the engine and its limits."""

    exit_code = 4


class CorruptEngineError(EngineError):
    """The engine file is cut short, altered, or not an engine."""

    exit_code = 5


class NoCodeForMachineError(EngineError):
    """The engine holds no kernels for this machine."""

    exit_code = 6


class QualityGateError(EngineError):
    """The built engine is further from its source than the gate allows."""

    exit_code = 7


class SignatureError(EngineError):
    """A file is not signed by the required signer, or is not the file that was signed."""

    exit_code = 8


class WorkerLostError(EngineError):
    """Something outside has ended a worker process repeatedly, such as a person, or a system that is out of memory."""


class EngineDeadError(EngineError):
    """The thread that runs the engine has ended with an error; there will be no more outputs."""

    @classmethod
    def of(cls, error: BaseException) -> "EngineDeadError":
        """Makes the error for callers that wait for the engine, with the reason and the exit code of `error`."""
        if not isinstance(error, EngineError):
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return cls("the engine has failed", why, "Start it again.")
        dead = cls("the engine has failed", ": ".join(filter(None, (error.what, error.why))), error.fix)
        dead.exit_code, dead.is_shown_by_health = error.exit_code, error.is_shown_by_health
        return dead


def shorten(value: object) -> str:
    """Formats a value for an error message, in at most MAX_SHOWN_CHARS characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole numbers of thousands of digits
        return f"a {type(value).__name__} too long to be shown"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
