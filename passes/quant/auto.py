"""`--quant auto --bits 4.5`: each layer in a format of its own, with a given number of bits for a weight on average.

The sensitivity of a layer to 4 bits is measured, one layer at a time: how far do the model's next-token distributions
move with that layer rounded and all others exact? The cost of the same layer in another format is estimated as that,
times the ratio of the errors in its own result. Then bits are spent where they help most, one step of one layer after
another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import ClassVar

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright import quant_methods
from enginewright.errors import UsageError
from enginewright.passes.graph import LinearLayer, head_of, linears_of
from enginewright.passes.pass_manager import Pass, PassResult
from enginewright.passes.quant.bf16 import Bf16
from enginewright.passes.quant.choose import Choose
from enginewright.passes.quant.int4_awq import by_importance, smooth_by_mean
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.method import Calibration, QuantConfig, StoredTensor, stored
from enginewright.passes.quant.smooth import SmoothWithoutData
from enginewright.passes.quant.w8a8 import W8A8
from enginewright.passes.streaming import Replacements, Substitute, stream
from enginewright.passes.weights import open_rows, shape_of
from enginewright.quant_methods import MethodInfo

FORMATS: tuple[QuantConfig, ...] = (Int4Rtn(128), Int4Rtn(64), Int4Rtn(32), W8A8(32), Bf16())
# formats, from the smallest on
MEASURED = FORMATS[1]
PROBE_TOKENS = 256  # tokens of a probe: the text with one layer rounded
TOKENS_AT_ONCE = 8192  # tokens of all probes that stream together


@dataclass(frozen=True)
class Auto(W8A8):
    """Mixed formats within a budget of bits."""

    info: ClassVar[MethodInfo] = quant_methods.AUTO  # facts that need no torch
    # bits of a weight of linear layers, on average, scales included; the head and embeddings are int8 and not counted
    bits: str = "5"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            usable = 4 < Decimal(self.bits) <= 16
        except InvalidOperation:
            usable = False
        if not usable:
            raise UsageError(
                f"--bits {self.bits} is not possible",
                "formats take more than 4 bits a weight, and 16 at most",
                "Use a number such as 4.6.",
            )

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        """Lists the passes that smooth, and that mix formats within the budget."""
        return [smooth_by_mean(MEASURED, calibration), Mix(float(self.bits), calibration)]

    def plan_without_data(self) -> Sequence[Pass]:
        """Lists the passes that scale without texts, and that mix formats as if all layers were equally sensitive."""
        return [SmoothWithoutData(), MixWithoutData(float(self.bits))]


@dataclass(frozen=True)
class Mix:
    """Chooses the format of every linear layer but the head, and its codes."""

    bits: float  # bits of a weight, on average
    calibration: Calibration  # texts
    name: str = "mix_formats"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        weights = free_weights(model)
        costs = measured(model, weights, self.calibration)
        formats = assigned(weights, costs, self.bits)
        return Choose(formats.__getitem__, self.calibration, by_importance)(model)


@dataclass(frozen=True)
class MixWithoutData:
    """Spends the bits as if all layers were equally sensitive, and chooses no codes."""

    bits: float  # bits of a weight, on average
    name: str = "mix_formats"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        weights = free_weights(model)
        alike = {weight: [float(-index) for index in range(len(FORMATS))] for weight in weights}
        for weight, config in assigned(weights, alike, self.bits).items():
            source = ir.Value(name=weight.name, type=weight.type, shape=weight.shape, const_value=weight.const_value)
            weight.const_value = StoredTensor(str(weight.name), config, config.weights(source))
        return PassResult(len(weights))


def free_weights(model: ir.Model) -> list[ir.Value]:
    """Lists the weights of linear layers but the head that are not quantized yet."""
    head = head_of(model)
    assert head is not None, "embedding models are not built with --quant auto"
    return [
        linear.weight for linear in linears_of(model) if linear.weight is not head.weight and not stored(linear.weight)
    ]


Costs = Mapping[ir.Value, Sequence[float]]  # weight → increase of the divergence in each of FORMATS, in nats


def measured(model: ir.Model, weights: Sequence[ir.Value], calibration: Calibration) -> Costs:
    """Measures the cost of each weight in each of FORMATS.

    Args:
        model: the dense graph.
        weights: weights of its linear layers.
        calibration: texts.
    """
    text = [token for one in calibration.texts for token in one][:PROBE_TOKENS]
    at_once = max(TOKENS_AT_ONCE // max(len(text), 1) - 1, 1)
    costs: dict[ir.Value, Sequence[float]] = {}
    for begin in range(0, len(weights), at_once):
        costs |= _probe(model, weights[begin : begin + at_once], text, calibration.threads)
    return costs


def _probe(model: ir.Model, weights: Sequence[ir.Value], text: Sequence[int], threads: int) -> Costs:
    """Streams one text for each weight, with only that weight rounded, and one with none rounded."""
    errors: dict[ir.Value, Sequence[float]] = {}

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Replacements | None:
        if linear.weight not in weights:
            return None
        rows, name = open_rows(linear.weight), str(linear.weight.name)
        errors[linear.weight] = _errors(linear, inputs)

        def rounded(begin: int, end: int) -> torch.Tensor:
            return MEASURED.restore(*MEASURED.quantize(rows(begin, end), name))

        return {1 + weights.index(linear.weight): Substitute(MEASURED.round_activations, rounded)}

    streamed = stream(model, [text] * (1 + len(weights)), visit, threads)
    exact = streamed.logits(0, 0, len(text)).double().log_softmax(-1)
    costs: dict[ir.Value, Sequence[float]] = {}
    for index, weight in enumerate(weights, start=1):
        other = streamed.logits(index, 0, len(text)).double().log_softmax(-1)
        divergence = float((exact.exp() * (exact - other)).sum(-1).mean())
        own = errors[weight][FORMATS.index(MEASURED)]
        costs[weight] = [divergence * error / own if own else 0.0 for error in errors[weight]]
    return costs


def _errors(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> list[float]:
    """Computes the squared error of a layer's result in each of FORMATS, over the first text and all experts."""
    rows, errors = open_rows(linear.weight), [0.0] * len(FORMATS)
    count = shape_of(linear.weight)[0] // linear.experts
    for expert in range(linear.experts):
        x = linear.rows_of(expert, inputs)[0]
        if not len(x):
            continue
        weight = rows(expert * count, (expert + 1) * count)
        exact = F.linear(x, weight)
        for index, config in enumerate(FORMATS):
            kept = config.restore(*config.quantize(weight, "weight"))
            errors[index] += float((F.linear(config.round_activations(x), kept) - exact).double().square().sum())
    return errors


