"""Writes tests/golden/quantized.safetensors: small weights as the producing libraries pack and restore them.

Those libraries are no dependency of the tests: most want a torch of their own. Unpack their wheels (without
dependencies) and run, with their folders on PYTHONPATH:

    python tests/golden/quantized.py          compressed-tensors 0.20, AutoGPTQ 0.7.1, AutoAWQ 0.2.9, modelopt 0.47

(modelopt imports omegaconf, antlr4-python3-runtime 4.9, pulp 3, scipy and nvidia-ml-py, too.) With names of libraries
as arguments (`modelopt`), only the cases of those are written again.

Of a case there is what a checkpoint stores, `<case>/<name>`, and what the library restores of it, `<case>/=`; the
file's metadata has the quantization_config of each.
"""

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PATH = Path(__file__).with_suffix(".safetensors")
ROWS, COLUMNS = 32, 64
Case = tuple[str, Mapping[str, Any], Mapping[str, torch.Tensor]]


def weight(columns: int = COLUMNS, rows: int = ROWS) -> torch.Tensor:
    """Every eighth row is above 0, so that zero points at the end of their range are among them."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.1
    values[::8] = values[::8].abs()
    return values


def compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def case(
        name: str, form: str, parameters: Callable[[QuantizationArgs], Mapping[str, Any]], **settings: Any
    ) -> Case:
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress({"weight": weight().bfloat16(), **parameters(args)}, scheme)
        restored = compressor.decompress(stored, scheme)["weight"]
        group = json.loads(scheme.model_dump_json())
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
        return f"compressed-tensors/{name}", config, {**stored, "=": restored}

    def by_runs(size: int) -> Callable[[Any], Mapping[str, Any]]:
        def parameters(args: Any) -> Mapping[str, Any]:
            runs = weight().view(ROWS, -1, size)
            scale, zero = calculate_qparams(runs.amin(-1), runs.amax(-1), args)
            return {"weight_scale": scale.bfloat16(), "weight_zero_point": zero.to(torch.int8)}

        return parameters

    def whole(args: Any) -> Mapping[str, Any]:
        scale, zero = calculate_qparams(weight().min().view(1), weight().max().view(1), args)
        return {"weight_scale": scale.float(), "weight_zero_point": zero}

    def blocks(args: Any) -> Mapping[str, Any]:
        tiles = weight().view(2, 16, 2, 32)
        scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
        return {"weight_scale": scale.float(), "weight_zero_point": zero}

    def powers(args: Any) -> Mapping[str, Any]:
        largest = weight().view(ROWS, -1, 32).abs().amax(-1)
        return {"weight_scale": 2 ** (largest.log2().floor() - (2 if args.num_bits == 4 else 8))}

    def nv(args: Any) -> Mapping[str, Any]:
        largest = weight().view(ROWS, -1, 16).abs().amax(-1)
        factor = (6 * 448 / largest.max()).view(1)
        return {"weight_scale": (largest / 6 * factor).to(torch.float8_e4m3fn).float(), "weight_global_scale": factor}

    group = {"strategy": "group", "group_size": 32}
    for bits in (3, 4, 8):
        for symmetric in (True, False):
            name = f"pack {bits} bits, {'symmetric' if symmetric else 'with zero points'}"
            yield case(name, "pack-quantized", by_runs(32), num_bits=bits, symmetric=symmetric, **group)
    yield case("pack 4 bits, by rows", "pack-quantized", by_runs(COLUMNS), num_bits=4, strategy="channel")
    yield case("int8", "int-quantized", by_runs(COLUMNS), num_bits=8, strategy="channel")
    yield case("int8, zero points", "int-quantized", by_runs(COLUMNS), num_bits=8, strategy="channel", symmetric=False)
    yield case("int4 unpacked", "naive-quantized", by_runs(32), num_bits=4, **group)
    yield case("fp8", "float-quantized", whole, num_bits=8, type="float", strategy="tensor")
    yield case("fp8 by rows", "float-quantized", by_runs(COLUMNS), num_bits=8, type="float", strategy="channel")
    block = {"strategy": "block", "block_structure": [16, 32]}
    yield case("fp8 blocks", "float-quantized", blocks, num_bits=8, type="float", **block)
    yield case("mxfp8", "mxfp8-quantized", powers, num_bits=8, type="float", scale_dtype=torch.uint8, **group)
    yield case("mxfp4", "mxfp4-pack-quantized", powers, num_bits=4, type="float", scale_dtype=torch.uint8, **group)
    run = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    yield case("nvfp4", "nvfp4-pack-quantized", nv, num_bits=4, type="float", **run)


def auto_gptq() -> Iterator[Case]:
    linear_of = _bare("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    for bits, group, symmetric, ordered in (
        (4, 32, True, False),
        (4, 32, False, False),
        (4, 32, True, True),
        (4, -1, True, False),
        (3, 32, False, False),
        (2, 32, True, False),
        (8, -1, True, False),
    ):
        size = COLUMNS if group == -1 else group
        order = (
            torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(5)) if ordered else torch.arange(COLUMNS)
        )
        g_idx = (torch.arange(COLUMNS) // size)[torch.argsort(order)].int()
        runs = weight()[:, order].view(ROWS, -1, size)
        largest, middle = (1 << bits) - 1, 1 << bits - 1
        # This library cannot store zero points of 0.
        low, high = runs.amin(-1).clamp(max=-0.02), runs.amax(-1)
        scales = torch.maximum(-low, high) / (middle - 0.5) if symmetric else (high - low) / largest
        scales = scales.half().float()
        zeros = torch.full_like(scales, middle) if symmetric else (-low / scales).round().clamp(1, largest)
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float32)
        layer.weight.data = weight()
        packed = linear_of(bits, group, COLUMNS, ROWS, bias=False, weight_dtype=torch.float32)
        packed.pack(layer, scales.clone(), zeros.clone(), g_idx)
        restored = packed(torch.eye(COLUMNS)).t()
        stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        stored["scales"] = stored["scales"].half()
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
        name = f"{bits} bits, {'symmetric' if symmetric else 'zero points'}, {group}{', act-order' if ordered else ''}"
        yield f"gptq/{name}", config, {**stored, "=": restored}


def auto_awq() -> Iterator[Case]:
    linear_of = _bare("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = _bare("awq.utils.packing_utils").dequantize_gemm
    runs = weight().view(ROWS, -1, 32)
    low, high = runs.amin(-1).clamp(max=0), runs.amax(-1)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = weight()
    packed = linear_of.from_linear(layer, 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    restored = dequantize(packed.qweight, packed.qzeros, packed.scales.float(), 4, 32).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    yield "awq/gemm", config, {**stored, "=": restored}


def modelopt() -> Iterator[Case]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import get_quant_config
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    # What it restores on a CPU: weights as its own simulation has them, or what it has packed, unpacked.
    packed = {"NVFP4_DEFAULT_CFG": (NVFP4QTensor, 16), "MXFP8_DEFAULT_CFG": (MXFP8QTensor, 32)}
    packed |= {"MXFP4_DEFAULT_CFG": (MXFP4QTensor, 32), "W4A16_NVFP4_CFG": (NVFP4QTensor, 16)}
    stored_names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    for name, rows, columns in (
        ("FP8_DEFAULT_CFG", ROWS, COLUMNS),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", ROWS, COLUMNS),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", 130, 40),
        ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", 16, 256),
        ("INT4_AWQ_CFG", ROWS, 128),
        ("INT8_WEIGHT_ONLY_CFG", ROWS, COLUMNS),
        ("INT8_DEFAULT_CFG", ROWS, COLUMNS),
        ("INT8_SMOOTHQUANT_CFG", ROWS, COLUMNS),
        ("NVFP4_DEFAULT_CFG", ROWS, COLUMNS),
        ("W4A16_NVFP4_CFG", ROWS, COLUMNS),
        ("MXFP8_DEFAULT_CFG", ROWS, COLUMNS),
        ("MXFP4_DEFAULT_CFG", ROWS, COLUMNS),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
        model[0].weight.data = weight(columns, rows)
        x = torch.randn(16, columns, generator=torch.Generator().manual_seed(4)) * torch.linspace(0.1, 3, columns)
        # On a CPU, FP4 and MXFP8 cannot be simulated; their scales are the weight's own.
        mtq.quantize(model, getattr(mtq, name), None if name in packed else lambda model, x=x: model(x))
        (layer,), config = model, get_quant_config(model)["quantization"]
        if name not in packed:  # what it simulates has no ties, which its export may round the other way
            layer.weight.data = layer.weight_quantizer(layer.weight)
        restored = None if name in packed else layer.weight_quantizer(layer.weight)
        inputs = getattr(layer.input_quantizer, "_pre_quant_scale", None)
        _export_quantized_weight(layer, torch.bfloat16)
        stored = {key: getattr(layer, key) for key in stored_names if hasattr(layer, key)}
        if inputs is not None:
            stored["pre_quant_scale"], restored = inputs.bfloat16(), restored * inputs.bfloat16().float()
        if restored is None:
            tensor, run = packed[name]
            scales = {"scale": stored["weight_scale"], "double_scale": stored.get("weight_scale_2")}
            unpack = tensor(torch.Size((rows, columns)), torch.float32, stored["weight"])
            restored = unpack.dequantize(torch.float32, **scales, block_sizes={-1: run})
        yield f"modelopt/{name}", {"quant_method": "modelopt", **config}, {**stored, "=": restored}


def _bare(name: str) -> Any:
    """A module whose packages are not imported: they want more than is here."""
    *packages, _ = name.split(".")
    for length in range(1, len(packages) + 1):
        package = ".".join(packages[:length])
        if package not in sys.modules:
            folder = next(
                Path(root, *packages[:length]) for root in sys.path if Path(root, *packages[:length]).is_dir()
            )
            stand_in = types.ModuleType(package)
            stand_in.__path__ = [str(folder)]
            sys.modules[package] = stand_in
    return importlib.import_module(name)


def main() -> None:
    makers = {"compressed-tensors": compressed_tensors, "gptq": auto_gptq, "awq": auto_awq, "modelopt": modelopt}
    chosen = sys.argv[1:] or list(makers)
    tensors, configs = {}, {}
    if PATH.exists():
        with safe_open(PATH, framework="pt") as file:
            kept = [name for name in makers if name not in chosen]
            configs = {
                name: config
                for name, config in json.loads(file.metadata()["configs"]).items()
                if name.partition("/")[0] in kept
            }
            tensors = {key: file.get_tensor(key) for key in file.keys() if key.partition("/")[0] in kept}  # noqa: SIM118
    for make in chosen:
        for name, config, stored in makers[make]():
            configs[name] = config
            tensors |= {
                f"{name}/{key}": value.detach().contiguous() for key, value in stored.items() if value is not None
            }
    save_file(tensors, PATH, {"configs": json.dumps(configs)})
    print(f"{PATH}: {len(configs)} cases, {PATH.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
