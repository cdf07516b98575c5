"""Rotates activations by orthogonal matrices that go into weights, so that no channel is far larger than others.

Codes of few bits lose the most where some channels are outliers. A rotation spreads these over all channels, and
weights become alike, too (QuaRot, https://arxiv.org/abs/2404.00456; SpinQuant, https://arxiv.org/abs/2405.16406):

    the residual stream    RMSNorm(x Q) = RMSNorm(x) Q, if the norm has no weights: these move into the layers that read
                           it. What writes into the stream is multiplied by Q, and what reads it by its inverse
    values of attention    the same for each head: rows of V, and columns of the projection after attention

Nothing of this costs a step anything, but for a head that shares its table with the embedding: there the stream is
rotated by a small product after the embedding, and rotated back before the last norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
import torch

from enginewright.errors import UsageError
from enginewright.passes.graph import LinearLayer, head_of, linear_of, made_by, nodes_of, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.bf16 import Bf16
from enginewright.passes.quant.method import StoredTensor, stored
from enginewright.passes.quant.smoothing_sites import Site, sites
from enginewright.passes.weights import RowReader, RowsTensor, open_rows, read, shape_of
from enginewright.plugins import DOMAIN
from enginewright.plugins.experts.combine_experts import COMBINE_EXPERTS
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.experts.sort_rows import SORT_ROWS
from enginewright.plugins.plugin import operand, optional

ROUTERS = "numbers of a router are rounded to bfloat16 again after --rotate, so that it may choose other experts"
SEED = 0x9E3779B97F4A7C15  # start of the signs


class Rotation:
    """An orthogonal matrix Q of a size: signs, then a Hadamard matrix of 2^k and a Hartley matrix of the odd rest.

    Args:
        size: rows and columns.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._power = size & -size  # largest power of two that divides the size
        odd = size // self._power
        angles = 2 * torch.pi * torch.outer(torch.arange(odd), torch.arange(odd)).remainder(odd).double() / odd
        self._hartley = ((angles.cos() + angles.sin()) / odd**0.5).float()
        self._signs = _signs(size)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiplies rows [..., size] by Q."""
        x = torch.unflatten(rows * self._signs, -1, (-1, self._power))
        x = torch.einsum("...op,or->...rp", x, self._hartley)
        step = 1
        while step < self._power:
            pairs = torch.unflatten(x, -1, (-1, 2, step))
            x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
            step *= 2
        rotated: torch.Tensor = (x / self._power**0.5).flatten(-2)
        return rotated

    def matrix(self) -> torch.Tensor:
        """Computes Q."""
        return self.apply(torch.eye(self.size))


def _signs(size: int) -> torch.Tensor:
    """Signs of channels, the same on every machine: bits of SplitMix64 (https://doi.org/10.1145/2660193.2660195)."""
    mask, signs, state = (1 << 64) - 1, [], SEED
    for _ in range(size):
        state = (state + SEED) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        signs.append(1.0 if (z ^ (z >> 31)) & 1 else -1.0)
    return torch.tensor(signs)


@dataclass(frozen=True)
class Rotate:
    """Rotates the residual stream, and the values of attention."""

    name: str = "rotate"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        refusals: list[str] = []
        heads = [site for site in sites(model)[0] if site.head_dim > 1]
        stream = _find_stream(model)
        if isinstance(stream, str):
            if not heads:
                raise UsageError("--rotate does not work with this model", stream, "Leave it out.")
            refusals.append(f"The residual stream is not rotated: {stream}")
        else:
            _rotate_stream(stream)
        for site in heads:
            _rotate_heads(site)
        notes = [ROUTERS] * (len(list(nodes_of(model, ROUTE.name, domain=DOMAIN))) if not refusals else 0)
        return PassResult(len(heads) + (not refusals), tuple(refusals), tuple(notes))


@dataclass
class _Stream:
    """The residual stream, and all that writes and reads it."""

    table: ir.Value  # the embedding, [vocabulary, H]
    start: ir.Value  # the embedding's output
    end: ir.Value  # the input of the last norm
    norm: ir.Node  # the last norm
    head: LinearLayer  # the head, which reads it
    values: set[ir.Value] = field(default_factory=set)  # all sums, the embedding's output among them
    writers: list[LinearLayer] = field(default_factory=list)  # layers whose output is added
    norms: dict[ir.Node, list[ir.Value]] = field(default_factory=dict)  # norm → weights [N, H] that read its output


def _find_stream(model: ir.Model) -> _Stream | str:
    """Finds the residual stream; a sentence says why it cannot be rotated."""
    head = head_of(model)
    norm = made_by(head.x, "RMSNormalization") if head is not None else None
    if head is None or norm is None:
        return "no norm of root mean squares is before its head."
    end = operand(norm, 0)
    stream = _Stream(end, end, end, norm, head)
    tables = []
    pending = [end]
    while pending:
        value = pending.pop()
        if value in stream.values:
            continue
        stream.values.add(value)
        node = value.producer()
        if node is not None and node.op_type == "Gather" and node.domain == "":
            tables.append(operand(node, 0))
            stream.start = value
        elif node is not None and node.op_type == "Add" and node.domain == "":
            for part in (operand(node, 0), operand(node, 1)):
                writers = _writers(part)
                stream.writers += writers or []
                pending += [] if writers else [part]
        elif node is not None and (scaled := _scaled(node)) is not None:
            pending.append(scaled)
        else:
            return f"{value.name} is made by {'nothing' if node is None else node.op_type}, which is not linear."
    if len(tables) != 1:
        return f"{len(tables)} embeddings are added."
    stream.table = tables[0]
    return _find_readers(stream) or _find_shared(stream) or stream


def _writers(value: ir.Value) -> list[LinearLayer] | None:
    """Finds the linear layers that a value is a sum of; None if it is not."""
    linear = linear_of(value)
    if linear is not None:
        return [linear]
    node = value.producer()
    if node is None:
        return None
    if node.op_type == COMBINE_EXPERTS.name and node.domain == DOMAIN:
        shared = optional(node, 3)
        parts = [operand(node, 0), *([shared] if shared is not None else [])]
    elif (scaled := _scaled(node)) is not None:
        parts = [scaled]
    else:
        return None
    found = [_writers(part) for part in parts]
    return [one for writers in found if writers for one in writers] if all(found) else None


def _scaled(node: ir.Node) -> ir.Value | None:
    """Returns the value that a node multiplies by one number for each row; None if it does something else."""
    if node.op_type != "Mul" or node.domain != "":
        return None
    for value, factor in (node.inputs, node.inputs[::-1]):
        if value is not None and factor is not None and factor.shape is not None:
            dims = factor.shape.dims
            if not dims or dims[-1] == 1:
                return value
    return None


def _find_readers(stream: _Stream) -> str | None:
    """Finds the norms that read the stream, and the weights after them; returns the reason why that cannot be."""
    for value in stream.values:
        if value.is_graph_output():
            return f"{value.name} is an output."
        for node in value.consumers():
            if node.op_type == "RMSNormalization" and node.domain == "" and node.inputs[0] is value:
                if node is not stream.norm:
                    weights = _weights_after(node.outputs[0])
                    if isinstance(weights, str):
                        return weights
                    stream.norms[node] = weights
            elif not any(output in stream.values for output in node.outputs):
                return f"{node.op_type} reads {value.name}, and only norms of root mean squares may."
    return None


def _weights_after(value: ir.Value) -> list[ir.Value] | str:
    """Weights [N, H] of all that reads the output of a norm; a sentence if something else reads it."""
    weights: list[ir.Value] = []
    for node in value.consumers():
        if node.op_type == "MatMul" and (linear := _linear_of_product(node)) is not None:
            weights.append(linear.weight)
        elif node.op_type == ROUTE.name and node.domain == DOMAIN:
            weights.append(operand(node, 1))
        elif node.op_type == SORT_ROWS.name and node.domain == DOMAIN:
            inner = _weights_after(node.outputs[0])
            if isinstance(inner, str):
                return inner
            weights += inner
        elif (linear := linear_of(node.outputs[0])) is not None and linear.grouped and linear.x is value:
            weights.append(linear.weight)
        else:
            return f"{node.op_type} reads {value.name}, and only linear layers may."
    return weights


def _linear_of_product(matmul: ir.Node) -> LinearLayer | None:
    """The linear layer of a MatMul, with or without its bias."""
    linear = linear_of(matmul.outputs[0])
    if linear is None or linear.x is not matmul.inputs[0]:
        return None
    return linear


def _find_shared(stream: _Stream) -> str | None:
    """Checks that no weight is read by others, and none is quantized; returns the reason if one is."""
    for value in {*(one.weight for one in stream.writers), *(one for some in stream.norms.values() for one in some)}:
        if stored(value) is not None:
            return f"{value.name} is quantized already."
        if value is stream.table or value is stream.head.weight:
            return f"{value.name} is shared with the embedding or the head."
    for norm in stream.norms:
        if len(operand(norm, 1).uses()) > 1:
            return f"{operand(norm, 1).name} belongs to several norms."
    size = shape_of(stream.table)[1]
    for linear in stream.writers:
        assert shape_of(linear.weight)[0] == size * linear.experts, f"{linear.weight.name} writes the stream"
    written = [one.weight for one in stream.writers]
    if len(written) != len(set(written)):
        return "several layers share a weight."
    return None


def _rotate_stream(stream: _Stream) -> None:
    rotation = Rotation(shape_of(stream.table)[1])
    tensors = (stream.table, stream.head.weight)
    if stream.table is stream.head.weight or any(stored(one) is not None for one in tensors):
        _multiply(stream.start, stream.start.consumers(), rotation.matrix(), "rotated")
        _multiply(stream.end, [stream.norm], rotation.matrix().t(), "rotated_back")
    else:
        _change_rows(stream.table, rotation.apply)
        _fold(stream.norm, [stream.head.weight], rotation)
    for norm, weights in stream.norms.items():
        _fold(norm, weights, rotation)
    for linear in stream.writers:
        for value in (linear.weight, linear.bias):
            if value is not None:
                _rotate_rows(value, rotation, 0, shape_of(value)[0])


def _rotate_heads(site: Site) -> None:
    """Rotates the values of attention: each head of V, and its columns of the projection after attention."""
    rotation = Rotation(site.head_dim)

    def columns(rows: torch.Tensor) -> torch.Tensor:
        return rotation.apply(torch.unflatten(rows, -1, (-1, rotation.size))).flatten(-2)

    for linear in site.linears:
        _change_rows(linear.weight, columns)
    for value in site.before:
        _rotate_rows(value, rotation, site.first, site.channels)


def _multiply(value: ir.Value, readers: Sequence[ir.Node], matrix: torch.Tensor, suffix: str) -> None:
    """Lets nodes read the product of a value with a matrix, in BF16 whatever the method of other layers is.

    Args:
        value: the value, [..., H].
        readers: the nodes.
        matrix: the matrix, [H, H].
        suffix: end of the product's name.
    """
    graph, name = readers[0].graph, f"{value.name}.{suffix}"
    assert graph is not None and value.shape is not None, "the value is one of the graph"
    rows = matrix.t().to(torch.bfloat16).contiguous()
    values = RowsTensor(f"{name}.weight", torch.bfloat16, tuple(rows.shape), lambda: lambda begin, end: rows[begin:end])
    weight = StoredTensor(f"{name}.weight", Bf16(), [values.initializer()]).initializer()
    graph.register_initializer(weight)
    across = typed(f"{name}.transposed", ir.DataType.FLOAT, matrix.shape)
    product = typed(name, ir.DataType.FLOAT, value.shape.dims)
    new = [
        standard("Transpose", [weight], [across], str(across.name)),
        standard("MatMul", [value, across], [product], name),
    ]
    first = min(readers, key=list(graph).index)
    for node in readers:
        for index, given_input in enumerate(node.inputs):
            if given_input is value:
                node.replace_input_with(index, product)
    graph.insert_before(first, new)


def _fold(norm: ir.Node, weights: Sequence[ir.Value], rotation: Rotation) -> None:
    """Moves the weights of a norm into the layers that read it, and rotates their columns."""
    own = operand(norm, 1)
    factors = _copy(own)
    for weight in weights:
        _change_rows(weight, lambda rows: rotation.apply(rows * read(factors).float()))
    _change_rows(own, torch.ones_like)


def _change_rows(value: ir.Value, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the rows of an initializer when they are read; a row must not depend on others."""
    before = _copy(value)

    def open() -> RowReader:
        reader = open_rows(before)
        return lambda begin, end: change(reader(begin, end).float())

    value.const_value = RowsTensor(str(value.name), torch.float32, shape_of(value), open)


def _rotate_rows(value: ir.Value, rotation: Rotation, first: int, count: int) -> None:
    """Multiplies blocks of rows by Qᵀ when they are read, which rotates what they write.

    Args:
        value: a weight [N, K] or a bias [N].
        rotation: the rotation, of as many channels as a block has rows.
        first: first row of the first block.
        count: rows of all blocks.
    """
    before, size = _copy(value), rotation.size

    def open() -> RowReader:
        reader, kept = open_rows(before), dict[int, torch.Tensor]()

        def block(index: int) -> torch.Tensor:
            if index not in kept:
                kept.clear()  # rows are read in order, mostly
                rows = reader(first + index * size, first + (index + 1) * size).float()
                kept[index] = rotation.apply(rows.movedim(0, -1)).movedim(-1, 0)
            return kept[index]

        def rows(begin: int, end: int) -> torch.Tensor:
            pieces = []
            while begin < end:
                if first <= begin < first + count:
                    index, inside = divmod(begin - first, size)
                    piece = block(index)[inside : inside + end - begin]
                else:
                    piece = reader(begin, min(end, first) if begin < first else end).float()
                pieces.append(piece)
                begin += len(piece)
            return torch.cat(pieces)

        return rows

    value.const_value = RowsTensor(str(value.name), torch.float32, shape_of(value), open)


def _copy(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
