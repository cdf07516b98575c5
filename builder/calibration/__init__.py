"""Calibration: token ids of a few texts, on which a method observes the activations of the layers."""

from enginewright.builder.calibration.samples import RECOVERY, Samples, calibrate, read_samples, samples_without_data

__all__ = ["RECOVERY", "Samples", "calibrate", "read_samples", "samples_without_data"]
