"""RoPE on CUDA, in emulation, of the heads that tests/test_cuda_rope.py leaves out."""

from tests import test_cuda_rope as short
from tests.helpers.breadth import others, repeated

test_rope_and_write = repeated(
    short.test_rope_and_write,
    ("kv", "heads", "kv_heads", "head_dim", "rotated"),
    others(short.WRITES, short.SOME_WRITES),
)
