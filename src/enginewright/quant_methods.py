"""Quantization methods as the command, the gate and the passes know them: one entry each, without torch.

`passes/quant/` has the class that computes each method's weights; its `info` is the entry here.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MethodInfo:
    """Facts of a quantization method."""

    name: str  # name in `--quant`
    # Limits of `--gate` by name (builder/gate/config.py): what a sound build of a small model may lose. Small models
    # lose most, and the gate refuses what is broken, not what is coarse.
    limits: Mapping[str, float]
    # Limit of the mean cosine between the vectors of an embedding engine and its source's; None: its layers' formats
    # decide.
    min_cosine: float | None = None
    fallbacks: tuple[str, ...] = ()  # names of methods that lose less, the nearest in size first
    calibrated: bool = False  # true if it looks at activations on calibration texts


# The comment before each entry is what SmolLM2-135M loses on the held-out text (KL, top-1, perplexity, worst layer),
# its weights moved off the 4-bit grid that they were published on. A layer whose scales are wrong is off by 1; int8
# activations may leave the most extreme layer off by 0.2. Tiny models of random weights, whose distributions are
# flat, agree in 4 bits at 0.6, in FP4 at 0.5. The comment after a cosine is what all-MiniLM-L6-v2 has.

# 0.0002, 0.993, 0.999, 0.002; with KV in int8 0.0014, 0.976
BF16 = MethodInfo(
    "bf16",
    {"kl": 0.005, "top1": 0.96, "ppl": 1.02, "layer": 0.02},
    min_cosine=0.999,  # 0.99999
)
# 0.0068, 0.945, 1.002, 0.014
INT8_WO = MethodInfo(
    "int8-wo",
    {"kl": 0.03, "top1": 0.90, "ppl": 1.05, "layer": 0.10},
    min_cosine=0.99,  # 0.9990
    fallbacks=("bf16",),
)
# 0.0110, 0.931, 1.007, 0.019; with one scale per token, which does not pass, 0.059, 0.860, 1.054, 0.067
W8A8 = MethodInfo(
    "w8a8",
    {"kl": 0.05, "top1": 0.88, "ppl": 1.06, "layer": 0.40},
    min_cosine=0.98,  # 0.9988
    fallbacks=("int8-sq", "int8-wo"),
)
# 0.0097, 0.941, 0.999, 0.166
INT8_SQ = MethodInfo(
    "int8-sq",
    {"kl": 0.05, "top1": 0.88, "ppl": 1.06, "layer": 0.40},
    min_cosine=0.98,
    fallbacks=("int8-wo",),
    calibrated=True,
)
# 0.407, 0.642, 1.317, 0.133; in groups of 128, which do not pass, 0.589, 0.577, 1.54, 0.171
INT4_RTN = MethodInfo(
    "int4-rtn",
    {"kl": 0.60, "top1": 0.55, "ppl": 1.50, "layer": 0.40},
    min_cosine=0.85,  # 0.945
    fallbacks=("int4-awq", "int4-gptq", "fp8", "int8-wo"),
)
# 0.175, 0.757, 1.134, 0.130
INT4_AWQ = MethodInfo(
    "int4-awq",
    {"kl": 0.40, "top1": 0.55, "ppl": 1.30, "layer": 0.40},
    min_cosine=0.85,
    fallbacks=("int4-gptq", "fp8", "int8-wo"),
    calibrated=True,
)
# 0.192, 0.763, 1.154, 0.113
INT4_GPTQ = MethodInfo(
    "int4-gptq",
    {"kl": 0.40, "top1": 0.55, "ppl": 1.30, "layer": 0.40},
    min_cosine=0.85,
    fallbacks=("int4-awq", "fp8", "int8-wo"),
    calibrated=True,
)
# 0.560, 0.601, 1.619, 0.155
MXFP4 = MethodInfo(
    "mxfp4",
    {"kl": 0.80, "top1": 0.40, "ppl": 1.90, "layer": 0.40},
    min_cosine=0.8,  # 0.919
    fallbacks=("int4-awq", "int4-gptq", "fp8", "int8-wo"),
)
# 0.022, 0.899, 1.015, 0.034; with activations in FP8, on GPUs, 0.036, 0.880, 1.033
FP8 = MethodInfo(
    "fp8",
    {"kl": 0.08, "top1": 0.82, "ppl": 1.08, "layer": 0.15},
    min_cosine=0.97,  # 0.9963
    fallbacks=("int8-wo",),
)
# Limits of its tables; each layer has the format that was chosen for it.
AUTO = MethodInfo(
    "auto",
    {"kl": 0.05, "top1": 0.88, "ppl": 1.06, "layer": 0.40},
    calibrated=True,
)

QUANT_METHODS: Mapping[str, MethodInfo] = {
    info.name: info for info in (BF16, INT8_WO, W8A8, INT8_SQ, INT4_RTN, INT4_AWQ, INT4_GPTQ, MXFP4, FP8, AUTO)
}
