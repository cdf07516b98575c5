"""The process of test_driver.py for kernel tests on a GPU: prints which parts of arrays a kernel has read."""

import json
import sys

import numpy as np

from tests.emulator.kernels import Kernels

if __name__ == "__main__":
    source, expression, threads = json.load(sys.stdin)
    kernels = Kernels([(source, expression)])
    whole = np.arange(8 * threads, dtype=np.uint32)
    lines, sums = whole[4 * threads :], np.full(threads + 1, 77, np.uint32)  # the second half, of a line a thread
    lines.flags.writeable = False
    sizes = np.array([threads, 1, 1, 1, 1], np.int32)
    kernels.launch(expression, [1], threads, 0, sizes, lines, sums)
    print(json.dumps({"by": type(kernels).__name__, "sums": sums.tolist()}))
