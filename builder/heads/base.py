"""What heads have to know of the model that they guess for, and what they give."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from enginewright.builder.wrappers import text_config
from enginewright.errors import UnsupportedModelError, UsageError
from enginewright.passes.show_hidden import ShowHidden
from enginewright.plugins.plugin import operand, width_of

# Families whose last norm is multiplied, so that logits are.
SCALED = ("cohere2", "falcon_h1", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared")


@dataclass(frozen=True)
class HeadGraph:
    """A head, as a dense graph."""

    graph: ir.Model
    reads: ShowHidden  # the model's hidden states
    gives: ShowHidden | None = None  # its own, in their place where it guesses a token more; None where it needs none


@dataclass(frozen=True)
class GuessedModel:
    """The model that a head guesses for."""

    name: str
    model_type: str
    layers: int
    width: int  # columns of its hidden states
    table: ir.Value  # its embedding: [tokens, width]
    max_seq_len: int

    @staticmethod
    def of(name: str, config: Mapping[str, Any], dense: ir.Model, max_seq_len: int) -> "GuessedModel":
        """config: what config.json holds. dense: its graph.

        Raises:
            UnsupportedModelError: its hidden states are not carried along as heads know them.
        """
        text = text_config(config)
        factor = text.get("residual_multiplier") or 1.0
        if factor != 1.0:  # blocks/granite.py
            raise UnsupportedModelError(
                f"{name} cannot show its hidden states", f"they are divided by its residual_multiplier, {factor}"
            )
        ends = json.loads(dense.metadata_props["enginewright.layer_ends"])
        width = next(width_of(value) for node in dense.graph for value in node.outputs if value.name == ends[0])
        tokens = next(value for value in dense.graph.inputs if value.name == "tokens")
        tables = [operand(node, 0) for node in tokens.consumers() if node.op_type == "Gather"]
        table = next(table for table in tables if width_of(table) == width)  # some have others for each layer
        return GuessedModel(name, str(text["model_type"]), len(ends), width, table, max_seq_len)

    def check_last_norm(self) -> None:
        """Refuse a model whose last norm has a factor of the logits in it.

        Raises:
            UnsupportedModelError: it has.
        """
        if self.model_type in SCALED:
            raise UnsupportedModelError(
                f"{self.name} cannot show the states behind its last norm",
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
    """What is raised where a head is another model's."""
    return UsageError(f"{head} is no head for {model}", why, "Take a head that was trained for this very model.")
