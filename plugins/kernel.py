"""How a node becomes a kernel call: which operand each of its inputs and outputs is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from enginewright.plan import Linear


@dataclass(frozen=True)
class KernelBinding:
    """A kernel for one op on one target.

    kernel: versioned name, `gemm_bf16@1`. inputs, outputs: the operand that each input and output of the
    node is, in order; "" for one that the kernel does not take (the value pool, where the key pool's operand
    stands for both). attributes: those of the node that the kernel is given. in_place: output operand → index
    of the input whose memory it may take over. scratch: node → (operand, rows, columns) of an f32 buffer that
    only this call uses. packed: operand → dtype of a weight whose numbers have a byte each in the graph alone.
    """

    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    in_place: Mapping[str, int] = field(default_factory=dict)
    scratch: Callable[[ir.Node], tuple[str, Linear, int]] | None = None
    packed: Mapping[str, str] = field(default_factory=dict)
