"""Ops of the domain `enginewright`: each has a schema, a reference in standard ops, and kernels by target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import onnx_ir as ir

from enginewright.dtypes import DTYPES, DType
from enginewright.errors import EngineError
from enginewright.plan import Cost
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.writer import Writer

DOMAIN = "enginewright"
# Types that mean nothing without their scale.
CODES: Mapping[ir.DataType, DType] = {ir.DataType[dtype.onnx]: dtype for dtype in DTYPES.values() if dtype.scale_bytes}
Dims = tuple[int | ir.SymbolicDim, ...]
TypeAndDims = tuple[ir.DataType, Dims]


@dataclass(frozen=True)
class WeightRows:
    """The order of rows in the matrices among a node's weights."""

    matrices: int | None = None  # matrices of the same size, one after another; None is one matrix
    gated: bool = False  # True if rows are gates, then ups, of which a kernel reads a pair at once


class ViewKind(Enum):
    """The way in which an op without a kernel renames columns of a matrix in memory."""

    COLUMNS = auto()  # outputs are columns of the input, one after another
    SHAPE = auto()  # the output is the input, with other dimensions
    JOINED = auto()  # inputs are columns of the output, one after another


@dataclass(frozen=True, kw_only=True)
class Op:
    """The facts about an op that passes and lowering need."""

    # Target's name → kernel. An op that is lowered to a view, or that a pass replaces before the end, has none.
    kernels: Mapping[str, KernelBinding] = field(default_factory=dict)
    view: ViewKind | None = None  # view that the op is lowered to; None if kernels run it
    by_rows: bool = False  # True if a row of the outputs depends only on the same row of the inputs, and on weights
    weight_rows: Callable[[ir.Node], WeightRows] = lambda _: WeightRows()  # order of rows in a node's weights
    whole_texts: Callable[[ir.Node], bool] = lambda _: False  # True if a node needs all tokens of a text in one step
    # counts the operations of a row of the outputs; None where they are few
    cost: Callable[[ir.Node], Cost] | None = None


@dataclass(frozen=True, kw_only=True)
class Plugin(Op):
    """An op of the domain `enginewright`."""

    name: str  # name of the op
    # Names in order. An input whose name ends in "?" may be absent. An output whose name ends in "?" is the scale of
    # codes, and exists if the attribute `to` is one of CODES.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # as `inputs`
    attributes: Mapping[str, type]  # name → type; every attribute is always written
    # Writes the node in standard ops and returns the values that replace its outputs: a function, so that it may depend
    # on optional inputs and attributes.
    reference: Callable[[Writer, ir.Node], Sequence[ir.Value]]
    infer: Callable[[ir.Node], Sequence[TypeAndDims]]  # infers dtype and dimensions of the outputs

    def check(self, node: ir.Node) -> None:
        """Checks that inputs, outputs and attributes of a node are those of the schema.

        Raises:
            EngineError: they are not; the message names the node and what does not fit.
        """
        given = [*node.inputs, *[None] * (len(self.inputs) - len(node.inputs))]
        absent = [name for name, value in zip(self.inputs, given, strict=False) if value is None and name[-1] != "?"]
        count = self._num_outputs({name: attribute.value for name, attribute in node.attributes.items()})
        types = {name: type(attribute.value) for name, attribute in node.attributes.items()}
        for wrong, why in (
            (len(given) > len(self.inputs), f"it has {len(given)} inputs, not {len(self.inputs)}"),
            (absent, f"it lacks {', '.join(absent)}"),
            (len(node.outputs) != count, f"it has {len(node.outputs)} outputs, not {count}"),
            (types != self.attributes, f"its attributes are {_listed(types)}, not {_listed(self.attributes)}"),
        ):
            if wrong:
                raise EngineError(f"node {node.name or self.name} is no {self.name}", why)

    def _num_outputs(self, attributes: Mapping[str, object]) -> int:
        absent = 0 if attributes.get("to") in CODES else sum(name[-1] == "?" for name in self.outputs)
        return len(self.outputs) - absent

    def node(self, inputs: Sequence[ir.Value | None], **attributes: int | float | str) -> ir.Node:
        """Makes a node of this op, checked, with its outputs typed and shaped.

        Args:
            inputs: inputs in the schema's order; None is absent.
            attributes: all attributes of the schema.
        """
        node = ir.Node(
            DOMAIN,
            self.name,
            inputs,
            [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()],
            num_outputs=self._num_outputs(attributes),
            version=1,
        )
        self.check(node)
        for output, (dtype, dims) in zip(node.outputs, self.infer(node), strict=True):
            output.type, output.shape = ir.TensorType(dtype), ir.Shape(dims)
        return node


def _listed(types: Mapping[str, type]) -> str:
    return ", ".join(f"{name}: {kind.__name__}" for name, kind in sorted(types.items())) or "none"


def operand(node: ir.Node, index: int) -> ir.Value:
    """Returns an input that must be present.

    Args:
        node: the node.
        index: index of the input.
    """
    value = node.inputs[index]
    assert value is not None, f"{node.name} lacks input {index}"
    return value


def optional(node: ir.Node, index: int) -> ir.Value | None:
    """Returns an input; None if it is absent.

    Args:
        node: the node.
        index: index of the input.
    """
    return node.inputs[index] if index < len(node.inputs) else None


def dims_of(value: ir.Value) -> Dims:
    """Returns the dimensions of a value, which must be known."""
    assert value.shape is not None, f"{value.name} has no shape"
    return value.shape.dims


def width_of(value: ir.Value) -> int:
    """Returns the last dimension of a value, which must be known."""
    width = dims_of(value)[-1]
    assert isinstance(width, int), f"{value.name} has an unknown width"
    return width


def dtype_of(value: ir.Value) -> ir.DataType:
    """Returns the number type of a value, which must be known."""
    assert value.dtype is not None, f"{value.name} has no dtype"
    return value.dtype


def int_of(node: ir.Node, name: str) -> int:
    """Returns an attribute that is a whole number.

    Args:
        node: the node.
        name: name of the attribute.
    """
    return node.attributes[name].as_int()


def float_of(node: ir.Node, name: str) -> float:
    """Returns an attribute that is a floating-point number.

    Args:
        node: the node.
        name: name of the attribute.
    """
    return node.attributes[name].as_float()


def dtype_attribute(node: ir.Node, name: str = "to") -> ir.DataType:
    """Returns an attribute that is a number type.

    Args:
        node: the node.
        name: name of the attribute.
    """
    return ir.DataType(node.attributes[name].as_int())
