"""Writes nodes one after another: a reference defines its op with it in standard ops."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# A Python int (or several) is an INT64 constant, a float for a FLOAT scalar; None for an absent input.
OpInput = ir.Value | npt.NDArray[np.generic] | Sequence[int] | int | float | None
Attribute = int | float | str | Sequence[int]


class Writer:
    """Collects nodes in `nodes`, in order."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: OpInput, **attributes: Attribute) -> ir.Value:
        """Writes a standard op with one output.

        Args:
            op_type: name of the op.
            inputs: its inputs.
            attributes: its attributes.
        """
        (output,) = self.ops(op_type, *inputs, outputs=1, **attributes)
        return output

    def ops(self, op_type: str, *inputs: OpInput, outputs: int, **attributes: Attribute) -> Sequence[ir.Value]:
        """Writes a standard op with several outputs.

        Args:
            op_type: name of the op.
            inputs: its inputs.
            outputs: number of its outputs.
            attributes: its attributes.
        """
        values = [
            operand if operand is None or isinstance(operand, ir.Value) else self.constant(operand)
            for operand in inputs
        ]
        return self.append(
            op_type, values, [ir.convenience.convert_attribute(*item) for item in attributes.items()], outputs
        )

    def scan(
        self,
        name: str,
        body: "Callable[[Writer, Sequence[ir.Value], Sequence[ir.Value]], Sequence[ir.Value]]",
        states: Sequence[ir.Value],
        scanned: Sequence[ir.Value],
    ) -> Sequence[ir.Value]:
        """Writes a Scan along the first dimension of `scanned`.

        Args:
            name: prefix of the values inside, which no others of the graph may have.
            body: (writer, states, a row of each) → the states after it, and rows of results. It may read other values.
            states: initial states.
            scanned: values of the same length.

        Returns:
            The last states, and the rows of each result stacked.
        """
        inner = Writer()
        inputs = [ir.Value(name=f"{name}.state.{index}", type=one.type) for index, one in enumerate(states)]
        rows = [ir.Value(name=f"{name}.row.{index}", type=one.type) for index, one in enumerate(scanned)]
        outputs = body(inner, inputs, rows)
        written = (value for node in inner.nodes for value in node.outputs)
        for index, value in enumerate(written):
            value.name = f"{name}.inside.{index}"
        graph = ir.Graph([*inputs, *rows], outputs, nodes=inner.nodes, name=f"{name}.body")
        attributes = [ir.AttrGraph("body", graph), ir.AttrInt64("num_scan_inputs", len(rows))]
        return self.append("Scan", [*states, *scanned], attributes, len(outputs))

    def constant(self, data: npt.NDArray[np.generic] | Sequence[int] | int | float) -> ir.Value:
        """Writes a constant."""
        if isinstance(data, np.ndarray):
            array = data
        else:
            array = np.array(data, np.float32 if isinstance(data, float) else np.int64)
        (output,) = self.append("Constant", [], [ir.AttrTensor("value", ir.tensor(array))])
        return output

    def cast(self, value: OpInput, to: ir.DataType) -> ir.Value:
        """Writes a Cast.

        Args:
            value: the value.
            to: its new type.
        """
        return self.op("Cast", value, to=to.value)

    def round_to(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Rounds a FLOAT value to `dtype`; FLOAT stays as it is.

        Args:
            value: the value.
            dtype: its new type.
        """
        return value if dtype == ir.DataType.FLOAT else self.cast(value, dtype)

    def append(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr], outputs: int = 1
    ) -> Sequence[ir.Value]:
        """Writes a standard op whose attributes are not plain values, such as graphs.

        Args:
            op_type: name of the op.
            inputs: its inputs.
            attributes: its attributes.
            outputs: number of its outputs.
        """
        node = ir.Node("", op_type, inputs, attributes, num_outputs=outputs)
        self.nodes.append(node)
        return node.outputs
