"""Messages between an engine and the processes of its grammars, and the limits of these processes.

All frames are those of worker_protocol.py. The first one to a grammar's process is a GrammarOrder, answered by a
GrammarReply. Later ones consist of 32-bit integers: a command is its kind, the number of a walk, and tokens. Each
command except END has one reply, a WalkReply.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

OPEN = 0  # start a walk after these tokens
TAKE = 1  # advance the walk by these tokens
LOOK = 2  # make the masks after the first of these tokens, the first two, …, without advancing the walk
END = 3  # end the walk

FORK = 0  # to the process that forks: fork a grammar's process, which gets the socket sent with this message
KILL = 1  # to the process that forks: kill the process with this id
FORK_MESSAGE = struct.Struct("<II")

MAX_FORCED = 64  # maximum number of forced tokens in a reply
MAX_SECONDS = 60.0  # seconds of one command, by the clock

# Limits of llguidance, below its own defaults. Grammars with unbounded ambiguity and expressions with huge automata
# exceed them. A mask usually takes 50 us, and 0.1 s at these limits.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "max_grammar_size": 100_000,
    "max_items_in_row": 500,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "verbose_errors": False,
}
SLOW_STEP_S = 0.02  # CPU seconds; a process that takes longer for a command gets the lowest priority from then on
MAX_WALK_CPU_S = 10.0  # CPU seconds for all tokens of an answer; 10,000 tokens take about 1 s


class GrammarOrder(msgspec.Struct, frozen=True):
    """A grammar to compile, and the limits of its process."""

    key: str  # key of StructuredOutputsParams
    max_bytes: int  # bytes of address space in addition to those at the start of the process
    compile_s: float  # CPU seconds for compiling
    step_s: float  # CPU seconds for a command
    niceness: int  # niceness of the process


class GrammarReply(msgspec.Struct, frozen=True):
    """Result of compiling a grammar."""

    failed: str = ""  # error; empty if the grammar is compiled
    num_kib: int = 0  # KiB of memory that the process does not share


class Forked(msgspec.Struct, frozen=True):
    """Message of the process that forks: its own failure, a new process, or the end of one."""

    failed: str = ""  # error of the process that forks; empty without one
    started: int = 0  # id of the new process; 0 if there is none
    ended: int = 0  # id of the process that has ended; 0 if there is none
    status: int = 0  # exit status of `ended`; below 0, the negated signal that ended it


class WalkReply(NamedTuple):
    """Tokens that may come next in a walk (after OPEN and TAKE), or after draft tokens (after LOOK).

    A mask is a token, which is the only one that may come, or the words of token_mask.py.
    """

    walk: int  # number of the walk
    is_look: bool  # True for a reply to LOOK
    position: int  # number of tokens that the walk has taken
    failed: bool  # True if the grammar has exceeded a limit
    num_kib: int  # KiB of memory that the process does not share
    tokens: Sequence[int]  # tokens of the command after LOOK, otherwise forced tokens
    masks: Sequence[int | memoryview]  # masks, after LOOK one for each token

    def encode(self) -> bytes:
        """The reply as the bytes of a frame."""
        numbers = (self.walk, self.is_look, self.position, self.failed, self.num_kib, len(self.tokens), len(self.masks))
        parts: list[bytes | memoryview] = [struct.pack(f"<{7 + len(self.tokens)}I", *numbers, *self.tokens)]
        for mask in self.masks:
            if isinstance(mask, int):
                parts.append(struct.pack("<2I", 0, mask))
            else:
                parts += [struct.pack("<I", len(mask) // 4), mask]
        return b"".join(parts)

    @classmethod
    def decode(cls, frame: memoryview) -> "WalkReply":
        """Reads the bytes of a frame."""
        words = frame.cast("I")
        walk, is_look, position, failed, num_kib, num_tokens, num_masks = words[:7]
        offset, masks = 7 + num_tokens, list[int | memoryview]()
        for _ in range(num_masks):
            length = words[offset]
            if length == 0:
                masks.append(words[offset + 1])
                offset += 2
            else:
                masks.append(words[offset + 1 : offset + 1 + length])
                offset += 1 + length
        return cls(walk, bool(is_look), position, bool(failed), num_kib, words[7 : 7 + num_tokens].tolist(), masks)


def command(kind: int, walk: int, tokens: Sequence[int] = ()) -> bytes:
    """A command as the bytes of a frame."""
    return struct.pack(f"<{2 + len(tokens)}I", kind, walk, *tokens)


def read_command(frame: bytes) -> tuple[int, int, list[int]]:
    """Kind, walk and tokens of a command."""
    kind, walk, *tokens = struct.unpack(f"<{len(frame) // 4}I", frame)
    return kind, walk, tokens
