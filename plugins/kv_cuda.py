"""KV pools as CUDA kernels know them: csrc/cuda/kv.cuh."""

from enginewright.plugins.kernel import Matrix
from enginewright.plugins.kv_write import BLOCK_SIZE

TYPES = {"bf16": "KvType::bf16", "i8": "KvType::i8", "e4m3": "KvType::e4m3"}


def kv_constant(kv: Matrix, heads: int) -> str:
    """In C++."""
    return (
        f"Kv{{.type = {TYPES[kv.dtype]}, .block_size = {BLOCK_SIZE}, .heads = {heads}, .head_dim = {kv.columns}, "
        f".head_dim_pad = {kv.stride}, .block_stride = {kv.block_stride}}}"
    )
