"""RoPE on CUDA, in emulation, of the heads that tests/cuda/kernels/test_rope.py leaves out."""

from tests.cuda.kernels import test_rope as short
from tests.helpers.breadth import others, repeated

test_rope_and_write = repeated(
    short.test_rope_and_write,
    ("kv", "heads", "kv_heads", "head_dim", "rotated"),
    others(short.WRITES, short.SOME_WRITES),
)
