"""Dense graphs of tiny models, and their execution in onnxruntime."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from enginewright.builder.models import build_graph
from enginewright.passes.graph import nodes_of
from enginewright.passes.pass_manager import Pass, run_passes
from enginewright.passes.pipeline import pipeline
from enginewright.passes.quant import METHODS, Bf16, QuantConfig
from enginewright.plugins.plugin import DOMAIN
from tests.helpers.onnx_run import Array, Oracle
from tests.helpers.tiny import MemoryCheckpoint

# Methods that look at activations write the formats of these, and have tests of their own.
QUANTS: list[QuantConfig] = [method() for method in METHODS if not method.info.calibrated]

# What passes meet: biases on some layers or all, tied and separate heads, norms by head, norms on both sides, windows,
# one and several KV groups, soft caps, one kv head and many. Name → family and what differs from its tiny_config.
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    # All experts: a rounding that changes who is chosen is no small error.
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1], "num_experts_per_tok": 7}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma2, capped": ("gemma2", {"attn_logit_softcapping": 1.5, "head_dim": 10, "tie_word_embeddings": False}),
}

# The same for layers that carry a state, in a graph with others that attend.
STATE_CASES: dict[str, tuple[str, dict[str, object]]] = {
    "lfm2": ("lfm2", {"conv_bias": True}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "nemotron_h": ("nemotron_h", {}),
}


@cache
def checkpoint_of(case: str) -> MemoryCheckpoint:
    family, overrides = (CASES | STATE_CASES)[case]
    return MemoryCheckpoint.tiny(family, **overrides)


def dense_graph(case: str) -> ir.Model:
    return build_graph(checkpoint_of(case))


def passes_before(name: str, quant: QuantConfig | None = None, kv_dtype: str = "bf16") -> tuple[list[Pass], Pass]:
    """The passes that come before the first one of a name, and that one."""
    passes = pipeline(quant or Bf16(), kv_dtype)
    at = [each.name for each in passes].index(name)
    return passes[:at], passes[at]


def graph_before(
    case: str, name: str, quant: QuantConfig | None = None, kv_dtype: str = "bf16"
) -> tuple[ir.Model, Pass]:
    """The graph of a case before a pass of the pipeline, and the pass."""
    model = dense_graph(case)
    earlier, own = passes_before(name, quant, kv_dtype)
    run_passes(model, earlier)
    return model, own


@dataclass
class DenseRun:
    """A dense graph and one sequence in it: the present of a step is the next one's past."""

    model: ir.Model
    length: int = field(init=False)
    past: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self._oracle = Oracle(self.model)
        self.begin()

    def begin(self) -> None:
        """Forgets the sequence, for another one."""
        self.length = 0
        self.past = {
            str(value.name): np.zeros(
                [0 if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape], np.float32
            )
            for value in self.model.graph.inputs
            if str(value.name).startswith("past_") and value.shape is not None
        }

    def step(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> Array:
        """Runs the next tokens; gives their logits, [n, V]."""
        positions = np.arange(self.length, self.length + len(tokens))
        feeds = {"tokens": np.array(tokens, np.int64)[None], "positions": positions[None], **self.past}
        outputs = self._oracle(feeds)
        self.length += len(tokens)
        logits = outputs.pop("logits")[0]
        self.past = {name.replace("present", "past"): value for name, value in outputs.items()}
        return logits


Content = tuple[list[tuple[object, ...]], dict[int, bytes]]


def content(model: ir.Model) -> Content:
    """Nodes and weights of a graph, with the names of values replaced by numbers in the order of their first use."""
    graph, numbers = ir.to_proto(model).graph, dict[str, int]()

    def numbered(names: Iterable[str]) -> list[int]:
        return [numbers.setdefault(name, len(numbers)) for name in names]

    nodes: list[tuple[object, ...]] = [
        (node.op_type, numbered(node.input), numbered(node.output), [one.SerializeToString() for one in node.attribute])
        for node in graph.node
    ]
    return nodes, {numbers[one.name]: one.raw_data for one in graph.initializer}


def random_tokens(count: int, seed: int, vocab_size: int = 307) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab_size, count)


def relative_error(actual: Array, expected: Array) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>): 0 if they are equal, 1 if they have nothing in common; one wrong row shows."""
    x, y = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum()))


def with_noise(model: ir.Model, size: float) -> ir.Model:
    """A ragged graph whose attention is off as kernels' is: by a random share of itself, its deviation `size`."""
    noisy = model.clone()
    random = np.random.default_rng(0)
    for node in nodes_of(noisy, "PagedAttention", "LatentPagedAttention", domain=DOMAIN):
        (exact,) = node.outputs
        assert exact.shape is not None and exact.dtype is not None
        factors = (1 + size * random.standard_normal(exact.shape[-1])).astype(np.float32)
        factor = ir.node("Constant", [], {"value": ir.tensor(factors)})
        wide = ir.node("Cast", [exact], {"to": ir.DataType.FLOAT})
        scaled = ir.node("Mul", [wide.outputs[0], factor.outputs[0]])
        off = ir.node("Cast", [scaled.outputs[0]], {"to": exact.dtype})
        off.outputs[0].type, off.outputs[0].shape = exact.type, exact.shape
        noisy.graph.insert_after(node, [factor, wide, scaled, off])
        ir.convenience.replace_all_uses_with(exact, off.outputs[0])
        wide.replace_input_with(0, exact)
    return noisy


def norm_of_everything(model: ir.Model) -> None:
    """Makes a layer's norm one over more than the last axis."""
    model.graph.node("layers.1.input_layernorm").attributes.add(ir.AttrInt64("axis", 1))
