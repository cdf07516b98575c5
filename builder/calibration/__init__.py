"""Calibration: token ids of a few texts, on which a method measures what goes through the layers."""

from enginewright.builder.calibration.samples import Samples, calibrate

__all__ = ["Samples", "calibrate"]
