"""Weights whose columns are in no order of their runs: GPTQ's act-order, as `g_idx` says."""

import torch

from enginewright.builder.checkpoint.quantized.fit import Groups, Open, integers, restore_integers, restored
from enginewright.builder.checkpoint.quantized.format import Format
from enginewright.errors import EngineError
from enginewright.passes.quant.act_order import ActOrdered
from enginewright.passes.quant.method import StoredTensor
from enginewright.passes.weights import RowReader, RowsTensor


def integers_by_g_idx(
    format: Format,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    codes: Open,
    runs: Groups,
    g_idx: str,
    int8_activations: int | None = None,
) -> RowsTensor:
    """As `integers`, of a weight whose column k is in run g_idx[k].

    g_idx: the tensor's name, [K] INT32. It is read at once, for the graph depends on it. There need not be one.
    """
    if format.tensors.find(g_idx) is None:
        return integers(format, name, shape, bits, codes, runs, int8_activations)
    columns = shape[1]
    of_columns = format.tensors.take(g_idx, (columns,), dtypes=[torch.int32])()
    by_run = torch.arange(columns, dtype=torch.int32) // runs.size
    if torch.equal(of_columns, by_run):
        return integers(format, name, shape, bits, codes, runs, int8_activations)
    if of_columns.min() < 0 or of_columns.max() > by_run[-1]:
        raise EngineError(f"{g_idx} cannot be used", f"it names runs that are not among the {int(by_run[-1]) + 1}")
    order = torch.argsort(of_columns, stable=True)
    if not torch.equal(of_columns[order], by_run):
        format.note("integers in runs of different lengths, which no kernel takes, are restored to bfloat16")
        return restored(name, shape, _restored(name, bits, codes, runs, of_columns))
    by_runs = integers(format, name, shape, bits, _reordered(codes, order), runs, int8_activations)
    whole = restored(name, shape, _restored(name, bits, codes, runs, of_columns))
    return ActOrdered(whole, order, by_runs) if isinstance(by_runs, StoredTensor) else whole


def _reordered(codes: Open, order: torch.Tensor) -> Open:
    def open() -> RowReader:
        read = codes()
        return lambda begin, end: read(begin, end)[:, order]

    return open


def _restored(name: str, bits: int, codes: Open, runs: Groups, of_columns: torch.Tensor) -> Open:
    """FLOAT, each column with the scale and the zero point of its run."""

    def spread(open: Open) -> Open:
        def opened() -> RowReader:
            read = open()
            return lambda begin, end: read(begin, end)[:, of_columns.long()]

        return opened

    each = Groups(1, spread(runs.scales), None if runs.zeros is None else spread(runs.zeros))
    return restore_integers(name, bits, codes, each)
