"""Calibration: token ids of a few texts, on which a method observes the activations of the layers."""

from enginewright.builder.calibration.samples import Samples, calibrate, foresee_samples

__all__ = ["Samples", "calibrate", "foresee_samples"]
