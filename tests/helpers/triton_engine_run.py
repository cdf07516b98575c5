"""Whole engines whose recurrences go through chunks, as tests/cuda/test_engine.py checks others:
`python -m tests.helpers.triton_engine_run FAMILY QUANT` in the environment TRITON_INTERPRET=1. It prints which of their
kernels are in Triton.
"""

import json
import sys

from tests.cuda.test_engine import built, check_engine
from tests.emulator import interpreted

if __name__ == "__main__":
    family, quant = sys.argv[1:]
    interpreted.round_products()
    check_engine(family, quant, "bf16", batch_invariant=False)
    _, _, kernels = built(family, quant, "bf16", False)
    print(json.dumps(sorted(kernel.triton.function for kernel in kernels.values() if kernel.triton)))
