"""Planes of keys and values in CUDA kernels: csrc/cuda/kv.cuh."""

from enginewright.plugins.attention.kv_write import BLOCK_SIZE
from enginewright.plugins.kernel import Matrix, cuda_type


def kv_constant(key: Matrix, value: Matrix, heads: int) -> str:
    """Writes the C++ constant for a plane of keys and one of values.

    Args:
        key: plane of keys.
        value: plane of values, of the same form.
        heads: KV heads.
    """
    assert key == value, "kernels read keys and values of one form"
    return (
        f"Kv{{.type = {cuda_type(key.dtype)}, .block_size = {BLOCK_SIZE}, .heads = {heads}, .head_dim = {key.columns}, "
        f".head_dim_pad = {key.stride}, .block_stride = {key.block_stride}}}"
    )
