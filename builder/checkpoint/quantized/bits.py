"""Unpacks numbers of a few bits from words and bytes."""

import torch

# Code → number of FP4 (E2M1), and scale (E8M0).
# https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
E8M0 = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), torch.nan])


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpacks codes UINT8 [..., count] from INT32 words [..., W]: code i has the `bits` bits from bit i · bits on.

    Args:
        words: the words.
        bits: bits of a code.
        count: number of codes.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)[..., :count]
    if bits == 4:
        return nibbles(words.contiguous().view(torch.uint8))[..., :count]
    first = torch.arange(count) * bits
    wide = torch.nn.functional.pad(words, (0, 1)).to(torch.int64) & 0xFFFFFFFF
    word = first // 32
    pairs = wide[..., word] | wide[..., word + 1] << 32
    return ((pairs >> first % 32) & ((1 << bits) - 1)).to(torch.uint8)


def nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Unpacks codes UINT8 [..., 2 n] from bytes [..., n], the low half of each first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def words_for(count: int, bits: int) -> int:
    """Returns the number of 32-bit words for some codes.

    Args:
        count: number of codes.
        bits: bits of a code.
    """
    return -(-count * bits // 32)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Returns FLOAT powers of two from exponents in UINT8 or FLOAT8E8M0: 2^(code - 127), NaN for 255."""
    return E8M0[exponents.view(torch.uint8).int()]
