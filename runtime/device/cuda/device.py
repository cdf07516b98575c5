"""The GPU as the executor uses it: memory, copies and launches on one stream, and graphs of them.

`CudaDevice` calls the driver's API through cuda-bindings. Running an engine needs nothing else of CUDA: no toolkit, no
compiler, no torch. Other classes can implement `Device`, as the tests' do.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from enginewright.code import CompiledKernel
from enginewright.engine_header import REBUILD
from enginewright.errors import CorruptEngineError, EngineError, NoCodeForMachineError, NotEnoughMemoryError
from enginewright.runtime.count import format_bytes

Bytes = NDArray[np.uint8]
Grid = tuple[int, int, int]
OnGrid = Callable[[Grid], None]  # launches a kernel


class Device(Protocol):
    """A GPU with one stream. Copies and launches are queued, run in order, and `synchronize` waits for them.

    Addresses of the GPU's memory are integers. Host memory that is copied asynchronously comes from `pinned`.
    """

    @property
    def architecture(self) -> str:
        """Name of its architecture, such as sm_90."""
        ...

    @property
    def multiprocessors(self) -> int:
        """Number of streaming multiprocessors."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free bytes of the GPU's memory."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Allocates GPU memory filled with zeros, aligned to 256 bytes. Raises NotEnoughMemoryError."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Allocates page-locked host memory, uint8 [nbytes]. Its content is undefined."""
        ...

    def unpin(self, buffer: Bytes) -> None:
        """Frees memory from `pinned`. The caller has waited for all copies from it and to it."""
        ...

    def upload(self, address: int, data: Bytes) -> None:
        """Queues a copy of host memory to the GPU."""
        ...

    def download(self, data: Bytes, address: int) -> None:
        """Queues a copy of GPU memory to the host; its length is that of `data`."""
        ...

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy within the GPU's memory."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Queues filling GPU memory with zeros."""
        ...

    def synchronize(self) -> None:
        """Waits until everything queued is done."""
        ...

    def event(self, *, sleeps: bool = False) -> Any:
        """Makes an event, which can be recorded repeatedly and waited for.

        Args:
            sleeps: True if waiting threads sleep, which frees their core but wakes them slightly later.
        """
        ...

    def record(self, event: Any) -> None:
        """Records an event after everything queued so far."""
        ...

    def wait(self, event: Any) -> None:
        """Waits until everything queued before the event's last record is done; returns at once if there is none."""
        ...

    def bind(self) -> None:
        """Makes this device current in the calling thread, which must precede its other calls."""
        ...

    def close(self) -> None:
        """Frees everything allocated on the device, which cannot be used any more."""
        ...

    def launcher(
        self, kernel: str, threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> Callable[[Grid], None]:
        """Prepares a kernel of the engine's code with constant arguments.

        Args:
            kernel: name of the kernel.
            threads: number of threads of a block.
            shared_bytes: dynamic shared memory of a block.
            arguments: addresses.

        Returns:
            A function that queues a launch on a grid.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures what `work` queues as a graph, without running it.

        Returns:
            A function that queues the whole graph; it can be called repeatedly.
        """
        ...


def num_gpus() -> int:
    """Number of GPUs that this process may use; 0 without a driver or without cuda-bindings."""
    try:
        from cuda.bindings import driver

        (error,) = driver.cuInit(0)
        if error:
            return 0
        error, count = driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):  # cuda-bindings raises RuntimeError where there is no driver's library
        return 0
    return 0 if error else int(count)


def capability_of(index: int) -> tuple[int, int]:
    """Compute capability of GPU number `index`, such as (9, 0) for an H200. It needs no context on the GPU."""
    from cuda.bindings import driver

    kinds = driver.CUdevice_attribute
    _, device = driver.cuDeviceGet(index)
    _, major = driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    _, minor = driver.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return int(major), int(minor)


