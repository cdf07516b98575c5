"""Shared parts of heads: facts about the model that they propose draft tokens for, and their graphs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from enginewright.builder.wrappers import text_config
from enginewright.errors import UnsupportedModelError, UsageError
from enginewright.passes.show_hidden import ShowHidden
from enginewright.plugins.plugin import operand, width_of

# Families whose last norm includes a factor of the logits.
SCALED = ("cohere2", "falcon_h1", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared")


@dataclass(frozen=True)
class HeadGraph:
    """A head, as a dense graph."""

    graph: ir.Model  # graph of the head
    reads: ShowHidden  # output of the model's hidden states
    # output of its own hidden states, which replace the model's for a second draft token; None if it needs none
    gives: ShowHidden | None = None


@dataclass(frozen=True)
class TargetModel:
    """The model that a head proposes draft tokens for."""

    name: str  # name
    model_type: str  # `model_type` of its config.json
    layers: int  # number of layers
    width: int  # columns of its hidden states
    table: ir.Value  # its embedding, [tokens, width]
    max_seq_len: int  # positions of its longest sequence

    @staticmethod
    def of(name: str, config: Mapping[str, Any], dense: ir.Model, max_seq_len: int) -> "TargetModel":
        """Reads the facts from a model's graph.

        Args:
            name: name of the model.
            config: its config.json.
            dense: its graph.
            max_seq_len: positions of its longest sequence.

        Raises:
            UnsupportedModelError: its hidden states have another form than heads expect.
        """
        text = text_config(config)
        factor = text.get("residual_multiplier") or 1.0
        if factor != 1.0:  # blocks/granite.py
            raise UnsupportedModelError(
                f"{name} cannot output its hidden states", f"they are divided by its residual_multiplier, {factor}"
            )
        ends = json.loads(dense.metadata_props["enginewright.layer_ends"])
        width = next(width_of(value) for node in dense.graph for value in node.outputs if value.name == ends[0])
        tokens = next(value for value in dense.graph.inputs if value.name == "tokens")
        tables = [operand(node, 0) for node in tokens.consumers() if node.op_type == "Gather"]
        # some models have more tables, for their layers
        table = next(table for table in tables if width_of(table) == width)
        return TargetModel(name, str(text["model_type"]), len(ends), width, table, max_seq_len)

    def check_last_norm(self) -> None:
        """Refuses a model whose last norm includes a factor of the logits.

        Raises:
            UnsupportedModelError: it does.
        """
        if self.model_type in SCALED:
            raise UnsupportedModelError(
                f"{self.name} cannot output the states after its last norm",
                f"models of type {self.model_type} have a factor of the logits in them",
            )

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        assert self.table.shape is not None
        rows = self.table.shape[0]
        assert isinstance(rows, int)
        return rows


def no_head(head: str, model: str, why: str) -> UsageError:
    """Makes the error for a head of another model.

    Args:
        head: name of the head.
        model: name of the model.
        why: the reason.
    """
    return UsageError(f"{head} is not a head of {model}", why, "Take a head that was trained for this very model.")
