"""Uploads weights to the GPU: threads read the file into pinned buffers, which are copied from there.

The GPU uses the weights in the layout of the file, so nothing is converted. A rank uploads its rows alone.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from enginewright.plan import WeightOperand
from enginewright.runtime.device.cpu.weight_parts import part_of_weight
from enginewright.runtime.device.cuda.device import Device
from enginewright.runtime.engine import Engine

PIECE_BYTES = 16 << 20
READERS = 4  # number of reading threads, and of pieces that are read while as many are copied


Ranges = Sequence[tuple[int, int]]  # ranges of a weight's bytes: the first, and the byte after the last one


def weight_key(operand: WeightOperand) -> str:
    """Names a weight, or a part of one, among the weights on a GPU."""
    parts = [f"{first}+{count}" for first, count in operand.rows]
    parts += [f"matrices {operand.matrices[0]}+{operand.matrices[1]}"] if operand.matrices else []
    return f"{operand.name}[{', '.join(parts)}]" if parts else operand.name


def weight_parts(engine: Engine, without: Container[str] = ()) -> dict[str, tuple[str, Ranges]]:
    """Finds what a plan reads of the weights, in the order of first use.

    Args:
        engine: the open engine, with the plan.
        without: keys to leave out.

    Returns:
        By `weight_key`, the name of the weight, and ranges of its bytes, which follow each other on the GPU.
    """
    operands = (operand for call in engine.plan.calls for operand in call.operands.values())
    found = {weight_key(one): one for one in operands if isinstance(one, WeightOperand)}
    return {
        key: (operand.name, part_of_weight(engine.weight(operand.name)[1], operand).ranges)
        for key, operand in found.items()
        if key not in without
    }


def upload_weights(engine: Engine, device: Device, align: int, there: Mapping[str, int]) -> dict[str, int]:
    """Uploads the weights that the plan reads, into one allocation.

    Args:
        engine: the open engine.
        device: the GPU.
        align: alignment of each weight, in bytes.
        there: addresses of weights that are already on the GPU, by `weight_key`.

    Returns:
        The address of each weight, by `weight_key`, including those of `there`.
    """
    parts = weight_parts(engine, there)
    if not parts:
        return dict(there)
    offsets, end = {}, 0
    for key, (_, ranges) in parts.items():
        offsets[key] = end
        end += -(-range_bytes(ranges) // align) * align
    start = device.allocate(end)
    addresses = {**there, **{key: start + offset for key, offset in offsets.items()}}
    pieces = list(_pieces(parts, addresses))
    turns = [pieces[first : first + READERS] for first in range(0, len(pieces), READERS)]
    halves = [[device.pinned(PIECE_BYTES) for _ in range(READERS)] for _ in range(2)]
    with ThreadPoolExecutor(READERS) as readers:

        def read(turn: int) -> list[Future[None]]:
            buffers = halves[turn % 2]
            return [
                readers.submit(engine.read_weight, name, begin, buffer[:count])
                for (name, begin, count, _), buffer in zip(turns[turn], buffers, strict=False)
            ]

        reading = read(0)
        for turn, of_turn in enumerate(turns):
            for piece in reading:
                piece.result()
            device.synchronize()  # the previous pieces are copied, so the next ones may use their buffers
            for (_, _, count, address), buffer in zip(of_turn, halves[turn % 2], strict=False):
                device.upload(address, buffer[:count])
            reading = read(turn + 1) if turn + 1 < len(turns) else []
    device.synchronize()
    for buffer in (*halves[0], *halves[1]):
        device.unpin(buffer)
    return addresses


def range_bytes(ranges: Ranges) -> int:
    """Computes the bytes of all ranges together."""
    return sum(end - begin for begin, end in ranges)


def _pieces(
    parts: Mapping[str, tuple[str, Ranges]], addresses: Mapping[str, int]
) -> Iterator[tuple[str, int, int, int]]:
    """Yields the name of a weight, the first byte of a piece, its bytes, and its address."""
    for key, (name, ranges) in parts.items():
        address = addresses[key]
        for start, end in ranges:
            for begin in range(start, end, PIECE_BYTES):
                count = min(PIECE_BYTES, end - begin)
                yield name, begin, count, address
                address += count
