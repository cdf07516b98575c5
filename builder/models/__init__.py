"""The families of models that can be built: each a file named after its `model_type`."""

from enginewright.builder.models.common.find import build_graph, check_config, model_types

__all__ = ["build_graph", "check_config", "model_types"]
