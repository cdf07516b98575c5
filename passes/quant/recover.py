"""Recovers quality that quantization has lost: trains scales and norms until the model's logits are its source's again.

Codes stay as the method has chosen them. What is trained is a factor on the scale of each group of weights and on each
number of a norm, end to end, by the KL divergence of next-token distributions from those of the source, on texts that
the quality gate does not read (the second phase of EfficientQAT, https://arxiv.org/abs/2407.11062). The quantized model
is computed as the engine does it: inputs of linear layers are rounded, and scales are in the engine's number type;
gradients pass through both roundings unchanged (https://arxiv.org/abs/1308.3432).

Each text is computed by one thread, and gradients are added in the order of the texts, so that results do not depend on
the number of threads. They do depend on the instruction set, as those of other calibrated methods do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from enginewright.errors import UsageError
from enginewright.passes.graph import LinearLayer, head_of, linear_of, linears_of
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import Calibration, QuantConfig, StoredTensor, stored
from enginewright.passes.streaming import Streamed, nodes_before_head, shared_operand, single_threaded_pool, stream
from enginewright.passes.temporary_tensors import TemporaryTensors
from enginewright.passes.torch_ops import compute_of
from enginewright.passes.weights import RowsTensor, origin_of, read, shape_of
from enginewright.plugins.plugin import DOMAIN

BATCH = 4  # texts of a step
HELD_OUT = 8  # number of texts of which one is held out, and says when to stop
LOOK_STEPS = 10  # steps between two looks at the held-out texts
PATIENCE = 3  # looks without an improvement after which training stops
RATE, WARM_UP_STEPS = 2e-3, 10  # learning rate of the logarithms of factors, which begins small and falls to 0
BETAS, EPSILON = (0.9, 0.99), 1e-8  # Adam's, https://arxiv.org/abs/1412.6980
# Ops that keep a state, which is overwritten token by token, or that send rows to experts.
_REFUSED: Mapping[str, str] = {
    "GatedDelta": "its recurrent layers have no gradients here",
    "SelectiveState": "its recurrent layers have no gradients here",
    "GroupedLinear": "experts are not trained",
}


@dataclass(frozen=True)
class Recover:
    """Trains the scales of quantized weights, and norms."""

    config: QuantConfig  # method of weights that no pass before this one has chosen codes for
    calibration: Calibration  # texts
    steps: int  # maximum number of steps, each over BATCH texts
    stepped: Callable[[int], None] = lambda steps: None  # called after each step with 1, for progress
    name: str = "recover"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        check_recoverable(model)
        texts = self.calibration.recovery_texts
        held_out = texts[::HELD_OUT]
        training = [text for index, text in enumerate(texts) if index % HELD_OUT]
        source = stream(_source_of(model), [*held_out, *training], None, self.calibration.threads)
        student = _Student(model, self.config)
        if not student.weights:
            raise UsageError("--recover is not possible", f"{self.config.name} has no scales that could be trained")
        train = _Training(student, source, [*held_out, *training], len(held_out), self.calibration.threads)
        before = train.loss_of_held_out()
        best, kept, waited, step = before, student.copy(), 0, 0
        for step in range(self.steps):
            train.step(step, self.steps)
            self.stepped(1)
            if step % LOOK_STEPS != LOOK_STEPS - 1 and step != self.steps - 1:
                continue
            loss = train.loss_of_held_out()
            waited = 0 if loss < best else waited + 1
            if loss < best:
                best, kept = loss, student.copy()
            elif waited == PATIENCE:
                break
        student.restore(kept)
        student.store(TemporaryTensors(self.calibration.folder))
        fact = (
            f"Recovered from the source: KL {before:.4g} → {best:.4g} on texts that were held out, in {step + 1} steps."
        )
        return PassResult(len(student.weights), facts=(fact,))


def check_recoverable(model: ir.Model) -> None:
    """Checks that a dense graph has gradients.

    Raises:
        UsageError: it has none; the message says why.
    """
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type in _REFUSED:
            raise UsageError("--recover does not work with this model yet", _REFUSED[node.op_type], "Leave it out.")
    if head_of(model) is None:
        raise UsageError("--recover is for models that write text", "an embedding model has no logits", "Leave it out.")


@dataclass(frozen=True)
class CheckRecoverable:
    """Checks what Recover would, where there are no texts."""

    name: str = "recover"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        check_recoverable(model)
        return PassResult(0)


def _source_of(model: ir.Model) -> ir.Model:
    """Copies a graph, with the numbers from which codes were chosen."""
    source = model.clone()
    for value in source.graph.initializers.values():
        tensor = stored(value)
        if tensor is not None and tensor.source is not None:
            value.const_value = tensor.source
    return source


@dataclass
class _Weight:
    """A quantized weight whose scale is trained."""

    value: ir.Value  # initializer of the graph
    tensor: StoredTensor  # its codes, scales and zero points
    parts: Sequence[torch.Tensor]  # codes, initial scales, and zero points if there are any
    change: torch.Tensor  # logarithm of the factor on each scale

    def scale(self) -> torch.Tensor:
        """The trained scale, rounded to the engine's number type; gradients pass through the rounding."""
        exact = self.parts[1].float() * self.change.exp()
        return exact + (exact.to(self.parts[1].dtype).float() - exact).detach()


