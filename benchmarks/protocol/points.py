"""The points that are measured, by name, and their rooflines.

prefill-512            a prompt of 512 tokens, to its first new token; shorter ones repeated, to 512 tokens a round
decode-4096x8          8 sequences with 4096 positions in the KV cache; a number of steps each round
in-flight-32x128x64    32 requests at once, 128 tokens in and 64 out each
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.models import Model

if TYPE_CHECKING:
    from enginewright_bench.roofline import Roofline

FULL = (
    *(f"prefill-{length}" for length in (32, 128, 512, 2048)),
    *(f"decode-{depth}x{batch}" for batch in (1, 8, 32) for depth in (0, 512, 4096)),
    "in-flight-32x128x64",
)
QUICK = ("prefill-512", "decode-512x1", "in-flight-8x128x16")
STEPS = {1: 64, 8: 32, 32: 16}  # of a round, by the batch up to which it holds; beyond, the last
QUICK_STEPS = 8
READ_TOKENS = 512  # of prompts in a round, at least: a machine that was idle is not at its speed at once


@dataclass(frozen=True)
class Point:
    """A load that engines are measured at."""

    name: str
    kind: str  # "prefill" reads prompts; others decode
    prompts: int  # sequences at once
    length: int  # tokens of each prompt
    tokens: int  # new tokens of each sequence in a round

    @property
    def repeats(self) -> int:
        """Times that a round reads its prompts, one time after the other."""
        return max(1, READ_TOKENS // self.length) if self.kind == "prefill" else 1

    @property
    def counted(self) -> int:
        """Tokens of a round that the rate counts: those read in prefill, those generated otherwise."""
        return self.prompts * (self.repeats * self.length if self.kind == "prefill" else self.tokens)

    def room(self, rounds: int) -> int:
        """New tokens of a sequence, at the end. Decoding goes on from round to round, after one that warms up."""
        return self.tokens * (rounds + 1 if self.kind == "decode" else 1)

    def positions(self, rounds: int) -> int:
        """Positions of a sequence at the end. One that starts earlier may write one more token for each prompt."""
        return self.length + self.room(rounds) + self.prompts

    def roofline_seconds(
        self, model: Model, roofline: "Roofline", operands: str, weight_bytes: float, kv_bytes: float
    ) -> float:
        """The least time of a round: each step takes as long as it takes to read what it touches, or to multiply.

        Counted are the products with weights (2 operations each) and, in bytes, weights and K and V. Reading prompts
        multiplies by the head once per prompt.

        Args:
            operands: "int8" or "bf16", whose dot products the class allows.
            weight_bytes: of all that is read once per step.
            kv_bytes: of a position.
        """
        reading = self.length if self.kind != "decode" else 0
        ops = 2.0 * (model.body_weights * self.prompts * reading + model.head_weights * self.prompts)
        seconds = roofline.seconds(weight_bytes, {operands: ops}) if reading else 0.0
        if self.kind == "prefill":
            return self.repeats * seconds
        step_ops = 2.0 * self.prompts * (model.body_weights + model.head_weights)
        steps = self.tokens if self.kind == "decode" else self.tokens - 1  # the prompts' end gives the first
        for step in range(steps):
            depth = self.length + step
            seconds += roofline.seconds(weight_bytes + self.prompts * depth * kv_bytes, {operands: step_ops})
        return seconds


def point(name: str, *, quick: bool = False) -> Point:
    """Raises SystemExit for a name that is none."""
    found = re.fullmatch(r"(prefill)-(\d+)|(decode)-(\d+)x(\d+)|(in-flight)-(\d+)x(\d+)x(\d+)", name)
    if found is None:
        raise SystemExit(f"{name!r} is no point; write prefill-512, decode-4096x8 or in-flight-32x128x64")
    if found[1]:
        return Point(name, "prefill", 1, int(found[2]), 1)
    if found[3]:
        depth, batch = int(found[4]), int(found[5])
        steps = next((steps for max_batch, steps in STEPS.items() if batch <= max_batch), STEPS[32])
        return Point(name, "decode", batch, max(depth, 1), QUICK_STEPS if quick else steps)  # a prompt has a token
    return Point(name, "in-flight", int(found[7]), int(found[8]), int(found[9]))
