"""The engines that are measured: our builds and the peers, each with its class and its settings.

One more build of ours is one more line of BUILDS.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers import environments
from peers.worker import NotMeasured, Worker
from protocol.builds import Built, build
from protocol.models import Model

SCRIPTS = Path(__file__).parent.parent / "peers"
# Precision classes → whose dot products bound them.
CLASSES = {"BF16": "bf16", "8-bit": "int8", "4-bit": "int8"}
NATIVE, AVX2 = "native", "avx2"
BF16_KV, U8_KV = 2.0, 1.0  # bytes of a number of K or V


@dataclass(frozen=True)
class Build:
    """A build of ours."""

    name: str
    kind: str  # a key of CLASSES
    options: tuple[str, ...]  # of `engine build`
    precision: str  # in words, for the table


BUILDS = (
    Build("bf16", "BF16", ("--quant", "bf16"), "BF16 weights and KV"),
    Build("int8-wo", "8-bit", ("--quant", "int8-wo"), "INT8 weights, BF16 activations and KV"),
    Build("fp8", "8-bit", ("--quant", "fp8"), "FP8 (E4M3) weights, BF16 activations and KV"),
    Build(
        "cpu-w8a8",
        "8-bit",
        ("--recipe", "cpu-w8a8"),
        "INT8 weights, smoothed (SmoothQuant), INT8 activations in groups of 64, INT8 KV",
    ),
    Build(
        "cpu-int4",
        "4-bit",
        ("--recipe", "cpu-int4"),
        "INT4 weights (AWQ) and INT8 activations in groups of 64, INT8 KV",
    ),
)
LLAMA_CPP = {  # type of the GGUF file → class, precision
    "BF16": ("BF16", "BF16 weights, F16 KV"),
    "Q8_0": ("8-bit", "INT8 weights and activations, groups of 32, F16 KV"),
    "Q4_0": ("4-bit", "INT4 weights, groups of 32, INT8 activations, F16 KV"),
}
LLAMA_CPP_SETTINGS = {
    "": {"flash_attn": True, "extra_buffers": True, "ubatch": 512},
    "no flash attention": {"flash_attn": False, "extra_buffers": True, "ubatch": 512},
    "not repacked": {"flash_attn": True, "extra_buffers": False, "ubatch": 512},
}
IK_SETTINGS: dict[str, list[str]] = {"": [], "repacked": ["-rtr"]}
OPENVINO = {
    "int8": ("8-bit", "INT8 weights, activations as the plugin chooses, 8-bit KV"),
    "int4": ("4-bit", "INT4 weights, groups of 128 or 64, INT8 head, activations as the plugin chooses, 8-bit KV"),
}
OPENVINO_BATCHED = {"": 512, "4096 a step": 4096}
VLLM_OPENMP = {"": "gnu", "Intel's OpenMP": "intel"}
PEERS = ("llama.cpp", "ik_llama.cpp", "OpenVINO", "vLLM", "transformers")


@dataclass(frozen=True)
class PeerEnvironment:
    """Where engines under test are made, ours and the peers', and the limits that they are made for."""

    envs: Path  # folder of Python environments, models and logs
    pythons: dict[str, Path]  # interpreters that are there already, by environment
    threads: int  # that compute, of each engine
    ik_bench: Path | None = None  # llama-batched-bench of a built ik_llama.cpp
    sequences: int = 32  # the most at once
    positions: int = 1024  # the most of one sequence
    kv_tokens: int = 32768  # the most positions of all sequences together
    built: dict[tuple[str, str], Built | NotMeasured] = field(default_factory=dict)  # by model and build

    @property
    def models(self) -> Path:
        return self.envs / "models"

    def python(self, name: str) -> str:
        return str(self.pythons.get(name) or environments.python_of(name, self.envs))

    def build(self, one: Build, model: Model) -> Built:
        """Our engine, built once. Raises NotMeasured if it cannot be."""
        key = (model.name, one.name)
        if key not in self.built:
            try:
                self.built[key] = build(model, one.name, one.options, self.envs / "engines")
            except NotMeasured as reason:
                self.built[key] = reason
        made = self.built[key]
        if isinstance(made, NotMeasured):
            raise made
        return made

    def kv_gib(self, model: Model) -> str:
        return str(max(1, -(-int(self.kv_tokens * model.kv_values * BF16_KV) // (1 << 30))))


@dataclass(frozen=True)
class Ready:
    """An engine whose worker can be started, and the bytes that a step of it reads."""

    command: list[str]  # of the worker
    weight_bytes: float  # that each step reads
    kv_bytes: float  # of one position
    env: dict[str, str] = field(default_factory=dict)  # environment variables of the worker

    def start(self, log: Path) -> Worker:
        return Worker(self.command, log, self.env)


Prepare = Callable[[Model, PeerEnvironment], Ready]


@dataclass(frozen=True)
class EngineUnderTest:
    """A build of ours or a peer, at one setting."""

    name: str
    peer: str | None  # a name of PEERS, or None for ours
    kind: str  # a key of CLASSES
    isa: str  # NATIVE or AVX2
    precision: str  # in words, for the table
    setting: str  # one of several that a peer is tried at; the first is ""
    prepare: Prepare  # makes what the engine needs, which takes minutes once; raises NotMeasured

    @property
    def label(self) -> str:
        return f"{self.name}, {self.setting}" if self.setting else self.name


def engines_under_test(peers: Sequence[str], builds: Sequence[str], *, every_setting: bool) -> list[EngineUnderTest]:
    """All of the named peers and builds. every_setting: a peer's whole grid, not its first setting alone."""
    found: list[EngineUnderTest] = []

    def add(name: str, peer: str | None, kind: str, isa: str, precision: str, grid: dict[str, Prepare]) -> None:
        name = name if isa == NATIVE else f"{name}, {isa.upper()}"
        found.extend(EngineUnderTest(name, peer, kind, isa, precision, *setting) for setting in grid.items())

    for isa in (NATIVE, AVX2):
        for one in BUILDS:
            if one.name in builds:
                add(f"engine {one.name}", None, one.kind, isa, one.precision, {"": _ours(one, isa)})
        for kind, (group, precision) in LLAMA_CPP.items() if "llama.cpp" in peers else ():
            grid = {setting: _llama_cpp(kind, values, isa) for setting, values in LLAMA_CPP_SETTINGS.items()}
            add(f"llama.cpp {kind}", "llama.cpp", group, isa, precision, grid)
    for kind, (group, precision) in LLAMA_CPP.items() if "ik_llama.cpp" in peers else ():
        grid = {setting: _ik_llama(kind, flags) for setting, flags in IK_SETTINGS.items()}
        add(f"ik_llama.cpp {kind}", "ik_llama.cpp", group, NATIVE, precision, grid)
    for kind, (group, precision) in OPENVINO.items() if "OpenVINO" in peers else ():
        grid = {setting: _openvino(kind, batched) for setting, batched in OPENVINO_BATCHED.items()}
        add(f"OpenVINO {kind.upper()}", "OpenVINO", group, NATIVE, precision, grid)
    if "vLLM" in peers:
        grid = {setting: _vllm(openmp) for setting, openmp in VLLM_OPENMP.items()}
        add("vLLM", "vLLM", "BF16", NATIVE, "BF16 weights and KV", grid)
    if "transformers" in peers:
        add("transformers", "transformers", "BF16", NATIVE, "BF16 weights and KV", {"": _transformers})
    return [one for one in found if every_setting or one.setting == ""]


def _ours(one: Build, isa: str) -> Prepare:
    def prepare(model: Model, environment: PeerEnvironment) -> Ready:
        made = environment.build(one, model)
        limits = {
            "threads": environment.threads,
            "max_num_seqs": environment.sequences,
            "max_model_len": environment.positions,
            "kv_cache_memory": int(environment.kv_tokens * made.kv_bytes) + (64 << 20),
            "enable_prefix_caching": False,
        }
        env = {} if isa == NATIVE else {"ENGINEWRIGHT_CPU_ISA": isa}
        command = [sys.executable, str(SCRIPTS / "ours.py"), str(made.path), json.dumps(limits)]
        return Ready(command, made.weight_bytes, made.kv_bytes, env)

    return prepare


def _gguf(kind: str, model: Model, environment: PeerEnvironment) -> Path:
    """The checkpoint as a GGUF file; quantized by llama.cpp."""
    from peers.gguf_file import write_gguf

    plain = environment.models / f"{model.folder.name}-BF16.gguf"
    if not plain.exists():
        with environments.new_path(plain) as part:
            write_gguf(model.folder, part)
    path = plain.with_name(f"{model.folder.name}-{kind}.gguf")
    if not path.exists():
        with environments.new_path(path) as part:
            command = [
                environment.python("llama.cpp"),
                str(SCRIPTS / "llama_cpp_quantize.py"),
                str(plain),
                str(part),
                kind,
            ]
            environments.run(command, f"quantizing to {kind}")
    return path


def _llama_cpp(kind: str, settings: dict[str, object], isa: str) -> Prepare:
    def prepare(model: Model, environment: PeerEnvironment) -> Ready:
        path = _gguf(kind, model, environment)
        python = environment.python("llama.cpp" if isa == NATIVE else "llama.cpp-avx2")
        command = [python, str(SCRIPTS / "llama_cpp_cpu.py"), str(path), str(environment.threads), json.dumps(settings)]
        return Ready(command, path.stat().st_size, BF16_KV * model.kv_values)

    return prepare


def _ik_llama(kind: str, flags: list[str]) -> Prepare:
    def prepare(model: Model, environment: PeerEnvironment) -> Ready:
        if environment.ik_bench is None:
            raise NotMeasured("no built copy was named: --ik-llama llama-batched-bench")
        path = _gguf(kind, model, environment)
        command = [sys.executable, str(SCRIPTS / "ik_llama_cpu.py"), str(environment.ik_bench), str(path)]
        return Ready(
            [*command, str(environment.threads), json.dumps(flags)], path.stat().st_size, BF16_KV * model.kv_values
        )

    return prepare


def _openvino(kind: str, batched: int) -> Prepare:
    def prepare(model: Model, environment: PeerEnvironment) -> Ready:
        python = Path(environment.python("openvino"))
        folder = environments.openvino_model(python, model.folder, environment.models, kind)
        numbers = [environment.threads, environment.sequences, batched, environment.kv_gib(model)]
        command = [str(python), str(SCRIPTS / "openvino_cpu.py"), str(folder), *map(str, numbers)]
        return Ready(command, (folder / "openvino_model.bin").stat().st_size, U8_KV * model.kv_values)

    return prepare


def _vllm(openmp: str) -> Prepare:
    def prepare(model: Model, environment: PeerEnvironment) -> Ready:
        python = Path(environment.python("vllm"))
        env = environments.vllm_openmp(python, openmp, environment.threads)
        env["VLLM_CACHE_ROOT"] = str((environment.envs / "vllm-cache").resolve())
        numbers = [environment.threads, environment.sequences, environment.positions, environment.kv_gib(model)]
        command = [str(python), str(SCRIPTS / "vllm_cpu.py"), str(model.folder), *map(str, numbers)]
        return Ready(command, model.checkpoint_bytes, BF16_KV * model.kv_values, env)

    return prepare


def _transformers(model: Model, environment: PeerEnvironment) -> Ready:
    script = str(SCRIPTS / "transformers_cpu.py")
    command = [environment.python("transformers"), script, str(model.folder), str(environment.threads), "bfloat16"]
    return Ready(command, model.checkpoint_bytes, BF16_KV * model.kv_values)
