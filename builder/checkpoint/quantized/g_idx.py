"""Weights whose columns are not in the order of their groups: GPTQ's act-order, in the tensor `g_idx`."""

import torch

from enginewright.builder.checkpoint.quantized.fit import Groups, Open, integers, restore_integers, restored
from enginewright.builder.checkpoint.quantized.format import QuantizedFormat
from enginewright.errors import EngineError
from enginewright.passes.quant.act_order import ActOrdered
from enginewright.passes.quant.method import StoredTensor
from enginewright.passes.weights import RowReader, RowsTensor


def integers_by_g_idx(
    format: QuantizedFormat,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    codes: Open,
    groups: Groups,
    g_idx: str,
    int8_activations: int | None = None,
) -> RowsTensor:
    """Fits a weight of integers whose column k is in group g_idx[k].

    Args:
        format: format of the checkpoint, for notes.
        name: name of the weight.
        shape: [N, K].
        bits: bits of a code.
        codes: UINT8 [n, K].
        groups: scales and zero points.
        g_idx: name of a tensor [K] INT32, which need not exist. It is read at once, since the graph depends on it.
        int8_activations: as in `integers`.
    """
    if format.tensors.find(g_idx) is None:
        return integers(format, name, shape, bits, codes, groups, int8_activations)
    columns = shape[1]
    of_columns = format.tensors.take(g_idx, (columns,), dtypes=[torch.int32])()
    by_group = torch.arange(columns, dtype=torch.int32) // groups.size
    if torch.equal(of_columns, by_group):
        return integers(format, name, shape, bits, codes, groups, int8_activations)
    if of_columns.min() < 0 or of_columns.max() > by_group[-1]:
        raise EngineError(f"{g_idx} cannot be used", f"it names groups that are not among the {int(by_group[-1]) + 1}")
    order = torch.argsort(of_columns, stable=True)
    if not torch.equal(of_columns[order], by_group):
        format.note("integers in groups of different lengths, which no kernel supports, are restored to bfloat16")
        return restored(name, shape, _restored(name, bits, codes, groups, of_columns))
    by_groups = integers(format, name, shape, bits, _reordered(codes, order), groups, int8_activations)
    whole = restored(name, shape, _restored(name, bits, codes, groups, of_columns))
    return ActOrdered(whole, order, by_groups) if isinstance(by_groups, StoredTensor) else whole


def _reordered(codes: Open, order: torch.Tensor) -> Open:
    def open() -> RowReader:
        read = codes()
        return lambda begin, end: read(begin, end)[:, order]

    return open


def _restored(name: str, bits: int, codes: Open, groups: Groups, of_columns: torch.Tensor) -> Open:
    """Restores FLOAT, each column with the scale and the zero point of its group."""

    def spread(open: Open) -> Open:
        def opened() -> RowReader:
            read = open()
            return lambda begin, end: read(begin, end)[:, of_columns.long()]

        return opened

    each = Groups(1, spread(groups.scales), None if groups.zeros is None else spread(groups.zeros))
    return restore_integers(name, bits, codes, each)
