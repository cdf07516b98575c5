"""Adapters of experts: PEFT adapts one parameter with the matrices of all experts, as transformers holds them.

A is [experts · rank, in] with experts outermost, B [out, rank · experts] with experts innermost. In a checkpoint the
parameter is one tensor, or one or two for each expert: gate and up are the two halves of `gate_up_proj`.
Source: peft/tuners/lora/layer.py (`ParamWrapper`), transformers/conversion_mapping.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from enginewright.builder.checkpoint.base import TensorInfo

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # transformers' names of the parameters
# Name of an expert's matrix in checkpoints → parameter, and half of its rows.
MATRICES: Mapping[str, tuple[str, int | None]] = {
    "gate_proj": (GATE_UP, 0),
    "up_proj": (GATE_UP, 1),
    "down_proj": (DOWN, None),
    "w1": (GATE_UP, 0),
    "w3": (GATE_UP, 1),
    "w2": (DOWN, None),
}


@dataclass(frozen=True)
class ExpertsPart:
    """The part of an adapter's product that belongs to one tensor of the checkpoint."""

    parameter: str  # name of the adapted parameter: that of transformers in the checkpoint's module
    tensor: str  # name of the tensor
    shape: tuple[int, int, int]  # experts, rows and columns of the whole parameter, each matrix as [out, in]
    expert: int | None = None  # expert whose matrix the tensor is; None: it is all of them
    half: int | None = None  # half of the expert's rows that it is; None: it is all of them
    is_transposed: bool = False  # True if matrices are stored as [in, out]

    def of(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Computes this part of B · A.

        Args:
            a: [experts · rank, in].
            b: [out, rank · experts].

        Returns:
            [experts, out, in], or [out, in] of one expert or of half of its rows; [in, out] if it is stored so.
        """
        experts, rows, columns = self.shape
        a = a.reshape(experts, -1, columns)
        b = b.reshape(rows, -1, experts).permute(2, 0, 1)
        if self.expert is not None:
            a, b = a[self.expert], b[self.expert]
        if self.half is not None:
            b = b.chunk(2)[self.half]
        product = b @ a
        return product.transpose(-1, -2) if self.is_transposed else product


def find_parts(module: str, tensors: Mapping[str, TensorInfo]) -> Mapping[str, list[ExpertsPart]]:
    """Finds the tensors of a checkpoint with the matrices of experts.

    Args:
        module: the checkpoint's name of the module with all experts, such as model.layers.0.mlp.experts.
        tensors: tensors of the checkpoint.

    Returns:
        Parameter → its parts; without those that the checkpoint does not have.
    """
    fused = {name: tensors[f"{module}.{name}"].shape for name in (GATE_UP, DOWN) if f"{module}.{name}" in tensors}
    if len(fused) == 2 and all(len(shape) == 3 for shape in fused.values()):
        return {name: [_fused(module, name, fused)] for name in fused}
    parts: dict[str, list[ExpertsPart]] = {}
    for matrix, (parameter, half) in MATRICES.items():
        names = list(_of_each_expert(module, matrix, tensors))
        if not names or len(shape := tensors[names[0]].shape) != 2:
            continue
        whole = (len(names), shape[0] * (1 if half is None else 2), shape[1])
        found = [ExpertsPart(f"{module}.{parameter}", name, whole, expert, half) for expert, name in enumerate(names)]
        parts.setdefault(parameter, []).extend(found)
    return parts


def _fused(module: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> ExpertsPart:
    """The part that is a tensor with all experts: of [2 · inner, width] and [width, inner], or both transposed."""
    experts, rows, columns = shapes[name]
    up, down = shapes[GATE_UP][1:], shapes[DOWN][1:]
    is_transposed = (up[0], up[1]) != (2 * down[1], down[0])
    shape = (experts, columns, rows) if is_transposed else (experts, rows, columns)
    tensor = f"{module}.{name}"
    return ExpertsPart(tensor, tensor, shape, is_transposed=is_transposed)


def _of_each_expert(module: str, matrix: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    expert = 0
    while (name := f"{module}.{expert}.{matrix}.weight") in tensors:
        yield name
        expert += 1