def describe_gpus() -> list[dict[str, Any]]:
    """Describes each GPU that this process may use: its name, architecture, memory, and the driver's CUDA version."""
    gpus = []
    for index in range(num_gpus()):
        device = CudaDevice(index)  # the free memory is only known with a context
        try:
            facts = {"name": device.name, "architecture": device.architecture, "cuda": device.cuda_version}
            gpus.append(facts | {"total_bytes": device.total_bytes, "free_bytes": device.free_bytes})
        finally:
            device.close()
    return gpus


class CudaDevice:
    """GPU number `index` of this process.

    `code` has to be set before the first call of `launcher`: it returns the cubin and the launch properties of a kernel
    of the engine, by name.

    Raises:
        NoCodeForMachineError: there is no such GPU, or no driver, or cuda-bindings is not installed.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoCodeForMachineError(
                "engines cannot run on a GPU here",
                f"cuda-bindings is missing ({error})",
                "pip install 'enginewright[cuda]', or run the engine on the CPU with --device cpu.",
            ) from error
        self._driver: Any = driver
        self.code: Callable[[str], tuple[bytes, CompiledKernel]] | None = None
        self._functions: dict[tuple[str, int], tuple[Any, CompiledKernel]] = {}
        self._owned: dict[tuple[str, int], Any] = {}  # by freeing function and handle, in the order of creation
        try:
            self._call("cuInit", 0)
            self._device = self._call("cuDeviceGet", index)
        except (EngineError, OverflowError, RuntimeError) as error:  # RuntimeError: there is no driver at all
            raise NoCodeForMachineError(
                f"there is no GPU {index} here", str(error), "Run the engine on the CPU with --device cpu."
            ) from error
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.bind()
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._own("cuStreamDestroy", self._call("cuStreamCreate", flags))

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0) for an H200."""
        major, minor = (
            self._attribute(f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{name}") for name in ("MAJOR", "MINOR")
        )
        return major, minor

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def multiprocessors(self) -> int:
        return self._attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")

    @property
    def name(self) -> str:
        """Product name of the GPU."""
        return bytes(self._call("cuDeviceGetName", 256, self._device)).split(b"\0")[0].decode()

    @property
    def stream(self) -> int:
        """The stream's handle, for other libraries that use the same GPU."""
        return int(self._stream)

    @property
    def cuda_version(self) -> str:
        """Newest CUDA version that the driver supports, such as 13.0."""
        version = int(self._call("cuDriverGetVersion"))
        return f"{version // 1000}.{version % 1000 // 10}"

    @property
    def total_bytes(self) -> int:
        """Bytes of the GPU's memory."""
        return int(self._call("cuDeviceTotalMem", self._device))

    @property
    def free_bytes(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def bind(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free_bytes:
            raise NotEnoughMemoryError(
                f"{format_bytes(nbytes)} do not fit on the GPU", f"{format_bytes(self.free_bytes)} are free"
            )
        address: int = self._own("cuMemFree", int(self._call("cuMemAlloc", max(nbytes, 1))))
        self._call("cuMemsetD8Async", address, 0, max(nbytes, 1), self._stream)
        return address

    def free(self, address: int) -> None:
        """Frees memory from `allocate`."""
        self._give_back("cuMemFree", address)

    def pinned(self, nbytes: int) -> Bytes:
        address = self._own("cuMemFreeHost", int(self._call("cuMemHostAlloc", max(nbytes, 1), 0)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def unpin(self, buffer: Bytes) -> None:
        self._give_back("cuMemFreeHost", buffer.ctypes.data)

    def upload(self, address: int, data: Bytes) -> None:
        self._call("cuMemcpyHtoDAsync", address, data, data.nbytes, self._stream)

    def download(self, data: Bytes, address: int) -> None:
        self._call("cuMemcpyDtoHAsync", data, address, data.nbytes, self._stream)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoDAsync", to, source, nbytes, self._stream)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cuMemsetD8Async", address, 0, nbytes, self._stream)

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def event(self, *, sleeps: bool = False) -> Any:
        flags = self._driver.CUevent_flags
        sleep = flags.CU_EVENT_BLOCKING_SYNC if sleeps else flags.CU_EVENT_DEFAULT
        return self._own("cuEventDestroy", self._call("cuEventCreate", flags.CU_EVENT_DISABLE_TIMING | sleep))

    def record(self, event: Any) -> None:
        self._call("cuEventRecord", event, self._stream)

    def wait(self, event: Any) -> None:
        self._call("cuEventSynchronize", event)

    def launcher(
        self, kernel: str, threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> Callable[[Grid], None]:
        function, compiled = self._function(kernel, shared_bytes)
        if compiled.num_warps:  # a Triton kernel: Triton chooses the block's size, and adds two arguments
            threads, shared_bytes, arguments = 32 * compiled.num_warps, compiled.shared_bytes, (*arguments, 0, 0)
        # CUDA takes the addresses of the arguments, so both arrays have to live as long as the launcher.
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * len(arguments))(*[start + 8 * index for index in range(len(arguments))])
        parameters, stream, launch = ctypes.addressof(pointers), self._stream, self._driver.cuLaunchKernel
        kept = values, pointers

        def run(grid: Grid) -> None:
            (error,) = launch(function, *grid, threads, 1, 1, shared_bytes, stream, parameters, 0)
            if error:
                raise self._failed("cuLaunchKernel", error, f"{kernel} with {len(kept[0])} arguments")

        return run

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            self._driver.cuStreamEndCapture(self._stream)  # its own error says less than the one that is raised
            raise
        graph = self._call("cuStreamEndCapture", self._stream)
        whole = self._own("cuGraphExecDestroy", self._call("cuGraphInstantiate", graph, 0))
        self._call("cuGraphDestroy", graph)
        self._call("cuGraphUpload", whole, self._stream)
        return lambda: self._call("cuGraphLaunch", whole, self._stream)

    def _function(self, kernel: str, shared_bytes: int) -> tuple[Any, CompiledKernel]:
        key = kernel, shared_bytes
        if key not in self._functions:
            assert self.code is not None
            cubin, compiled = self.code(kernel)
            if compiled.scratch_bytes:
                raise CorruptEngineError(
                    f"{kernel} cannot be launched", "it wants memory for each block, which no engine gives", REBUILD
                )
            shared_bytes = compiled.shared_bytes or shared_bytes
            module = self._own("cuModuleUnload", self._call("cuModuleLoadData", cubin))
            function = self._call("cuModuleGetFunction", module, compiled.symbol.encode())
            if shared_bytes > 48 << 10:  # more needs this attribute
                limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", function, limit, shared_bytes)
            self._functions[key] = function, compiled
        return self._functions[key]

    def close(self) -> None:
        if self._context is None:
            return
        # In a context that an error has broken, each call fails, but releasing the context still frees its memory. So
        # errors are ignored.
        self._driver.cuCtxSetCurrent(self._context)
        self._driver.cuStreamSynchronize(self._stream)
        for (name, _), thing in reversed(self._owned.items()):
            getattr(self._driver, name)(thing)
        self._driver.cuDevicePrimaryCtxRelease(self._device)
        self._owned.clear()
        self._functions.clear()
        self._context = None

    def _own(self, gives_back: str, thing: Any) -> Any:
        self._owned[gives_back, int(thing)] = thing
        return thing

    def _give_back(self, name: str, thing: int) -> None:
        self._call(name, self._owned.pop((name, thing)))

    def _attribute(self, name: str) -> int:
        return int(self._call("cuDeviceGetAttribute", getattr(self._driver.CUdevice_attribute, name), self._device))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver's API. Returns its values without the error code, and raises EngineError."""
        error, *values = getattr(self._driver, name)(*arguments)
        if not error:
            return values[0] if len(values) == 1 else values
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise NotEnoughMemoryError(
                "the GPU's memory is full", name, "Use a smaller --kv-cache-memory or --max-num-seqs."
            )
        raise self._failed(name, error)

    def _failed(self, name: str, error: Any, what: str = "") -> EngineError:
        _, text = self._driver.cuGetErrorString(error)
        why = bytes(text).decode() if text else str(error)
        return EngineError(f"the GPU failed in {name}", f"{why}{f' ({what})' if what else ''}")
