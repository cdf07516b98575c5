"""Ahead-of-time compilation of GPU kernels: what comes out, that it is the same each time, and what is refused."""

import os
import re
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from enginewright.builder import build
from enginewright.builder.build import BuildConfig, quant_config
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.cuda import Compiled, Instance, compile, nvrtc, triton_kernel
from enginewright.builder.cuda.cubin import resources
from enginewright.builder.cuda.kernel import Failed, Job
from enginewright.builder.forecast import forecast
from enginewright.builder.progress import Silent
from enginewright.errors import EngineError, UsageError
from enginewright.plan import COMMON_DIMS, Linear, linear
from enginewright.plugins import PLUGINS
from enginewright.plugins.gemm.adapters_cuda import ADAPTER_SOURCES, adapter_launches
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from enginewright.runtime.env import compiler_environment
from tests.helpers.assembler import assembler_log
from tests.helpers.compiled import compile_kernels
from tests.helpers.cuda_attention import Attention
from tests.helpers.cuda_gemm import Gemm
from tests.helpers.paged_kv import Heads
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

# What makes compilers write differently: names local to a file, and a header.
KERNEL = r"""
#pragma once
#include "inner.cuh"
namespace enginewright {
namespace { __device__ int counter = 3; }
template <int kWarp, int kLocal>
__global__ void __launch_bounds__(256) add(const float* x, float* y, int n) {
  __shared__ float part[kWarp];
  extern __shared__ float rest[];
  float kept[kLocal];
  for (int i = 0; i < kLocal; ++i) kept[i] = x[i * n];
  part[threadIdx.x % kWarp] = rest[threadIdx.x] * scale() + counter;
  __syncthreads();
  if constexpr (kLocal > 1) {  // indices that are not known: an array in memory, not in registers
    for (int i = 0; i < n; ++i) kept[i * 7 % kLocal] += kept[i * 3 % kLocal];
  }
  y[threadIdx.x] = part[(threadIdx.x + 1) % kWarp] + kept[n % kLocal];
}
template <int kSize>
__global__ void __launch_bounds__(1024, 1) spill(float* y, int n) {
  float a[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) a[i] = y[i * n];
  __syncthreads();
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) a[i] = a[i] * a[(i * 5 + 3) % kSize] + j;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) y[i * n] = a[i];
}
__global__ void __launch_bounds__(32) fused(float* y) { y[0] = y[1] * y[2] + y[3]; }
}
"""
INNER = "#pragma once\ninline float scale() { return 2.0f; }  // a function of the device, without saying so\n"
ADD = Instance("add.cuh", "enginewright::add<32, 1>")
LOCAL = Instance("add.cuh", "enginewright::add<33, 64>")
SPILL = Instance("add.cuh", "enginewright::spill<128>")
FUSED = Instance("add.cuh", "enginewright::fused")
SOME_SMS = ("sm_80", "sm_90a", "sm_120")  # tests/long has the others


def write_sources(folder: Path, inner: str = INNER) -> Path:
    folder.mkdir()
    (folder / "add.cuh").write_text(KERNEL)
    (folder / "inner.cuh").write_text(inner)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("cuda") / "sources")


@pytest.fixture(scope="module")
def made(sources: Path, cache: Path) -> dict[str, dict[Instance, Compiled]]:
    return compile_kernels([ADD, LOCAL, SPILL, FUSED], [*SOME_SMS, "ptx"], 2, sources=sources, cache=cache)


def reported(expression: str, sm: str) -> tuple[int, ...]:
    """Reads a kernel's registers, stack bytes and shared memory bytes from the assembler's log."""
    log = assembler_log(KERNEL.replace('#include "inner.cuh"', INNER), expression, sm)
    found = [re.search(rf"(\d+) {what}", log) for what in ("registers", "bytes cumulative", "bytes smem")]
    return tuple(int(match[1]) if match else 0 for match in found)


@pytest.mark.parametrize("sm", SOME_SMS)
def test_resources_are_what_the_assembler_reports(sm: str, made: dict[str, dict[Instance, Compiled]]) -> None:
    for kernel in (ADD, LOCAL, SPILL):
        found = made[sm][kernel]
        numbers = (found.registers, found.local_bytes, found.static_shared_bytes)
        assert numbers == reported(kernel.expression, sm)
    assert made[sm][ADD].local_bytes == 0 < min(made[sm][kernel].local_bytes for kernel in (LOCAL, SPILL))
    assert made[sm][ADD].static_shared_bytes == 128


