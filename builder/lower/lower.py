"""Lowers a graph to a plan: kernels in order, each with its operands as views into weights, caches, or one arena.

The input graph has only ops with a kernel for the target (and Split, Reshape and Concat, which become views). Passes
make all decisions; only memory is laid out here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import onnx_ir as ir

from enginewright.adapter_plan import has_several, linear_weight
from enginewright.builder.lower.arena import assign_slots, nominal_sizes
from enginewright.builder.lower.pack import PackedForm
from enginewright.builder.lower.ranks import rank_plans
from enginewright.builder.lower.specialize import INPUT_SHAPES, Specializer, matrix_of
from enginewright.dtypes import DTYPES
from enginewright.errors import EngineError
from enginewright.plan import (
    COMMON_DIMS,
    HIDDEN_BEFORE,
    AdapterLaunches,
    Buffer,
    BufferOperand,
    CacheGroup,
    CacheOperand,
    Cost,
    Input,
    InputOperand,
    KernelCall,
    Linear,
    Operand,
    PagedCache,
    Plan,
    Plane,
    RecurrentState,
    StateTensor,
    WeightOperand,
    linear,
)
from enginewright.plugins import KernelBinding, binding_of
from enginewright.plugins.attention.kv_write import BLOCK_SIZE, STORED_NAMES, kv_row_bytes
from enginewright.plugins.gemm.adapters_cuda import ADAPTER_SOURCES, adapter_launches
from enginewright.plugins.kernel import Call, CudaKernel, Matrix, Specialization
from enginewright.plugins.plugin import ViewKind, dtype_attribute, dtype_of
from enginewright.plugins.registry import op_of, view_of
from enginewright.plugins.target import Target

# Name of a value that is a plane of a layer's cache, as an input or as the output of a kernel that writes to it.
POOL_NAME = re.compile(r"(?P<part>\w+)_pool\.(?P<layer>\d+)(\..*)?")
SNAPSHOT_TOKENS = 512  # tokens between two snapshots of recurrent states
DTYPE_NAMES = {ir.DataType[dtype.onnx]: name for name, dtype in DTYPES.items() if dtype.bytes}

ROWS = {dim: linear(**{dim: 1}) for dim in COMMON_DIMS}


@dataclass(frozen=True)
class Weight:
    """A weight of the plan."""

    value: ir.Value  # initializer that it is packed from
    form: PackedForm  # form of the packed bytes


@dataclass(frozen=True)
class Lowered:
    """The result of lowering a graph."""

    plan: Plan  # plan for the executor
    weights: Mapping[str, Weight]  # name in the plan → source of the bytes
    kernels: Mapping[str, Specialization]  # name → code that the launches of all plans need
    rank_plans: tuple[Plan, ...] = ()  # plans of ranks that compute the model together on GPUs, or none


@dataclass(frozen=True)
class _View:
    """Columns [column, column + columns) of a buffer."""

    buffer: int  # index of the buffer
    column: int  # first column
    columns: int  # number of columns


def cache_groups_of(model: ir.Model) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of the plan, in the order of their numbers in the graph."""
    return (*_kv_groups_of(model), *_state_groups_of(model))


def _state_groups_of(model: ir.Model) -> tuple[RecurrentState, ...]:
    """Reads the recurrent states from the graph's metadata, which the model's file wrote."""
    return tuple(
        RecurrentState(
            layers=tuple(entry["layers"]),
            tensors=tuple(StateTensor(name, tuple(shape), "f32") for name, shape in entry["tensors"].items()),
            snapshot_tokens=SNAPSHOT_TOKENS,
        )
        for entry in json.loads(model.metadata_props["enginewright.state_groups"])
    )


def _kv_groups_of(model: ir.Model) -> tuple[PagedCache, ...]:
    """Reads the KV groups from the graph's metadata, with dtypes from the ops that write to them."""
    pools = {value.name: value for value in model.graph.inputs}
    groups = []
    for entry in json.loads(model.metadata_props["enginewright.kv_groups"]):
        layers, kv_heads, head_dim = tuple(entry["layers"]), entry["kv_heads"], entry["head_dim"]
        pool = pools[f"{entry['planes'][0]}_pool.{layers[0]}"]
        (writer,) = pool.consumers()
        dtype = STORED_NAMES[dtype_attribute(writer, "stored") if "stored" in writer.attributes else dtype_of(pool)]
        groups.append(
            PagedCache(
                layers=layers,
                planes=tuple(
                    Plane(name, kv_heads, head_dim, dtype, kv_heads * kv_row_bytes(head_dim, dtype))
                    for name in entry["planes"]
                ),
                block_size=BLOCK_SIZE,
                window=entry["window"],
            )
        )
    return tuple(groups)


