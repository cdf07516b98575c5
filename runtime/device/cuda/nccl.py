"""Carries exchanges between GPUs by NCCL, through the bindings of nccl4py, in the order of a device's stream.

A rank's part goes to every other rank as it is: no sums are made on the way, so NCCL's algorithms change no bits. What
is queued while a graph is captured is part of the graph.
"""

import ctypes
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from enginewright.errors import EngineError, NoCodeForMachineError
from enginewright.rank_plan import EVERY
from enginewright.runtime.device.cuda.device import CudaDevice
from enginewright.runtime.device.cuda.ranks import Packed

ID_BYTES = 128  # bytes of the name of a group (NCCL_UNIQUE_ID_BYTES)


def new_group() -> bytes:
    """Makes the name of a group, by which its ranks find each other.

    Raises:
        NoCodeForMachineError: NCCL is not installed.
    """
    nccl = _bindings()
    name = nccl.get_unique_id()
    return ctypes.string_at(name.ptr, ID_BYTES)


class NcclCarrier:
    """The carrier of one rank. Making it waits until all ranks have come.

    Args:
        device: the GPU of this rank.
        group: name of the group.
        rank: this rank.
        size: number of ranks.

    Raises:
        NoCodeForMachineError: NCCL is not installed.
        EngineError: the ranks do not find each other.
    """

    def __init__(self, device: CudaDevice, group: bytes, rank: int, size: int) -> None:
        self._nccl, self._stream, self._rank = _bindings(), device.stream, rank
        device.bind()
        names, no_config = bytearray(group), 0
        self._communicator: int | None = self._call("comm_init_rank_scalable", size, rank, 1, names, no_config)

    def exchange(self, parts: Mapping[int, Packed], root: int) -> Callable[[int], None]:
        nccl, rank, stream = self._nccl, self._rank, self._stream
        byte = int(nccl.DataType.Uint8)

        def queue(communicator: int, source: int, packed: Packed, rows: int) -> None:
            address, count = packed.address, rows * packed.row_bytes
            if root == EVERY:
                nccl.broadcast(address, address, count, byte, source, communicator, stream)
            elif rank == root != source:
                nccl.recv(address, count, byte, source, communicator, stream)
            elif rank == source != root:
                nccl.send(address, count, byte, root, communicator, stream)

        def run(rows: int) -> None:
            communicator = self._communicator
            if communicator is None:
                raise EngineError("GPUs exchange nothing any more", "the engine has failed, or is closed")
            try:
                nccl.group_start()
                for source, packed in parts.items():
                    queue(communicator, source, packed, rows)
                nccl.group_end()
            except nccl.NCCLError as error:
                raise _failed("an exchange", error) from error

        return run

    def check(self) -> None:
        """Checks that no exchange has failed so far.

        Raises:
            EngineError: one has.
        """
        if self._communicator is None:
            return
        state = self._nccl.Result(self._call("comm_get_async_error", self._communicator))
        if state not in (self._nccl.Result.Success, self._nccl.Result.InProgress):
            raise EngineError("NCCL has failed", f"{state.name} in an exchange between GPUs")

    def close(self) -> None:
        """Ends all exchanges at once, from any thread, also those that wait. A second call does nothing."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._call("comm_abort", communicator)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nccl, name)(*arguments)
        except self._nccl.NCCLError as error:
            raise _failed(name, error) from error


def _failed(what: str, error: Exception) -> EngineError:
    return EngineError(f"NCCL failed in {what}", str(error), "NCCL_DEBUG=WARN makes it say more.")


def _bindings() -> Any:
    """The functions of NCCL.

    Raises:
        NoCodeForMachineError: they are not installed.
    """
    try:
        nccl: Any = importlib.import_module("nccl.bindings.nccl")
        nccl.get_version()  # loads the library
    except (ImportError, RuntimeError) as error:  # nccl4py raises a RuntimeError where the library is not found
        raise NoCodeForMachineError(
            "GPUs cannot exchange anything here",
            f"nccl4py or NCCL is missing ({str(error).splitlines()[0]})",
            "pip install 'enginewright[cuda-ranks]', or leave --tensor-parallel-size out.",
        ) from error
    return nccl
