"""Writes the dense graph of a decoder: standard ONNX nodes, named after the tensors that they use.

T is the number of tokens, P the number of positions before them; the batch is one sequence.
"""

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from enginewright.builder.models.common.rope import Rope
from enginewright.builder.models.common.sizes import Sizes
from enginewright.builder.weights import Weights
from enginewright.plugins import DOMAIN, Plugin
from enginewright.plugins.causal_window import CAUSAL_WINDOW
from enginewright.plugins.rope_table import ROPE_TABLE
from enginewright.plugins.softcap import SOFTCAP

OPSET = 24
IR_VERSION = 10
T, P = ir.SymbolicDim("T"), ir.SymbolicDim("P")
Dims = tuple[int | ir.SymbolicDim, ...]
Attribute = int | float | str | Sequence[int]


class GraphWriter:
    """Writes one node after the other; `finish` makes the model of them.

    Tensors are named without their `.weight` and `.bias`: `model.layers.0.mlp.up_proj`.
    """

    def __init__(self, weights: Weights, sizes: Sizes) -> None:
        self._weights = weights
        self._sizes = sizes
        self._nodes: list[ir.Node] = []
        self._constants: dict[str, ir.Value] = {}
        self._past: list[ir.Value] = []
        self._present: list[ir.Value] = []
        self._windows: list[int] = []
        self._tokens = _value("tokens", ir.DataType.INT64, (1, T))
        self._positions = _value("positions", ir.DataType.INT64, (1, T))

    def embedding(self, tensor: str, scale: float | None = None) -> ir.Value:
        """Rows of the table, times `scale`: [1, T, hidden]."""
        dims = (1, T, self._sizes.hidden)
        table = self._weights.table(f"{tensor}.weight", (self._sizes.vocab, self._sizes.hidden))
        rows = self._op("Gather", [table, self._tokens], _short(tensor), dims, axis=0)
        if scale is None:
            return rows
        factor = self._constant("embedding_scale", np.array(scale, np.float32))
        return self._op("Mul", [rows, factor], f"{_short(tensor)}.scaled", dims)

    def rms_norm(self, x: ir.Value, tensor: str, offset: float = 0.0) -> ir.Value:
        """x / rms(x) · (weight + offset), over the last dimension."""
        weight = self._weights.tensor(f"{tensor}.weight", (_width(x),), offset)
        return self._op("RMSNormalization", [x, weight], _short(tensor), _dims(x), axis=-1, epsilon=self._sizes.epsilon)

    def head_norm(self, x: ir.Value, tensor: str, offset: float = 0.0) -> ir.Value:
        """`rms_norm` of each head by itself."""
        heads, name = _width(x) // self._sizes.head_dim, _short(tensor)
        split = self._constant(f"split_{heads}_heads", np.array([0, 0, heads, self._sizes.head_dim], np.int64))
        joined = self._constant(f"joined_{heads}_heads", np.array([0, 0, _width(x)], np.int64))
        by_head = self._op("Reshape", [x, split], f"{name}.heads", (1, T, heads, self._sizes.head_dim))
        return self._op("Reshape", [self.rms_norm(by_head, tensor, offset), joined], f"{name}.joined", _dims(x))

    def linear(self, x: ir.Value, tensor: str, width: int, bias: bool = False) -> ir.Value:
        """x weightᵀ (+ bias): [1, T, width]."""
        name, dims = _short(tensor), (1, T, width)
        weight = self._weights.tensor(f"{tensor}.weight", (width, _width(x)))
        across = self._op("Transpose", [weight], f"{name}.transposed", (_width(x), width), perm=[1, 0])
        if not bias:
            return self._op("MatMul", [x, across], name, dims)
        product = self._op("MatMul", [x, across], f"{name}.product", dims)
        return self._op("Add", [product, self._weights.tensor(f"{tensor}.bias", (width,))], name, dims)

    def qkv(self, x: ir.Value, tensor: str, bias: bool = False) -> tuple[ir.Value, ir.Value, ir.Value]:
        """`q_proj`, `k_proj` and `v_proj` of an attention."""
        q = self.linear(x, f"{tensor}.q_proj", self._sizes.heads * self._sizes.head_dim, bias)
        k = self.linear(x, f"{tensor}.k_proj", self._sizes.kv_heads * self._sizes.head_dim, bias)
        v = self.linear(x, f"{tensor}.v_proj", self._sizes.kv_heads * self._sizes.head_dim, bias)
        return q, k, v

    def rope_table(self, rope: Rope, name: str = "rope") -> tuple[ir.Value, ir.Value]:
        """Cosines and sines of the positions, [1, T, head_dim / 2] each: `rotate` takes them."""
        inv_freq = self._constant(f"{name}.inv_freq", rope.inv_freq)
        node = self._plugin(ROPE_TABLE, [self._positions, inv_freq], name, scale=rope.scale)
        cos, sin = node.outputs
        cos.name, sin.name = f"{name}.cos", f"{name}.sin"
        return cos, sin

    def rotate(self, x: ir.Value, table: tuple[ir.Value, ir.Value]) -> ir.Value:
        """Rotary embedding of every head, first half against second half."""
        heads = _width(x) // self._sizes.head_dim
        return self._op("RotaryEmbedding", [x, *table], f"{x.name}.rotated", _dims(x), num_heads=heads)

    def attention(
        self, q: ir.Value, k: ir.Value, v: ir.Value, scale: float, softcap: float = 0.0, window: int = 0
    ) -> ir.Value:
        """Causal attention to the past and the new keys: [1, T, heads · head_dim]. Layers come in their order.

        window: how many positions a query sees, its own included; 0 is all. softcap: 0 is none.
        """
        layer, sizes = len(self._windows), self._sizes
        name, cache = f"layers.{layer}.attention", (1, sizes.kv_heads, P, sizes.head_dim)
        past = [_value(f"past_{kind}.{layer}", ir.DataType.FLOAT, cache) for kind in ("key", "value")]
        heads = {"q_num_heads": sizes.heads, "kv_num_heads": sizes.kv_heads}
        if window:
            node = self._plugin(
                CAUSAL_WINDOW, [q, k, v, *past], name, **heads, scale=scale, softcap=softcap, window=window
            )
        else:
            shapes = [_dims(q), *[(1, sizes.kv_heads, P + T, sizes.head_dim)] * 2]
            operands = [q, k, v, None, *past]
            node = self._node("Attention", operands, name, shapes, **heads, is_causal=1, scale=scale, softcap=softcap)
        y, *present = node.outputs
        y.name = name
        for value, kind in zip(present, ("key", "value"), strict=True):
            value.name = f"present_{kind}.{layer}"
        self._past += past
        self._present += present
        self._windows.append(window)
        return y

    def gated_mlp(self, x: ir.Value, tensor: str, activation: str, bias: bool = False) -> ir.Value:
        """down(activation(gate(x)) · up(x)): [1, T, hidden]. activation: one of sizes.ACTIVATIONS."""
        gate = self.linear(x, f"{tensor}.gate_proj", self._sizes.intermediate, bias)
        up = self.linear(x, f"{tensor}.up_proj", self._sizes.intermediate, bias)
        name, dims = _short(tensor), _dims(gate)
        if activation == "silu":
            sigmoid = self._op("Sigmoid", [gate], f"{name}.sigmoid", dims)
            active = self._op("Mul", [gate, sigmoid], f"{name}.active", dims)
        else:
            assert activation == "gelu_pytorch_tanh", activation
            active = self._op("Gelu", [gate], f"{name}.active", dims, approximate="tanh")
        gated = self._op("Mul", [active, up], f"{name}.gated", dims)
        return self.linear(gated, f"{tensor}.down_proj", self._sizes.hidden, bias)

    def add(self, x: ir.Value, delta: ir.Value) -> ir.Value:
        """The residual and what a part of the layer adds to it."""
        return self._op("Add", [x, delta], f"{delta.name}.residual", _dims(x))

    def head(self, x: ir.Value, tied_to: str | None, softcap: float = 0.0) -> ir.Value:
        """Logits [1, T, vocab]. tied_to: the embedding whose table is the head's weight; else it is `lm_head`."""
        if tied_to is not None:
            self._weights.ignore("lm_head.weight")
        logits = self.linear(x, tied_to or "lm_head", self._sizes.vocab)
        _rename(logits, "lm_head")
        return self._plugin(SOFTCAP, [logits], "lm_head.softcap", cap=softcap).outputs[0] if softcap else logits

    def finish(self, logits: ir.Value) -> ir.Model:
        logits.name = "logits"
        graph = ir.Graph(
            [self._tokens, self._positions, *self._past],
            [logits, *self._present],
            nodes=self._nodes,
            initializers=[*self._weights, *self._constants.values()],
            opset_imports={"": OPSET, DOMAIN: 1},
            name="decoder",
        )
        metadata = {
            "enginewright.kv_groups": json.dumps(self._kv_groups()),
            "enginewright.max_seq_len": str(self._sizes.max_positions),
        }
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="enginewright", metadata_props=metadata)

    def _kv_groups(self) -> list[dict[str, int | list[int]]]:
        """Layers with the same window share a group, and with it slots and block tables."""
        return [
            {
                "layers": [layer for layer, own in enumerate(self._windows) if own == window],
                "kv_heads": self._sizes.kv_heads,
                "head_dim": self._sizes.head_dim,
                "window": window,
            }
            for window in dict.fromkeys(self._windows)
        ]

    def _constant(self, name: str, data: npt.NDArray[np.generic]) -> ir.Value:
        """A small initializer of our own; one a name."""
        if name not in self._constants:
            tensor = ir.tensor(data, name=name)
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(data.shape), const_value=tensor
            )
            self._constants[name] = value
        return self._constants[name]

    def _op(self, op_type: str, inputs: Sequence[ir.Value], name: str, dims: Dims, **attributes: Attribute) -> ir.Value:
        (output,) = self._node(op_type, inputs, name, [dims], **attributes).outputs
        output.name = name
        return output

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value | None], name: str, dims: Sequence[Dims], **attributes: Attribute
    ) -> ir.Node:
        converted = [ir.convenience.convert_attribute(*item) for item in attributes.items()]
        outputs = [ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(own)) for own in dims]
        node = ir.Node("", op_type, inputs, converted, outputs=outputs, name=name)
        self._nodes.append(node)
        return node

    def _plugin(self, plugin: Plugin, inputs: Sequence[ir.Value], name: str, **attributes: int | float) -> ir.Node:
        node = plugin.node(inputs, **attributes)
        node.name = name
        node.outputs[0].name = name
        self._nodes.append(node)
        return node


def _value(name: str, dtype: ir.DataType, dims: Dims) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


def _rename(value: ir.Value, name: str) -> None:
    node = value.producer()
    assert node is not None
    node.name = value.name = name


def _short(tensor: str) -> str:
    return tensor.removeprefix("model.")


def _dims(x: ir.Value) -> Dims:
    assert x.shape is not None
    return x.shape.dims


def _width(x: ir.Value) -> int:
    width = _dims(x)[-1]
    assert isinstance(width, int)
    return width
