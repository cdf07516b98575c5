"""Runs the Triton GEMM in Triton's interpreter, in a process of its own: `python -m tests.helpers.triton_gemm_run` in
the environment TRITON_INTERPRET=1 prints, as JSON lines, how far each problem is from float64.
"""

import json

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from enginewright.csrc.cuda.triton.gemm import gemm_bf16

POISON = -7.0
PROBLEMS = [  # rows, columns, depth, programs, bias, type of y
    (1, 7, 40, 1, True, torch.float32),
    (37, 61, 131, 3, False, torch.float32),
    (70, 131, 200, 5, True, torch.bfloat16),
    (128, 3, 1, 2, False, torch.bfloat16),
    (95, 33, 64, 20, True, torch.float32),
]


def widen_dots() -> None:
    """The interpreter of Triton 3.9 keeps BF16 as integers of its bits, and multiplies those."""
    plain = InterpreterBuilder.create_dot

    def create_dot(builder, a, b, *rest):
        wide = [builder.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return plain(builder, *wide, *rest)

    InterpreterBuilder.create_dot = create_dot


def padded(rows: int, columns: int, extra: int) -> torch.Tensor:
    """A matrix of random BF16 in a wider one that is NaN elsewhere; its rows start at multiples of 16 bytes."""
    wide = torch.full((rows + 3, -(-columns // 8) * 8 + extra), torch.nan, dtype=torch.bfloat16)
    wide[:rows, :columns] = torch.randn(rows, columns)
    return wide


def run(rows: int, columns: int, depth: int, programs: int, bias: bool, out: torch.dtype) -> dict[str, float]:
    x, w = padded(rows, depth, 24), padded(columns, depth, 8)
    b = torch.randn(columns)
    y = torch.full((rows + 3, -(-columns // 8) * 8 + 16), POISON, dtype=out)
    strides = (x.stride(0), w.stride(0), y.stride(0))
    count = torch.tensor([rows], dtype=torch.int32)
    gemm_bf16[(programs,)](x, w, b, y, count, columns, depth, *strides, bias, 32, 16, 64, 2)
    expected = x[:rows, :depth].double() @ w[:columns, :depth].double().T + (b.double() if bias else 0)
    written, kept = y[:rows, :columns].double(), [y[rows:], y[:rows, columns:]]
    return {
        "error": float(((written - expected).abs() / expected.abs().clamp(min=1.0)).max()),
        "outside": float(sum((part != POISON).sum() for part in kept)),
    }


if __name__ == "__main__":
    torch.manual_seed(6)
    widen_dots()
    for problem in PROBLEMS:
        print(json.dumps(run(*problem)))
