"""Planes of keys and values as CUDA kernels know them: csrc/cuda/kv.cuh."""

from enginewright.plugins.kernel import Matrix
from enginewright.plugins.kv_write import BLOCK_SIZE

TYPES = {"bf16": "KvType::bf16", "i8": "KvType::i8", "e4m3": "KvType::e4m3"}


def kv_constant(key: Matrix, value: Matrix, heads: int) -> str:
    """Of both planes, in C++."""
    assert key == value, "kernels read keys and values of one form"
    return (
        f"Kv{{.type = {TYPES[key.dtype]}, .block_size = {BLOCK_SIZE}, .heads = {heads}, .head_dim = {key.columns}, "
        f".head_dim_pad = {key.stride}, .block_stride = {key.block_stride}}}"
    )
