"""GPU launches that sample tokens from a step's logits: csrc/cuda/sampling.cuh."""

from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Matrix, blocks, expression

SAMPLING_SOURCES = {"sample_rows": "sampling.cuh"}
THREADS = 1024
BINS = 2048  # bins of a histogram of 64-bit sums


def sampling_launch(logits: Matrix, threads: int = THREADS) -> Launch:
    """Makes the launch that samples tokens.

    Args:
        logits: logits of the step.
        threads: threads of a block.
    """
    kernel = expression("sample_rows", "Sampling", vocab=logits.columns, stride=logits.stride, threads=threads)
    return Launch(
        kernel,
        arguments=("rows", "entries", "saved", "allowed", "known", "logit_rows", "logits", "sampled", "tops"),
        grid=(blocks(logits.rows), ONE, ONE),
        threads=threads,
        shared_bytes=_shared_bytes(threads),
    )


def _shared_bytes(threads: int) -> int:
    """Computes the bytes of SamplingMemory: two tokens a thread, two sums a warp, the histogram, four numbers."""
    return 8 * 2 * threads + 8 * 2 * (threads // 32) + 8 * BINS + 32
