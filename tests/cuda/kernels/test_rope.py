"""rope_kv_write on CUDA, in emulation: what goes where in the pools of csrc/cuda/kv.cuh, bit for bit."""

import numpy as np
import pytest
import torch

from enginewright.plan import linear, step_sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import CudaKernel, Matrix
from tests.emulator.kernels import SCHEDULES
from tests.helpers.cuda_call import CudaCall, Operand, as_bf16, empty, strided, vector
from tests.helpers.cuda_kv import BLOCK_SIZE, Pools
from tests.helpers.paged_kv import KV_DTYPES, is_fp8
from tests.helpers.paged_kv import rotated as rotate

TOKENS = linear(tokens=1)


# heads, kv_heads, head_dim, rotated: all columns are rotated, some, or none.
SHAPES = [(6, 2, 24, 24), (3, 1, 40, 0), (7, 1, 80, 80), (3, 1, 80, 32), (3, 3, 50, 32), (4, 1, 128, 6), (2, 1, 256, 0)]
WRITES = [(kv, *shape) for shape in SHAPES for kv in KV_DTYPES]
SOME_WRITES = [(kv, *shape) for kv, shape in zip(KV_DTYPES, SHAPES, strict=False)]  # each dtype


@pytest.mark.parametrize(("kv", "heads", "kv_heads", "head_dim", "rotated"), SOME_WRITES)
def test_rope_and_write(kv: str, heads: int, kv_heads: int, head_dim: int, rotated: int) -> None:
    """5 tokens to slots in no order; q, k and v are columns of one matrix."""
    rng = np.random.default_rng(0)
    counts = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    qkv = rng.standard_normal((5, sum(counts))).astype(np.float32)
    qkv[2, counts[0] :] = 0.0
    qkv[3, counts[0] :] *= 1e-3
    q, k, v = (part.reshape(5, -1, head_dim) for part in np.split(qkv, np.cumsum(counts)[:2], 1))
    angles = rng.standard_normal((5, rotated // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    tables = {"cos": cos, "sin": sin}
    slots = rng.permutation(3 * BLOCK_SIZE)[:5].astype(np.int32)
    whole = strided("f32", TOKENS, qkv, sum(counts) + 3)

    def part(start: int, columns: int) -> Operand:
        matrix = Matrix("f32", TOKENS, columns, whole.matrix.stride, columns)
        return Operand(whole.values.reshape(-1)[start:], matrix)

    width = counts[0]
    padded = -(-width // 64) * 64

    def run(schedule: str, op: str = "RopeKvWrite") -> tuple[Pools, np.ndarray]:
        pools = Pools(kv, 3, kv_heads, head_dim)
        out = empty("bf16", TOKENS, 5, width, padded + 64, padded)
        operands = {
            "q": part(0, counts[0]),
            "k": part(counts[0], counts[1]),
            "v": part(counts[0] + counts[1], counts[2]),
            **(
                {name: strided("f32", TOKENS, table, rotated // 2 + 1) for name, table in tables.items()}
                if rotated
                else {}
            ),
            "slots": vector("i32", slots),
            "q_out": out,
            **pools.operands,
        }
        if op == "RopeQueries":
            del operands["k"], operands["v"], operands["slots"]
        kernel = PLUGINS[op].kernels["cuda"]
        assert isinstance(kernel, CudaKernel)
        matrices = {role: operand.matrix for role, operand in operands.items()}
        call = CudaCall(kernel, matrices, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        call.run(operands, step_sizes(tokens=5, sequences=1, logit_rows=1), schedule)
        return pools, out.values

    def turned(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x[..., :rotated], 2, -1)
        c, s = cos[:, None], sin[:, None]
        turned = np.concatenate((first * c - second * s, second * c + first * s, x[..., rotated:]), -1)
        return rotate(torch.from_numpy(turned)).numpy() if kv == "u4" else turned

    expected = Pools(kv, 3, kv_heads, head_dim)
    expected.write(slots, torch.from_numpy(turned(k)), torch.from_numpy(v))
    for schedule in SCHEDULES:
        pools, out = run(schedule)
        if is_fp8(kv):  # zeros of either sign
            codes = pools.memory[..., : BLOCK_SIZE * pools.pad]
            codes[codes == 0x80] = 0
            assert (expected.memory[..., : BLOCK_SIZE * pools.pad] != 0x80).all()
        np.testing.assert_array_equal(pools.memory, expected.memory)
        np.testing.assert_array_equal(out[:5, :width], as_bf16(turned(q).reshape(5, -1)))
        assert (out[:5, width:padded] == 0).all()
        assert (out[:5, padded:] == 0x7FFF).all() and (out[5:] == 0x7FFF).all()
        untouched, queries = run(schedule, "RopeQueries")
        np.testing.assert_array_equal(queries, out)
        np.testing.assert_array_equal(untouched.memory, Pools(kv, 3, kv_heads, head_dim).memory)
