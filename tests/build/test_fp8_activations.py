"""FP8 activations in the gate's arithmetic, against numpy."""

import ml_dtypes
import numpy as np
import pytest
import torch

from enginewright.passes.quant import Fp8
from enginewright.plugins.target import CudaTarget


@pytest.mark.parametrize(("scales", "group"), [("tensor", 0), ("channel", 0), ("block", 128)])
def test_activations_are_rounded_as_numpy_does(scales: str, group: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32))
    x[1] = 0
    rounded = Fp8(fp8_scales=scales).round_activations(x, CudaTarget()).double().numpy()
    for begin in range(0, 200, group or 200):
        run = x.double().numpy()[:, begin : begin + (group or 200)]
        largest = np.abs(run).max(1, keepdims=True)
        scale = np.where(largest > 0, largest, 448) / 448
        expected = (run / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        assert np.abs(rounded[:, begin : begin + run.shape[1]] - expected).max() <= 2.0**-20 * np.abs(expected).max()
