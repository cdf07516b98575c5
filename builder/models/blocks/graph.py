"""Writes the dense graph of a decoder: standard ONNX nodes, named after the tensors that they use.

T is the number of tokens, P the number of positions before them; the batch is one sequence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from enginewright.builder.pooling import Pooling
from enginewright.builder.weights import Weights
from enginewright.plan import HIDDEN_BEFORE
from enginewright.plugins import DOMAIN, Plugin
from enginewright.plugins.elementwise.activation import ACTIVATION
from enginewright.plugins.elementwise.scale import SCALE
from enginewright.plugins.plugin import Dims, dims_of, width_of
from enginewright.plugins.writer import Attribute

OPSET = 24
IR_VERSION = 10
T, P = ir.SymbolicDim("T"), ir.SymbolicDim("P")


@dataclass(frozen=True)
class LayerCache:
    """Cache of a layer, by token."""

    kv_heads: int  # heads of keys and values
    head_dim: int  # columns of a head
    window: int  # positions that are read, including the query's own; 0 is all
    planes: tuple[str, ...] = ("key", "value")  # planes of kv_heads · head_dim numbers each


@dataclass(frozen=True)
class LayerState:
    """State of a recurrence in a layer."""

    tensors: Mapping[str, tuple[int, ...]]  # shapes of tensors by name


class GraphWriter:
    """Writes nodes in order; `finish` makes the model.

    Tensors are named without their `.weight` and `.bias`: `model.layers.0.mlp.up_proj`.

    Attributes:
        weights: initializers by tensor name.
        tokens: INT64 [1, T].
        positions: positions of the tokens, INT64 [1, T].
    """

    def __init__(self, weights: Weights, max_positions: int) -> None:
        """Starts an empty graph.

        Args:
            weights: weights of the checkpoint.
            max_positions: positions of the longest sequence.
        """
        self.weights = weights
        self.tokens = _input("tokens", ir.DataType.INT64, (1, T))
        self.positions = _input("positions", ir.DataType.INT64, (1, T))
        self._max_positions = max_positions
        self._nodes: list[ir.Node] = []
        self._constants: dict[str, ir.Value] = {}
        self._caches: dict[int, LayerCache] = {}
        self._states: dict[int, LayerState] = {}
        self._shared: dict[int, Sequence[ir.Value]] = {}
        self._types: list[ir.Value] = []
        self._hidden: list[ir.Value] = []
        self._past: list[ir.Value] = []
        self._present: list[ir.Value] = []
        self._layer_ends: list[ir.Value] = []
        self._pooling: Pooling | None = None

    def op(self, op_type: str, inputs: Sequence[ir.Value], name: str, dims: Dims, **attributes: Attribute) -> ir.Value:
        """Writes a standard op with one FLOAT output, named like the node.

        Args:
            op_type: type of the op.
            inputs: inputs.
            name: name of the node and of its output.
            dims: shape of the output.
            attributes: attributes of the op.
        """
        (output,) = self.node(op_type, inputs, name, [dims], **attributes).outputs
        return output

    def node(
        self, op_type: str, inputs: Sequence[ir.Value | None], name: str, dims: Sequence[Dims], **attributes: Attribute
    ) -> ir.Node:
        """Writes a standard op with FLOAT outputs.

        Args:
            op_type: type of the op.
            inputs: inputs.
            name: name of the node.
            dims: shape of each output.
            attributes: attributes of the op.
        """
        converted = [ir.convenience.convert_attribute(*item) for item in attributes.items()]
        outputs = [ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(own)) for own in dims]
        return self._append(ir.Node("", op_type, inputs, converted, outputs=outputs), name)

    def plugin(
        self, plugin: Plugin, inputs: Sequence[ir.Value | None], name: str, **attributes: int | float | str
    ) -> ir.Node:
        """Writes a plugin's op.

        Args:
            plugin: the plugin.
            inputs: inputs.
            name: name of the node and of its first output.
            attributes: attributes of the op.
        """
        return self._append(plugin.node(inputs, **attributes), name)

    def constant(self, name: str, data: npt.NDArray[np.generic]) -> ir.Value:
        """Returns a small initializer that is not a tensor of the checkpoint; the same one for the same name.

        Args:
            name: its name.
            data: its value.
        """
        if name not in self._constants:
            tensor = ir.tensor(data, name=name)
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(data.shape), const_value=tensor
            )
            self._constants[name] = value
        return self._constants[name]

    def split(self, x: ir.Value, name: str, *widths: int) -> list[ir.Value]:
        """Splits the columns of x.

        Args:
            x: value to split.
            name: name of the node.
            widths: number of columns of each part, in order.
        """
        sizes = self.constant(f"split_{'_'.join(map(str, widths))}", np.array(widths, np.int64))
        dims = [(*dims_of(x)[:-1], width) for width in widths]
        node = self.node("Split", [x, sizes], name, dims, axis=-1)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}.{index}"
        return list(node.outputs)

    def join(self, parts: Sequence[ir.Value], name: str) -> ir.Value:
        """Concatenates the columns of several values."""
        width = sum(map(width_of, parts))
        return self.op("Concat", parts, name, (*dims_of(parts[0])[:-1], width), axis=-1)

    def scale(self, x: ir.Value, tensor: str) -> ir.Value:
        """Writes x times the one number of a tensor (plugins/elementwise/scale.py)."""
        return self.plugin(SCALE, [x, self.weights.exact(tensor, 1)], short(tensor)).outputs[0]

    def activation(self, activation: str, x: ir.Value, name: str, gate: ir.Value | None = None) -> ir.Value:
        """Writes activation(x), or x · activation(gate) (plugins/elementwise/activation.py).

        Args:
            activation: name of the activation.
            x: input.
            name: name of the node.
            gate: gate; None: there is none.
        """
        inputs = [x] if gate is None else [x, gate]
        node = self.plugin(ACTIVATION, inputs, name, activation=activation, to=int(ir.DataType.FLOAT), group=0)
        return node.outputs[0]

    def linear(self, x: ir.Value, tensor: str, width: int, bias: bool = False) -> ir.Value:
        """Writes x · weightᵀ (+ bias), with as many rows as x.

        Args:
            x: input.
            tensor: name of the layer in the checkpoint.
            width: columns of the result.
            bias: True if the layer has a bias.
        """
        name, dims = short(tensor), (*dims_of(x)[:-1], width)
        weight = self.weights.tensor(f"{tensor}.weight", (width, width_of(x)))
        across = self.op("Transpose", [weight], f"{name}.transposed", (width_of(x), width), perm=[1, 0])
        if not bias:
            return self.op("MatMul", [x, across], name, dims)
        product = self.op("MatMul", [x, across], f"{name}.product", dims)
        return self.op("Add", [product, self.weights.tensor(f"{tensor}.bias", (width,))], name, dims)

    def add(self, x: ir.Value, delta: ir.Value) -> ir.Value:
        """Writes the sum of the residual x and the output of a part of a layer."""
        return self.op("Add", [x, delta], f"{delta.name}.residual", dims_of(x))

    def end_layer(self, x: ir.Value) -> None:
        """Marks the end of a layer: the next one, or the last norm, reads x (passes/first_layers.py)."""
        self._layer_ends.append(x)

    def past(self, layer: int, cache: LayerCache) -> list[ir.Value]:
        """Adds the inputs of a layer's past keys and values, [1, kv_heads, P, head_dim] each."""
        assert layer not in self._caches, f"layer {layer} has a cache already"
        self._caches[layer] = cache
        dims = (1, cache.kv_heads, P, cache.head_dim)
        past = [_input(f"past_{kind}.{layer}", ir.DataType.FLOAT, dims) for kind in cache.planes]
        self._past += past
        return past

    def present(self, layer: int, *values: ir.Value) -> None:
        """Makes these values the layer's next past, [1, kv_heads, P + T, head_dim] each."""
        for kind, value in zip(self._caches[layer].planes, values, strict=True):
            value.name = f"present_{kind}.{layer}"
        self._present += values

    def share(self, layer: int, values: Sequence[ir.Value]) -> None:
        """Keeps the inputs of a layer's attention, for the attention of other layers."""
        self._shared[layer] = values

    def shared(self, layer: int) -> Sequence[ir.Value]:
        """Returns the kept inputs of a layer's attention."""
        return self._shared[layer]

    def past_state(self, layer: int, state: LayerState) -> dict[str, ir.Value]:
        """Adds the inputs of a layer's recurrent state after all past positions, [1, …] each, by name."""
        assert layer not in self._states, f"layer {layer} has a state already"
        self._states[layer] = state
        past = {
            name: _input(f"past_{name}.{layer}", ir.DataType.FLOAT, (1, *shape))
            for name, shape in state.tensors.items()
        }
        self._past += past.values()
        return past

    def present_state(self, layer: int, **present: ir.Value) -> None:
        """Makes these values the layer's next past state."""
        for name, value in present.items():
            value.name = f"present_{name}.{layer}"
        self._present += present.values()

    def token_types(self) -> ir.Value:
        """Returns the input of token types: 0 for a token of the first text, 1 for the second, INT64 [1, T]."""
        if not self._types:
            self._types.append(_input("token_types", ir.DataType.INT64, (1, T)))
        return self._types[0]

    def hidden_before(self, width: int) -> ir.Value:
        """Adds the input of the model's hidden state of the token before each, FLOAT [1, T, width]."""
        self._hidden.append(_input(HIDDEN_BEFORE, ir.DataType.FLOAT, (1, T, width)))
        return self._hidden[0]

    def embeds(self, pooling: Pooling) -> None:
        """Makes this an embedding model: its result is one row per text instead of logits."""
        self._pooling = pooling
        self._max_positions = min(self._max_positions, pooling.max_tokens or self._max_positions)

    def finish(self, result: ir.Value) -> ir.Model:
        """Makes the model.

        Args:
            result: logits, or embeddings of texts.
        """
        result.name = "logits" if self._pooling is None else self._pooling.embedding.result
        graph = ir.Graph(
            [self.tokens, self.positions, *self._types, *self._hidden, *self._past],
            [result, *self._present],
            nodes=self._nodes,
            initializers=[*self.weights, *self._constants.values()],
            opset_imports={"": OPSET, DOMAIN: 1},
            name="decoder",
        )
        # Layers with equal caches share a group, and with it slots and block tables.
        groups = [
            {"layers": [layer for layer, own in self._caches.items() if own == cache], **asdict(cache)}
            for cache in dict.fromkeys(self._caches.values())
        ]
        states = list[dict[str, object]]()
        for state in self._states.values():
            entry = {"layers": [layer for layer, own in self._states.items() if own == state], **asdict(state)}
            if entry not in states:
                states.append(entry)
        metadata = {
            "enginewright.kv_groups": json.dumps(groups),
            "enginewright.state_groups": json.dumps(states),
            "enginewright.layer_ends": json.dumps([value.name for value in self._layer_ends]),
            "enginewright.max_seq_len": str(self._max_positions),
        }
        if self._pooling is not None:
            metadata["enginewright.embedding"] = self._pooling.embedding.to_json().decode()
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="enginewright", metadata_props=metadata)

    def _append(self, node: ir.Node, name: str) -> ir.Node:
        node.name = node.outputs[0].name = name
        self._nodes.append(node)
        return node


def short(tensor: str) -> str:
    """Returns the name of the node that uses a tensor, which is never a tensor's: experts may lack `.weight`."""
    return tensor.removeprefix("model.").removeprefix("mtp.")


def _input(name: str, dtype: ir.DataType, dims: Dims) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
