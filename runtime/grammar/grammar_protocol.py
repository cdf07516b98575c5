"""Messages between an engine and the processes of its grammars, and the limits of these processes.

All frames are those of worker_protocol.py. The first one to a grammar's process is a GrammarOrder, answered by a
GrammarReply. Those after it are whole numbers of 32 bits: a command is its kind, the number of a walk, and tokens.
Each command but END has one reply: a WalkReply.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

OPEN = 0  # a new walk, which has taken these tokens
TAKE = 1  # it goes on with these tokens
LOOK = 2  # which tokens may come after the first of these, the first two, … if the walk went on with them
END = 3  # the walk has ended

FORK = 0  # to the process that forks: a new grammar's process, which gets the socket that comes with this
KILL = 1  # to it: kill the process of this number
FORK_MESSAGE = struct.Struct("<II")

MAX_FORCED = 64  # tokens that a reply names, of those that can only come next
MAX_SECONDS = 60.0  # of one command, by the clock

# Of llguidance, below its own. What is beyond: grammars that are ambiguous without end, and expressions whose
# automata explode. A mask takes 50 us as a rule; at these, 0.1 s.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "max_grammar_size": 100_000,
    "max_items_in_row": 500,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "verbose_errors": False,
}
SLOW_STEP_S = 0.02  # of CPU time: a process that takes longer for a command has the lowest priority from then on
MAX_WALK_CPU_S = 10.0  # for all tokens of an answer. One of 10,000 tokens takes about 1.


class GrammarOrder(msgspec.Struct, frozen=True):
    """A grammar to compile, and what its process may take."""

    key: str  # of StructuredOutputsParams
    max_bytes: int  # of addresses, more than the process has at its start
    compile_s: float  # of CPU time
    step_s: float  # of CPU time, for a command
    niceness: int  # of its process


class GrammarReply(msgspec.Struct, frozen=True):
    """A grammar is compiled, or cannot be."""

    failed: str = ""  # why; empty: it is compiled
    num_kib: int = 0  # that its process shares with no other


class Forked(msgspec.Struct, frozen=True):
    """A message of the process that forks: why it cannot work, or a new process, or how one has ended."""

    failed: str = ""
    started: int = 0  # process id
    ended: int = 0  # process id
    status: int = 0  # exit status of `ended`; below 0: the signal that it was ended by


class WalkReply(NamedTuple):
    """Which tokens may come next in a walk (after OPEN and TAKE), or after tokens that may come (after LOOK).

    A mask is a token, which alone may come, or the words of token_mask.py.
    """

    walk: int
    is_look: bool
    position: int  # tokens that the walk has taken
    failed: bool  # the grammar is beyond a limit
    num_kib: int  # that the process shares with no other
    tokens: Sequence[int]  # after LOOK those of the command, else those that can only come next
    masks: Sequence[int | memoryview]

    def encode(self) -> bytes:
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
        words = frame.cast("I")
        walk, is_look, position, failed, num_kib, num_tokens, num_masks = words[:7]
        place, masks = 7 + num_tokens, list[int | memoryview]()
        for _ in range(num_masks):
            length = words[place]
            if length == 0:
                masks.append(words[place + 1])
                place += 2
            else:
                masks.append(words[place + 1 : place + 1 + length])
                place += 1 + length
        return cls(walk, bool(is_look), position, bool(failed), num_kib, words[7 : 7 + num_tokens].tolist(), masks)


def command(kind: int, walk: int, tokens: Sequence[int] = ()) -> bytes:
    return struct.pack(f"<{2 + len(tokens)}I", kind, walk, *tokens)


def read_command(frame: bytes) -> tuple[int, int, list[int]]:
    """Kind, walk and tokens."""
    kind, walk, *tokens = struct.unpack(f"<{len(frame) // 4}I", frame)
    return kind, walk, tokens