def test_symbols_and_forms(made: dict[str, dict[Instance, Compiled]]) -> None:
    assert list(made) == [*SOME_SMS, "ptx"]
    for sm, kernels in made.items():
        for kernel, compiled in kernels.items():
            assert re.fullmatch(r"_Z\w+", compiled.symbol)
            assert compiled.symbol.encode() in compiled.cubin
            assert compiled.cubin.startswith(b"\x7fELF") == (sm != "ptx"), kernel
    assert b".target sm_80" in made["ptx"][ADD].cubin


def test_multiply_and_add_are_not_fused(made: dict[str, dict[Instance, Compiled]]) -> None:
    text = made["ptx"][FUSED].cubin.decode()
    assert "mul.f32" in text or "mul.rn.f32" in text
    assert "fma" not in text


def test_the_same_bytes_from_another_process_and_folder(
    made: dict[str, dict[Instance, Compiled]], tmp_path: Path
) -> None:
    elsewhere = write_sources(tmp_path / "other sources")
    script = (
        "import sys\nfrom pathlib import Path\nfrom enginewright.builder.cuda import Instance, compile_each\n"
        f"wanted = [(sm, kernel) for sm in ('sm_90a', 'ptx') for kernel in ({ADD!r}, {LOCAL!r})]\n"
        "for kernel in compile_each(wanted, 1, sources=Path(sys.argv[1])).values(): print(kernel.cubin.hex())\n"
    )
    for name in ("numpy.py", "msgspec.py"):
        (tmp_path / name).write_text("raise SystemExit('code of the working directory ran')")
    found = subprocess.run(
        [sys.executable, "-P", "-c", script, str(elsewhere)],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [made[sm][kernel].cubin.hex() for sm in ("sm_90a", "ptx") for kernel in (ADD, LOCAL)]
    assert found.stdout.split() == expected
    assert list((tmp_path / "cache" / "enginewright" / "cuda").glob("*/*"))
    assert not any(str(tmp_path).encode().hex() in line for line in found.stdout.split())


def test_what_was_compiled_is_taken_from_the_cache(
    sources: Path, cache: Path, made: dict[str, dict[Instance, Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(jobs: Sequence[Job], processes: int) -> Generator[Compiled | Failed]:
        assert not jobs
        yield from ()

    monkeypatch.setattr(compile, "compile_all", nothing)
    assert compile_kernels([ADD, SPILL], ["sm_80", "ptx"], sources=sources, cache=cache) == {
        sm: {kernel: made[sm][kernel] for kernel in (ADD, SPILL)} for sm in ("sm_80", "ptx")
    }


def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    sources, cache = write_sources(tmp_path / "sources"), tmp_path / "cache"
    (before,) = compile_kernels([ADD], ["sm_80"], sources=sources, cache=cache)["sm_80"].values()
    (sources / "inner.cuh").write_text(INNER.replace("2.0f", "3.0f"))
    (after,) = compile_kernels([ADD], ["sm_80"], sources=sources, cache=cache)["sm_80"].values()
    assert before.cubin != after.cubin
    assert before.symbol == after.symbol


@pytest.mark.parametrize("keep", [slice(-1), slice(1, None), slice(40), slice(0)])
def test_damaged_entries_are_made_again(keep: slice, sources: Path, tmp_path: Path) -> None:
    first = compile_kernels([FUSED], ["sm_80"], sources=sources, cache=tmp_path)
    (entry,) = tmp_path.glob("*/*")
    whole = entry.read_bytes()
    entry.write_bytes(whole[keep])
    assert compile_kernels([FUSED], ["sm_80"], sources=sources, cache=tmp_path) == first
    assert entry.read_bytes() == whole
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_a_cache_that_cannot_be_written_is_no_error(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = compile_kernels([FUSED], ["sm_80"], sources=sources, cache=tmp_path / "file")
    assert made["sm_80"][FUSED].registers > 0


def test_a_kernel_that_does_not_compile_is_shown(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text("__global__ void k() {\n  undeclared = 1;\n}\n")
    with pytest.raises(EngineError) as caught:
        compile_kernels([Instance("bad.cuh", "k")] * 2, ["sm_80", "sm_90a"], sources=tmp_path, cache=tmp_path / "cache")
    text = str(caught.value)
    assert "k of bad.cuh does not compile for sm_80" in text
    assert 'bad.cuh(2): error: identifier "undeclared" is undefined' in text
    assert "fault of enginewright" in text


def test_names_that_are_not_there(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no kernel none"):
        compile_kernels([Instance("none.cuh", "k")], ["sm_80"], sources=sources, cache=tmp_path)
    with pytest.raises(EngineError, match="does not compile"):
        compile_kernels([Instance("add.cuh", "enginewright::sub<1>")], ["sm_80"], sources=sources, cache=tmp_path)


def test_an_unknown_architecture(sources: Path) -> None:
    with pytest.raises(UsageError, match=r"Did you mean cuda:sm_90a\? There are cpu, cuda:sm_80, "):
        compile_kernels([ADD], ["sm_80", "sm_90"], sources=sources)


@pytest.mark.parametrize(
    ("wheels", "why"),
    [
        ({"enginewright-none": ""}, "enginewright-none is not installed"),
        ({"numpy": "13.0."}, "numpy is [0-9.]+, and must be 13.0.*"),
    ],
)
def test_a_compiler_that_is_not_installed(
    wheels: dict[str, str], why: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile.nvrtc, "WHEELS", wheels)
    with pytest.raises(UsageError, match=rf"GPU kernels cannot be compiled: {why}\n.*enginewright\[cuda-build\]"):
        compile_kernels([ADD], ["sm_80"], sources=sources)


@pytest.mark.parametrize(
    ("compiler", "family", "hint"),
    [(nvrtc, "llama", "cuda-build]'"), (triton_kernel, "nemotron_h", "cuda-triton]', or build with --batch-invariant")],
)
def test_a_build_without_a_compiler_that_it_needs_ends_before_anything_is_done(
    compiler: ModuleType, family: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(checkpoint: Checkpoint, config: BuildConfig, *_: object) -> None:
        assert not config.method.calibrated, "it calibrates, which takes minutes"

    monkeypatch.setattr(compiler, "WHEELS", {"enginewright-none": ""})
    monkeypatch.setattr(build, "calibrate", calibrate)
    config = tiny_config(family)
    checkpoint, path = MemoryCheckpoint.of(tiny_model(config), config), tmp_path / "x.engine"
    for begin in forecast, build.build_engine:
        for quant in "bf16", "int8-sq":
            wanted = BuildConfig(quant=quant_config(quant), targets=("cpu", "cuda:sm_80"))
            with pytest.raises(UsageError, match=f"(?s)enginewright-none is not installed.*{re.escape(hint)}"):
                begin(checkpoint, wanted, path, Silent())
    assert checkpoint.reads == [] and list(tmp_path.iterdir()) == []


def test_batch_invariant_engines_need_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "WHEELS", {"enginewright-none": ""})
    wanted = BuildConfig(targets=("cuda:sm_80",), batch_invariant=True)
    planned = forecast(MemoryCheckpoint.tiny("nemotron_h"), wanted, tmp_path / "x.engine", Silent())
    assert any(kernel.startswith("selective_state") for kernel in planned.kernels["cuda"])


def test_processes_that_compile_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert compiler_environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_a_compiler_that_dies_is_an_error(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="has died"):
        compile_kernels([ADD, LOCAL, SPILL], ["sm_80"], 2, sources=sources, cache=tmp_path)


def test_what_is_no_cubin_is_refused(made: dict[str, dict[Instance, Compiled]]) -> None:
    whole = made["sm_90a"][ADD]
    for cubin in (b"", b"MZ", whole.cubin[:64], whole.cubin[:-600]):
        with pytest.raises(ValueError):
            resources(cubin, whole.symbol)
    with pytest.raises(ValueError):
        resources(whole.cubin, "other")


def wgmma(format: str, rows: int, **more: object) -> str:
    return Gemm(format, rows, 600, wgmma=True, **more).launch(5000).kernel  # type: ignore[arg-type]


def prefill(head_dim: int, **more: object) -> str:
    return Attention(Heads(8, 2, head_dim), wgmma=True, **more).launches()[0].kernel  # type: ignore[arg-type]


IN_FLIGHT = [
    ("gemm_wgmma", wgmma("bf16", 70, bias=True), False),  # one warpgroup
    ("gemm_wgmma", wgmma("bf16", 300, epilogue="swiglu", large=True), False),  # two
    ("gemm_wgmma", wgmma("w8a16", 300, large=True), False),
    ("gemm_wgmma", wgmma("w4a16", 300, group=128, zeros=True, large=True), False),
    ("gemm_wgmma", wgmma("w8a8", 300, group=32, epilogue="geglu", large=True), False),
    ("paged_prefill_wgmma", prefill(64), False),
    ("paged_prefill_wgmma", prefill(128), False),
    ("paged_prefill_wgmma", prefill(128, window=1000, softcap=50.0, out="f32"), False),
    ("gemm_wgmma", wgmma("fp8a8", 70, bias=True), False),
    ("gemm_wgmma", wgmma("fp8a8", 4096, epilogue="swiglu", to="bf16", large=True), False),
    ("gemm_wgmma", wgmma("fp8a8", 300, group=128, epilogue="swiglu", large=True), False),
    ("gemm_wgmma", wgmma("fp8a8", 300, group=32, large=True), False),
    ("wgmma_product", "wgmma_product<Kind::bf16, 8, 128, Fault::none>", False),
    ("wgmma_product", "wgmma_product<Kind::bf16, 8, 128, Fault::reads_d>", True),
]
# Each format; tests/long has the other sizes and epilogues.
SOME_IN_FLIGHT = [case for n, case in enumerate(IN_FLIGHT) if n not in (0, 6, 7, 9, 11)]


@pytest.mark.parametrize(("header", "expression", "waits"), SOME_IN_FLIGHT)
def test_products_of_warpgroups_stay_in_flight(header: str, expression: str, waits: bool) -> None:
    """The assembler says where it makes them wait; and nothing is spilled."""
    log = assembler_log(f'#include "{header}.cuh"\nusing namespace enginewright;\n', expression, "sm_90a")
    assert "0 bytes spill stores" in log and ("(C75" in log) == waits


def _recurrences() -> list[tuple[str, dict[str, Matrix], dict[str, int | float | str]]]:
    """Recurrences of models' sizes: 16 and 32 heads of 128, and Nemotron-H's 128 of 64."""
    rows = linear(tokens=1)

    def matrix(columns: int, dtype: str = "f32") -> Matrix:
        return Matrix(dtype, rows, columns, columns + 64, columns)

    heads = dict.fromkeys(("decay", "beta"), matrix(32))
    state = Matrix("f32", Linear(), 1 << 19, 1 << 19, 1 << 19, block_stride=1 << 24)
    taps = Matrix("f32", Linear(8192), 4, 4, 4, "r16_columns")
    conv = dict.fromkeys(("x", "before", "behind"), matrix(8192))
    wide = dict.fromkeys(("x", "z", "out"), matrix(4096))
    weight = Matrix("f32", Linear(1), 128, 128, 128)
    shared = {**dict.fromkeys(("query", "key"), matrix(2048)), **dict.fromkeys(("value", "out"), matrix(4096))}
    narrow = {**dict.fromkeys(("query", "key"), matrix(1024)), **dict.fromkeys(("value", "out"), matrix(8192))}
    return [
        ("CausalConv", {**conv, "taps": taps, "state": state, "out": matrix(8192, "bf16")}, {"activation": "silu"}),
        (
            "GatedDelta",
            {**shared, **heads, "state": state},
            {"heads": 32, "key_heads": 16, "scale": 0.1, "epsilon": 1e-6},
        ),
        (
            "SelectiveState",
            {**narrow, "decay": matrix(128), "state": state},
            {"heads": 128, "key_heads": 8, "dt_min": 0.001},
        ),
        ("GatedRmsNorm", {**wide, "weight": weight}, {"epsilon": 1e-6, "group": 0, "run": 128, "gate": "after"}),
    ]


def _latent() -> list[tuple[str, dict[str, Matrix], dict[str, int | float | str]]]:
    """DeepSeek V3's 128 heads, and a latent vector of 512 columns."""
    rows, heads, latent, rope = linear(tokens=1), 128, 512, 64

    def matrix(columns: int, dtype: str = "f32") -> Matrix:
        return Matrix(dtype, rows, columns, columns + 64, columns)

    half, width = matrix(rope // 2), latent + rope
    plane = Matrix("bf16", Linear(), width, width, width, block_stride=1 << 20)
    write = {"q": matrix(heads * latent), "q_rope": matrix(heads * rope), "c": matrix(latent), "k_rope": matrix(rope)}
    queries, results = matrix(heads * width, "bf16"), matrix(heads * latent, "bf16")
    weight = Matrix("bf16", Linear(heads * 128), latent, latent, latent, "r16")
    return [
        ("LatentWrite", {**write, "cos": half, "sin": half, "latent": plane, "q_out": queries}, {"heads": heads}),
        (
            "LatentPagedAttention",
            {"q": queries, "latent": plane, "out": results, "partials": matrix(4 * 32 * (latent + 2))},
            {"heads": heads, "head_dim": width, "value_dim": latent, "scale": 0.1},
        ),
        ("HeadGemm", {"x": results, "weight": weight, "out": matrix(heads * 128, "bf16")}, {"heads": heads}),
    ]


def few_families_instances() -> list[Instance]:
    """Kernels that the tiny models of other tests have no use for."""
    rows, wide = linear(tokens=1), Matrix("f32", linear(tokens=1), 70, 192, 70)
    half, vector = Matrix("f32", rows, 3, 64, 3), Matrix("f32", Linear(1), 70, 70, 70)
    plane = Matrix("bf16", Linear(), 24, 32, 32, block_stride=8192)
    norm: dict[str, int | float | str] = {"epsilon": 1e-5, "group": 0}
    q_out = Matrix("bf16", rows, 144, 192, 192)
    q, kv = Matrix("f32", rows, 144, 256, 144), Matrix("f32", rows, 48, 256, 48)
    calls: list[tuple[str, dict[str, Matrix], dict[str, int | float | str]]] = [
        ("LayerNorm", {"x": wide, "weight": vector, "bias": vector, "out": wide}, norm),
        ("Rope", {"x": wide, "cos": half, "sin": half, "out": wide}, {"heads": 7}),
        (
            "RopeKvWrite",
            {"q": q, "k": kv, "v": kv, "key": plane, "value": plane, "q_out": q_out},
            {"heads": 6, "kv_heads": 2, "head_dim": 24},
        ),
        (
            "RopeQueries",
            {"q": q, "cos": half, "sin": half, "key": plane, "value": plane, "q_out": q_out},
            {"heads": 6, "kv_heads": 2, "head_dim": 24},
        ),
        ("Scale", {"x": wide, "factor": Matrix("f32", Linear(1), 1, 1, 1), "out": wide}, {}),
        *_recurrences(),
        *_latent(),
        *(
            ("Activation", {"x": wide, **gate, "out": wide}, {"activation": activation, "group": 0})
            for activation, gate in (
                ("sigmoid", {"gate": wide}),
                ("silu", {}),
                ("gelu", {}),
                ("gelu_tanh", {}),
                ("relu2", {}),
            )
        ),
    ]
    found = [
        Instance(launch.kernel.partition("<")[0], launch.kernel)
        for launch in Attention(Heads(6, 2, 64), sinks=True).launches()
    ]
    found = [Instance(f"{instance.source}.cuh", instance.expression) for instance in found]
    for op, operands, attributes in calls:
        kernel = PLUGINS[op].kernels["cuda"]
        assert isinstance(kernel, CudaKernel)
        dims = (*COMMON_DIMS, "kv_blocks", "kv_splits")
        # Batch-invariant, a recurrence has its kernel in C++ alone; those in Triton are in test_triton.py.
        for launch in kernel.launches(Call(operands, attributes, ("sm_80",), batch_invariant=True, dims=dims)):
            found.append(Instance(kernel.sources[launch.kernel.partition("<")[0]], launch.kernel))
    for launch in adapter_launches(("bf16", "i8", "e4m3")).launches():
        found.append(Instance(ADAPTER_SOURCES[launch.kernel.partition("<")[0]], launch.kernel))
    return found


def test_kernels_of_few_families_are_compiled(sms: Sequence[str] = ("sm_120",)) -> None:
    """tests/long has all architectures."""
    found = few_families_instances()
    for sm, compiled in compile_kernels(found, sms).items():
        assert [one.local_bytes for one in compiled.values()] == [0] * len(found), sm
