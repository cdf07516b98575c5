"""Uploads weights to the GPU: threads read the file into pinned buffers, which are copied from there.

The GPU uses the weights in the layout of the file, so nothing is converted.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from enginewright.runtime.device.cuda.device import Device
from enginewright.runtime.engine import Engine

PIECE_BYTES = 16 << 20
READERS = 4  # number of reading threads, and of pieces that are read while as many are copied


def upload_weights(engine: Engine, device: Device, align: int, there: Mapping[str, int]) -> dict[str, int]:
    """Uploads the weights that the plan names, into one allocation.

    Args:
        engine: the open engine.
        device: the GPU.
        align: alignment of each weight, in bytes.
        there: addresses of weights that are already on the GPU, by name.

    Returns:
        The address of each weight, by name, including those of `there`.
    """
    names = [name for name in engine.plan.weight_names() if name not in there]
    if not names:
        return dict(there)
    offsets, end = {}, 0
    for name in names:
        offsets[name] = end
        end += -(-engine.weight(name)[1].nbytes // align) * align
    start = device.allocate(end)
    addresses = {**there, **{name: start + offset for name, offset in offsets.items()}}
    pieces = list(_pieces(engine, names))
    turns = [pieces[first : first + READERS] for first in range(0, len(pieces), READERS)]
    halves = [[device.pinned(PIECE_BYTES) for _ in range(READERS)] for _ in range(2)]
    with ThreadPoolExecutor(READERS) as readers:

        def read(turn: int) -> list[Future[None]]:
            buffers = halves[turn % 2]
            return [
                readers.submit(engine.read_weight, name, begin, buffer[:count])
                for (name, begin, count), buffer in zip(turns[turn], buffers, strict=False)
            ]

        reading = read(0)
        for turn, parts in enumerate(turns):
            for piece in reading:
                piece.result()
            device.synchronize()  # the previous pieces are copied, so the next ones may use their buffers
            for (name, begin, count), buffer in zip(parts, halves[turn % 2], strict=False):
                device.upload(addresses[name] + begin, buffer[:count])
            reading = read(turn + 1) if turn + 1 < len(turns) else []
    device.synchronize()
    for buffer in (*halves[0], *halves[1]):
        device.unpin(buffer)
    return addresses


def _pieces(engine: Engine, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        nbytes = engine.weight(name)[1].nbytes
        for begin in range(0, nbytes, PIECE_BYTES):
            yield name, begin, min(PIECE_BYTES, nbytes - begin)
