"""GPU launches that compute what adapters add to matrix products: csrc/cuda/adapter_delta.cuh."""

from collections.abc import Iterable

from enginewright.adapter_file import MAX_RANK
from enginewright.plan import AdapterLaunches, Launch, linear
from enginewright.plugins.kernel import ONE, blocks, cuda_type, expression

ADAPTER_SOURCES = dict.fromkeys(("adapter_shrink", "adapter_expand"), "adapter_delta.cuh")
TILE_ROWS = 8  # rows of one adapter that pass its factors together
SPLIT_COLUMNS = 512  # columns of x of a block of adapter_shrink
SHRINK_THREADS = 128  # threads of a block of adapter_shrink
RANK_BLOCKS = 4  # blocks of adapter_shrink that share the ranks, 16 at a time
OUTPUTS = 512  # rows of the weight of a block of adapter_expand; a thread has four
ROW = linear(tokens=1)


def adapter_launches(dtypes: Iterable[str]) -> AdapterLaunches:
    """Makes the launches for products whose inputs have these number types.

    Args:
        dtypes: number types of x.
    """
    shrink_floats = TILE_ROWS * SPLIT_COLUMNS + SHRINK_THREADS // 32 * TILE_ROWS * 16

    def kernel(name: str, dtype: str) -> str:
        sizes = {"tile_rows": TILE_ROWS, "split_columns": SPLIT_COLUMNS, "outputs": OUTPUTS}
        return expression(name, "AdapterDelta", type=cuda_type(dtype), **sizes)

    return AdapterLaunches(
        shrink={
            dtype: Launch(
                kernel("adapter_shrink", dtype),
                arguments=("x", "x_scale", "adapters", "rows", "tiles", "shrunk"),
                grid=(blocks(ROW, TILE_ROWS), blocks(1, SPLIT_COLUMNS), blocks(RANK_BLOCKS)),
                threads=SHRINK_THREADS,
                shared_bytes=4 * shrink_floats,
            )
            for dtype in sorted(set(dtypes))
        },
        expand=Launch(
            kernel("adapter_expand", "f32"),
            arguments=("adapters", "rows", "tiles", "shrunk", "delta"),
            grid=(blocks(ROW, TILE_ROWS), blocks(1, OUTPUTS), ONE),
            threads=OUTPUTS // 4,
            shared_bytes=4 * TILE_ROWS * MAX_RANK,
        ),
    )
