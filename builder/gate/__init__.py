"""The quality gate: compares a built engine with the model that it was built from."""

from enginewright.builder.gate.adapter import measure_adapter
from enginewright.builder.gate.config import GateConfig, parse_gate
from enginewright.builder.gate.gate import Subject, measure
from enginewright.builder.gate.refusal import refusal
from enginewright.builder.gate.report import check_report_path, write_report
from enginewright.builder.gate.vectors import measure_vectors

__all__ = [
    "GateConfig",
    "Subject",
    "check_report_path",
    "measure",
    "measure_adapter",
    "measure_vectors",
    "parse_gate",
    "refusal",
    "write_report",
]