@dataclass
class _Norm:
    """A norm whose numbers are trained."""

    value: ir.Value  # initializer of the graph
    initial: torch.Tensor  # numbers of the source
    change: torch.Tensor  # logarithm of the factor on each

    def numbers(self) -> torch.Tensor:
        """The trained numbers."""
        return self.initial * self.change.exp()


@dataclass
class _Student:
    """The quantized model."""

    model: ir.Model  # dense graph
    config: QuantConfig  # method of weights without codes
    weights: dict[ir.Value, _Weight] = field(default_factory=dict)
    norms: dict[ir.Value, _Norm] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = head_of(self.model)
        assert head is not None, "check_recoverable has seen it"
        self.head = head
        for linear in linears_of(self.model):
            if linear.weight is not head.weight and linear.weight not in self.weights:
                self._add(linear)
        for node in self.model.graph:
            if node.op_type == "RMSNormalization" and node.domain == "" and node.inputs[1] is not None:
                numbers = read(node.inputs[1]).float().clone()
                self.norms[node.inputs[1]] = _Norm(node.inputs[1], numbers, _zeros(numbers))

    def _add(self, linear: LinearLayer) -> None:
        value = linear.weight
        tensor = stored(value)
        if tensor is None:
            parts = self.config.weights(value)
            tensor = StoredTensor(str(value.name), self.config, parts)
        parts_read = [read(part).clone() for part in tensor.parts]
        if len(parts_read) > 1 and parts_read[1].is_floating_point() and parts_read[1].element_size() > 1:
            self.weights[value] = _Weight(value, tensor, parts_read, _zeros(parts_read[1]))

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All logarithms that are trained."""
        return [*(one.change for one in self.weights.values()), *(one.change for one in self.norms.values())]

    def copy(self) -> list[torch.Tensor]:
        """Copies the logarithms."""
        return [one.detach().clone() for one in self.leaves]

    def restore(self, kept: Sequence[torch.Tensor]) -> None:
        """Takes logarithms back that `copy` has returned."""
        for one, value in zip(self.leaves, kept, strict=True):
            one.data.copy_(value)

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """Computes the input of the head for a text, [tokens, H]."""
        given = {"tokens": torch.tensor([tokens]), "positions": torch.arange(len(tokens)).unsqueeze(0)}
        values: dict[ir.Value, torch.Tensor] = {
            one: given[one.name] for one in self.model.graph.inputs if one.name in given
        }
        for node in nodes_before_head(self.model, self.head):
            linear = linear_of(node.outputs[0]) if node.op_type == "MatMul" else None
            if linear is not None and linear.weight in self.weights:
                outputs: tuple[torch.Tensor, ...] = (self._product(self.weights[linear.weight], values[linear.x]),)
            else:
                outputs = compute_of(node)(node, *(self._operand(node, one, values) for one in node.inputs))
            values.update(zip(node.outputs, outputs, strict=False))
        return values[self.head.x][0]

    def _operand(self, node: ir.Node, value: ir.Value | None, values: Mapping[ir.Value, torch.Tensor]) -> object:
        if value is not None and value in values:
            return values[value]
        if value is not None and value in self.norms:
            return self.norms[value].numbers()
        return shared_operand(node, value)

    def _product(self, weight: _Weight, x: torch.Tensor) -> torch.Tensor:
        """Multiplies rounded activations with a weight, which is restored again for its gradients, and not kept."""
        config, codes, *zeros = weight.tensor.stored_as, weight.parts[0], *weight.parts[2:]
        rounded = x + (config.round_activations(x.detach()) - x.detach())

        def product(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return F.linear(x, config.restore(codes, scale, *zeros))

        result: torch.Tensor = checkpoint(
            product, rounded, weight.scale(), use_reentrant=False, preserve_rng_state=False
        )
        return result

    def store(self, temporary: TemporaryTensors) -> None:
        """Puts what was trained into the graph."""
        with torch.no_grad():
            for one in self.weights.values():
                rows, columns = shape_of(one.value)
                name, config = str(one.value.name), one.tensor.stored_as
                scale = one.scale().to(one.parts[1].dtype)
                values = [one.parts[0], scale, *one.parts[2:]]
                parts = [temporary.add(*pair) for pair in zip(config.outputs(name, rows, columns), values, strict=True)]
                tensor = StoredTensor(name, config, parts, source=one.value.const_value)
                tensor.set_origin(origin_of(one.value))
                one.value.const_value = tensor
            for norm in self.norms.values():
                name, numbers = str(norm.value.name), norm.numbers().detach()
                norm.value.const_value = RowsTensor(
                    name, torch.float32, tuple(numbers.shape), partial(_reader_of, numbers)
                )


class _Training:
    """Steps of Adam over texts."""

    def __init__(
        self, student: _Student, source: Streamed, texts: Sequence[Sequence[int]], held_out: int, threads: int
    ) -> None:
        self._student, self._source, self._texts = student, source, texts
        self._held_out, self._threads = held_out, threads
        self._first = [torch.zeros_like(one) for one in student.leaves]
        self._second = [torch.zeros_like(one) for one in student.leaves]

    def loss_of_held_out(self) -> float:
        """Mean KL divergence over the held-out texts."""

        def loss(text: int) -> float:
            with torch.no_grad():  # the mode belongs to a thread
                return float(self._loss(text))

        with single_threaded_pool(self._threads) as pool:
            losses = list(pool.map(loss, range(self._held_out)))
        return math.fsum(losses) / len(losses)

    def step(self, step: int, steps: int) -> None:
        """Makes a step.

        Args:
            step: its number, from 0.
            steps: number of all steps.
        """
        count = len(self._texts) - self._held_out
        chosen = [self._held_out + (step * BATCH + index) % count for index in range(BATCH)]
        leaves = self._student.leaves
        with single_threaded_pool(self._threads) as pool:
            gradients = list(pool.map(self._gradients, chosen))
        rate = RATE * min(1, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))
        with torch.no_grad():
            for index, leaf in enumerate(leaves):
                gradient = torch.stack([one[index] for one in gradients]).mean(0)
                first, second = self._first[index], self._second[index]
                first.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
                second.mul_(BETAS[1]).add_(gradient.square(), alpha=1 - BETAS[1])
                mean, square = first / (1 - BETAS[0] ** (step + 1)), second / (1 - BETAS[1] ** (step + 1))
                leaf.sub_(rate * mean / (square.sqrt() + EPSILON))

    def _gradients(self, text: int) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self._loss(text), self._student.leaves)

    def _loss(self, text: int) -> torch.Tensor:
        """Mean KL divergence of next-token distributions from the source's over a text."""
        length = len(self._texts[text])
        wanted = F.log_softmax(self._source.logits(text, 0, length), dim=-1).clone()
        found = F.log_softmax(self._source.logits_of(self._student.hidden(self._texts[text])), dim=-1)
        return F.kl_div(found, wanted, reduction="sum", log_target=True) / length


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.float32).requires_grad_()


def _reader_of(values: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda begin, end: values[begin:end]
