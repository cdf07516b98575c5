"""The quality gate: a built engine beside the model that it was built from."""

from enginewright.builder.gate.config import GateConfig, parse_gate
from enginewright.builder.gate.gate import Subject, measure
from enginewright.builder.gate.refusal import refusal
from enginewright.builder.gate.report import check_report_path, write_report

__all__ = ["GateConfig", "Subject", "check_report_path", "measure", "parse_gate", "refusal", "write_report"]
