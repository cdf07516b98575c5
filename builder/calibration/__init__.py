"""Calibration: token ids of a few texts, on which a method observes the activations of the layers."""

from enginewright.builder.calibration.samples import Samples, calibrate, read_samples, samples_without_data

__all__ = ["Samples", "calibrate", "read_samples", "samples_without_data"]