def bits_of(config: QuantConfig, weight: ir.Value) -> int:
    """Counts the bits of all tensors of a weight in a format; codes of 4 bits are bytes until they are packed.

    Args:
        config: the format.
        weight: the weight.
    """
    outputs = config.outputs("weight", *shape_of(weight))
    return sum(
        torch.Size(shape).numel() * (4 if dtype == torch.uint8 else 8 * dtype.itemsize) for _, dtype, shape in outputs
    )


def assigned(weights: Sequence[ir.Value], costs: Costs, bits: float) -> dict[ir.Value, QuantConfig]:
    """Assigns a format to each weight within a budget.

    Args:
        weights: the weights.
        costs: cost of each weight in each of FORMATS.
        bits: bits of a weight, on average.

    Raises:
        UsageError: even the smallest format takes more bits.
    """
    sizes = {weight: [bits_of(config, weight) for config in FORMATS] for weight in weights}
    elements = sum(torch.Size(shape_of(weight)).numel() for weight in weights)
    left = bits * elements - sum(size[0] for size in sizes.values())
    if left < 0:
        min_bits = sum(size[0] for size in sizes.values()) / elements
        raise UsageError(
            f"--bits {bits} is not possible",
            f"the smallest format takes {min_bits:.3f} bits a weight",
            f"Use {min_bits + 0.005:.2f} or more.",
        )
    chosen = dict.fromkeys(weights, 0)
    while True:
        steps = [
            ((costs[weight][now] - costs[weight][then]) / (size[then] - size[now]), -index, then)
            for index, (weight, now) in enumerate(chosen.items())
            for size in [sizes[weight]]
            for then in range(now + 1, len(FORMATS))
            if 0 < size[then] - size[now] <= left and costs[weight][then] < costs[weight][now]
        ]
        if not steps:
            return {weight: FORMATS[index] for weight, index in chosen.items()}
        _, index, then = max(steps)
        weight = weights[-index]
        left -= sizes[weight][then] - sizes[weight][chosen[weight]]
        chosen[weight] = then