def lower(model: ir.Model, target: Target, max_seq_len: int, batch_invariant: bool = False, ranks: int = 1) -> Lowered:
    """Lowers a ragged graph.

    Args:
        model: the graph.
        target: the target.
        max_seq_len: positions of the longest sequence.
        batch_invariant: as in BuildConfig; it matters for GPUs only.
        ranks: number of GPUs that are to compute the model together. Plans for CPUs are cut when they are loaded.

    Raises:
        EngineError: a node has no kernel for the target; the message names it.
    """
    return _Lowering(model, target, batch_invariant).run(max_seq_len, ranks)


class _Lowering:
    def __init__(self, model: ir.Model, target: Target, batch_invariant: bool) -> None:
        self.model = model
        self.graph = model.graph
        self.target = target
        self.specializer = Specializer(target, batch_invariant)
        self.groups = cache_groups_of(model)
        self.views: dict[ir.Value, _View] = {}
        self._joined: dict[ir.Value, int] = {}  # joined value → its buffer
        self.buffers: list[tuple[str, Linear, int]] = []  # dtype, rows, columns
        self.lasting: list[int] = []  # buffers that keep their content from step to step
        self.own: set[int] = set()  # buffers that only one call uses
        self.calls: list[KernelCall] = []
        self.bindings: list[KernelBinding] = []  # of each call
        self.weights: dict[str, Weight] = {}
        self.nodes = list(self.graph)
        self.order = {node: index for index, node in enumerate(self.nodes)}

    def run(self, max_seq_len: int, ranks: int) -> Lowered:
        """Lowers all nodes."""
        inputs, given = [], dict[str, int]()
        for value in self.graph.inputs:
            name = _name(value)
            if name == HIDDEN_BEFORE:
                buffer = self._extra("f32", _rows(value), _columns(value))
                self.views[value], given[name] = _View(buffer.index, 0, buffer.columns), buffer.index
            elif POOL_NAME.fullmatch(name) is None:
                rows, columns = INPUT_SHAPES[name.partition(".")[0]]
                inputs.append(Input(name, rows, columns))
                self.specializer.use_dims(rows, columns)
        for node in self.nodes:
            match view_of(node):
                case ViewKind.COLUMNS:
                    self._split(node)
                case ViewKind.SHAPE:
                    self._reshape(node)
                case ViewKind.JOINED:
                    self._join(node)
                case None:
                    self._step(node)
        # Caches among the outputs have no views.
        results = {_name(value): self.views[value] for value in self.graph.outputs if value in self.views}
        outputs = {name: view.buffer for name, view in results.items()}
        dims = tuple(self.specializer.dims)
        nominal = nominal_sizes(dims, self.groups)
        slots = assign_slots(self.buffers, self.calls, outputs.values(), nominal, self.lasting, given.values())
        logits = results.get("logits")
        sampling = None
        if logits is not None:
            sampling = self.target.sampling(self._matrix(BufferOperand(logits.buffer, logits.column, logits.columns)))
        plan = Plan(
            target=self.target.name,
            dims=dims,
            inputs=tuple(inputs),
            caches=self.groups,
            buffers=tuple(Buffer(*entry, slot) for entry, slot in zip(self.buffers, slots, strict=True)),
            calls=tuple(self.calls),
            outputs=outputs,
            vocab_size=self._vocab_size() if logits is None else logits.columns,
            max_seq_len=max_seq_len,
            whole_texts=any(op.whole_texts(node) for node in self.nodes if (op := op_of(node))),
            sampling=self.specializer.named(*sampling) if sampling else None,
            adapting=self._adapting() if sampling else None,
            given=given,
        )
        cut: tuple[Plan, ...] = ()
        if ranks > 1 and sampling is not None:
            forms = {name: weight.form for name, weight in self.weights.items()}
            cut = rank_plans(plan, ranks, self.bindings, self.own, self.specializer, forms)
        return Lowered(plan, self.weights, self.specializer.kernels, cut)

    def _adapting(self) -> AdapterLaunches:
        """Makes the launches for adapters of all matrix products that may have some."""
        layers = (call for call in self.calls if linear_weight(call) is not None and not has_several(call))
        inputs = (call.operands["x"] for call in layers)
        launches = adapter_launches(self.buffers[one.index][0] for one in inputs if isinstance(one, BufferOperand))
        return AdapterLaunches(
            shrink={
                dtype: self.specializer.named(launch, ADAPTER_SOURCES) for dtype, launch in launches.shrink.items()
            },
            expand=self.specializer.named(launches.expand, ADAPTER_SOURCES),
        )

    def _vocab_size(self) -> int:
        """Returns the rows of the table of tokens, for a graph without logits."""
        (tokens,) = (value for value in self.graph.inputs if value.name == "tokens")
        return next(
            _shape(value)[0]
            for node in tokens.consumers()
            for value in node.inputs
            if value is not None and value.is_initializer()
        )

    def _split(self, node: ir.Node) -> None:
        source = self.views[_input(node, 0)]
        column = source.column
        for output in node.outputs:
            columns = _columns(output)
            self.views[output] = _View(source.buffer, column, columns)
            column += columns
        if column != source.column + source.columns:
            raise EngineError(f"{node.name} splits {source.columns} columns into {column - source.column}")

    def _reshape(self, node: ir.Node) -> None:
        source, output = self.views[_input(node, 0)], node.outputs[0]
        if _rows(output) != self.buffers[source.buffer][1] or _columns(output) != source.columns:
            raise EngineError(f"{node.name} moves elements between rows", "only heads may be split off or joined")
        self.views[output] = source

    def _join(self, node: ir.Node) -> None:
        """Makes a view of parts that were written side by side."""
        views = [self.views[_input(node, index)] for index in range(len(node.inputs))]
        column = 0
        for view in views:
            if view.buffer != views[0].buffer or view.column != column:
                raise EngineError(f"{node.name} joins values that no kernel writes side by side")
            column += view.columns
        self.views[node.outputs[0]] = _View(views[0].buffer, 0, column)

    def _step(self, node: ir.Node) -> None:
        binding = binding_of(node, self.target)
        operands: dict[str, Operand] = {}
        for role, value in zip(binding.inputs, node.inputs, strict=False):
            if value is not None and role:
                operands[role] = self._read(value, role, node, binding)
        for role, value in zip(binding.outputs, node.outputs, strict=False):
            if role:
                view = self._in_place(node, binding.in_place.get(role), value) or self._new(value)
                self.views[value] = view
                operands[role] = BufferOperand(view.buffer, view.column, view.columns)
        attributes = {
            name: attribute.value for name, attribute in node.attributes.items() if name in binding.attributes
        }
        scratch = binding.scratch and binding.scratch(self._call(operands, attributes))
        if scratch is not None:
            role, rows, columns = scratch
            only_here = operands[role] = self._extra("f32", rows, columns)
            self.own.add(only_here.index)
        if isinstance(binding, CudaKernel) and binding.counters is not None:
            role, rows, columns = binding.counters(self._call(operands, attributes))
            counters = operands[role] = self._extra("i32", rows, columns)
            self.lasting.append(counters.index)
            self.own.add(counters.index)
        if "largest" in operands and not self.target.static_scales:
            name = self.target.name
            raise EngineError(f"{node.name} has static scales of activations, which no kernel for {name} supports")
        launches = self.specializer.launches(binding, self._call(operands, attributes))
        self.calls.append(KernelCall(binding.kernel, operands, attributes, launches, self._cost(node)))
        self.bindings.append(binding)

    def _cost(self, node: ir.Node) -> Cost:
        """Computes the cost of a node for a token; nothing if its rows are not tokens, as in a head on logit rows."""
        op = op_of(node)
        if op is None or op.cost is None:
            return Cost()
        result = next(value for value in node.outputs if POOL_NAME.fullmatch(_name(value)) is None)
        match _rows(result).terms:
            case (("tokens", copies),):
                cost = op.cost(node)
                return msgspec.structs.replace(cost, of_token=copies * cost.of_token)
        return Cost()

    def _call(self, operands: Mapping[str, Operand], attributes: Mapping[str, int | float | str]) -> Call:
        return self.specializer.call({role: self._matrix(one) for role, one in operands.items()}, attributes)

    def _matrix(self, operand: Operand) -> Matrix:
        return matrix_of(operand, self.buffers, self.groups, lambda name: self.weights[name].form)

    def _extra(self, dtype: str, rows: Linear, columns: int) -> BufferOperand:
        self.specializer.use_dims(rows)
        self.buffers.append((dtype, rows, columns))
        return BufferOperand(len(self.buffers) - 1, 0, columns)

    def _read(self, value: ir.Value, role: str, node: ir.Node, binding: KernelBinding) -> Operand:
        name = _name(value)
        if value.is_initializer():
            return WeightOperand(self._weight(value, role, node, binding))
        if (cache := POOL_NAME.fullmatch(name)) is not None:
            return CacheOperand(int(cache["layer"]), cache["part"])
        if value.is_graph_input() and value not in self.views:
            return InputOperand(name)
        view = self.views[value]
        return BufferOperand(view.buffer, view.column, view.columns)

    def _weight(self, value: ir.Value, role: str, node: ir.Node, binding: KernelBinding) -> str:
        """Names a weight in the plan; a matrix that two kernels need in different layouts is stored twice."""
        assert value.dtype is not None
        shape, op = _shape(value), op_of(node)
        layout = binding.layouts.get(role, "r16") if len(shape) > 1 else "plain"
        if layout != "plain" and op is not None:
            rows = op.weight_rows(node)
            if rows.matrices is not None:
                shape = (rows.matrices, shape[0] // rows.matrices, *shape[1:])
            layout += "_pairs" if rows.gated else ""
        form = PackedForm(binding.packed.get(role) or DTYPE_NAMES[value.dtype], shape, layout)
        name = _name(value)
        if name in self.weights and self.weights[name].form != form:
            name = f"{name}.{layout}"
        self.weights[name] = Weight(value, form)
        return name

    def _new(self, value: ir.Value) -> _View:
        """Makes a buffer, or takes columns of a buffer in which values are joined."""
        join = next(filter(_joins, value.consumers()), None)
        columns, whole = _columns(value), value if join is None else join.outputs[0]
        if whole not in self._joined:
            assert whole.dtype is not None
            self.buffers.append((DTYPE_NAMES[whole.dtype], _rows(whole), _columns(whole)))
            self._joined[whole] = len(self.buffers) - 1
        before = () if join is None else join.inputs[: join.inputs.index(value)]
        return _View(self._joined[whole], sum(_columns(each) for each in before if each is not None), columns)

    def _in_place(self, node: ir.Node, index: int | None, output: ir.Value) -> _View | None:
        """Returns the view of an input if the kernel may overwrite it and nothing reads it afterwards."""
        if index is None or any(map(_joins, output.consumers())):
            return None
        value = _input(node, index)
        view = self.views.get(value)
        if view is None or value.dtype != output.dtype or view.columns != _columns(output):
            return None
        return view if self._last_use(value) <= self.order[node] else None

    def _last_use(self, value: ir.Value) -> int:
        """Finds the last node that reads the memory of `value`, through any view of the same buffer."""
        uses = [self._last_use_below(value)]
        producer = value.producer()
        while producer is not None and view_of(producer):
            if _joins(producer):
                return len(self.nodes)
            value = _input(producer, 0)
            uses += [self.order[node] for node in value.consumers() if view_of(node) is None]
            shaped = [node for node in value.consumers() if view_of(node) is ViewKind.SHAPE]
            uses += [self._last_use_below(node.outputs[0]) for node in shaped]
            uses += [len(self.nodes)] if value.is_graph_output() else []
            producer = value.producer()
        return max(uses)

    def _last_use_below(self, value: ir.Value) -> int:
        if value.is_graph_output():
            return len(self.nodes)
        uses = [-1]
        for node in value.consumers():
            if view_of(node):
                uses += [self._last_use_below(output) for output in node.outputs]
            else:
                uses.append(self.order[node])
        return max(uses)


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.name} lacks input {index}"
    return value


def _joins(node: ir.Node) -> bool:
    return view_of(node) is ViewKind.JOINED


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None
    shape = value.shape.numpy()
    return tuple(int(size) for size in shape)


def _rows(value: ir.Value) -> Linear:
    """Returns the rows of a value: a number, a size of the step, or a multiple of one, `8 * tokens`."""
    assert value.shape is not None
    first = value.shape[0]
    if isinstance(first, int):
        return Linear(first)
    times, _, dim = str(first.value).rpartition(" * ")
    if dim not in ROWS:
        raise EngineError(f"{value.name} has rows {first}, which is not a size of a step")
    return linear(**{dim: int(times or 1)})


def _columns(value: ir.Value) -> int:
    """Returns the elements of a row: the product of all dimensions but the first."""
    assert value.shape is not None
    columns = 1
    for size in value.shape.dims[1:]:
        assert isinstance(size, int), f"{value.name} has an unknown number of columns"
        columns *= size
    return columns
