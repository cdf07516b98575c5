"""Specializes the kernels of a plan to its operands: facts about them, and the names of kernels with constants."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from enginewright.builder.lower.pack import PackedForm
from enginewright.dtypes import DTYPES
from enginewright.plan import (
    COLUMN_ALIGN,
    COMMON_DIMS,
    AdaptersOperand,
    Buffer,
    BufferOperand,
    CacheGroup,
    CacheOperand,
    InputOperand,
    Launch,
    Linear,
    Operand,
    RecurrentState,
    WeightOperand,
    cache_of,
    linear,
)
from enginewright.plugins import KernelBinding
from enginewright.plugins.attention.kv_write import padded_head_dim
from enginewright.plugins.kernel import Call, CudaKernel, Matrix, Specialization
from enginewright.plugins.target import Target
from enginewright.runtime.device.cpu.weight_parts import part_of_weight
from enginewright.triton_instance import TritonInstance

# Rows and columns of the inputs, whose shapes in the graph have too little information for the plan.
INPUT_SHAPES = {
    "tokens": (linear(tokens=1), Linear(1)),
    "positions": (linear(tokens=1), Linear(1)),
    "slots": (linear(tokens=1), Linear(1)),
    "token_types": (linear(tokens=1), Linear(1)),
    "query_start": (linear(1, sequences=1), Linear(1)),
    "kv_len": (linear(sequences=1), Linear(1)),
    "block_table": (linear(sequences=1), linear(kv_blocks=1)),
    "state_slots": (linear(sequences=1), Linear(1)),
    "first_rows": (linear(sequences=1), Linear(1)),
    "logit_rows": (linear(logit_rows=1), Linear(1)),
}

BufferShape = tuple[str, Linear, int]  # dtype, rows and columns of a buffer


class Specializer:
    """Makes launches, and collects the kernels and the dimensions that they use.

    Args:
        target: the target.
        batch_invariant: as in BuildConfig.
    """

    def __init__(self, target: Target, batch_invariant: bool) -> None:
        self.target, self.batch_invariant = target, batch_invariant
        self.dims = list(COMMON_DIMS)  # others follow in the order of their first use
        self.kernels: dict[str, Specialization] = {}

    def use_dims(self, *sizes: Linear) -> None:
        """Notes the dimensions that sizes depend on."""
        for dim in (dim for size in sizes for dim, _ in size.terms):
            if dim not in self.dims:
                self.dims.append(dim)

    def call(
        self, matrices: Mapping[str, Matrix], attributes: Mapping[str, int | float | str], part_of: Call | None = None
    ) -> Call:
        """Describes a call to the kernels' own code.

        Args:
            matrices: role → operand.
            attributes: constants of the kernel.
            part_of: the call of which it is a rank's part.
        """
        return Call(matrices, attributes, self.target.architectures, self.batch_invariant, self.dims, part_of)

    def launches(self, binding: KernelBinding, call: Call) -> tuple[Launch, ...]:
        """Makes the launches of a call; none on a CPU."""
        if not isinstance(binding, CudaKernel):
            return ()
        triton = {one.expression: one for one in binding.triton(call)}
        return tuple(self.named(one, binding.sources, triton) for one in binding.launches(call))

    def named(
        self, launch: Launch, sources: Mapping[str, str], triton: Mapping[str, TritonInstance] | None = None
    ) -> Launch:
        """Replaces a launch's kernel by its name in the code: `rms_norm-`, and a hash of the specialization.

        Args:
            launch: the launch, with the kernel's expression.
            sources: function → its header in csrc/cuda.
            triton: expression → its kernel in Triton.
        """
        self.use_dims(launch.rows, *(extent.rows for extent in launch.grid))
        function = launch.kernel.partition("<")[0]
        name = f"{function}-{hashlib.sha256(launch.kernel.encode()).hexdigest()[:12]}"
        architectures = launch.architectures
        # another launch has the kernel, too, perhaps on other architectures; () is all of them
        if name in self.kernels:
            before = self.kernels[name].architectures
            architectures = tuple(dict.fromkeys((*before, *architectures))) if before and architectures else ()
        instance = (triton or {}).get(launch.kernel)
        source = instance.source if instance else sources[function]
        self.kernels[name] = Specialization(source, launch.kernel, architectures, instance)
        return msgspec.structs.replace(launch, kernel=name)


def matrix_of(
    operand: Operand,
    buffers: Sequence[BufferShape],
    groups: Sequence[CacheGroup],
    form_of: Callable[[str], PackedForm],
) -> Matrix:
    """Collects the facts about an operand that kernels are specialized to.

    Args:
        operand: the operand.
        buffers: buffers of the plan.
        groups: its cache groups.
        form_of: name of a weight → its form.
    """
    match operand:
        case InputOperand():
            rows, width = INPUT_SHAPES[operand.name.partition(".")[0]]
            return Matrix("i32", rows, width.constant, width.constant, width.constant)
        case WeightOperand():
            form = form_of(operand.name)
            shape = form.shape
            if operand.rows or operand.matrices:
                matrices, part_rows, part_columns = part_of_weight(form, operand).shape
                shape = (matrices, part_rows, part_columns) if len(shape) == 3 else (part_rows, part_columns)
            count, columns = Linear(shape[-2] if len(shape) > 1 else shape[0]), shape[-1]
            return Matrix(form.dtype, count, columns, columns, columns, form.layout)
        case BufferOperand():
            dtype, rows, columns = buffers[operand.index]
            whole = operand.columns == columns
            padded = -(-columns // COLUMN_ALIGN) * COLUMN_ALIGN if whole else operand.columns
            stride = Buffer(dtype, rows, columns, 0).stride
            return Matrix(dtype, rows, operand.columns, stride, padded, column=operand.column)
        case CacheOperand():
            group = cache_of(groups, operand)
            if isinstance(group, RecurrentState):
                (tensor,) = (tensor for tensor in group.tensors if tensor.name == operand.part)
                elements = math.prod(tensor.shape)
                return Matrix(
                    tensor.dtype,
                    Linear(),
                    elements,
                    elements,
                    elements,
                    block_stride=group.bytes_per_sequence,
                    column=group.offset_bytes(operand.layer, operand.part) // DTYPES[tensor.dtype].bytes,
                )
            (plane,) = (plane for plane in group.planes if plane.name == operand.part)
            padded = padded_head_dim(plane.dim)
            return Matrix(plane.dtype, Linear(), plane.dim, padded, padded, block_stride=group.block_bytes)
        case AdaptersOperand():
            raise AssertionError("only the runtime adds adapters to a plan")
