"""KV pools as CUDA kernels know them: csrc/cuda/kv.cuh."""

from enginewright.plugins.kernel import Matrix, cuda_type
from enginewright.plugins.kv_write import BLOCK_SIZE


def kv_constant(kv: Matrix, heads: int) -> str:
    """In C++."""
    return (
        f"Kv{{.type = {cuda_type(kv.dtype)}, .block_size = {BLOCK_SIZE}, .heads = {heads}, .head_dim = {kv.columns}, "
        f".head_dim_pad = {kv.stride}, .block_stride = {kv.block_stride}}}"
    )
