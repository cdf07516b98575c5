"""A Llama checkpoint that computes the same function from other weights, so that no published grid is left in them.

    python benchmarks/rescale.py CHECKPOINT OUT [--seed 0]

A model that was published in 4 bits and opened again lies on a 4-bit grid, and a quantizer that finds this grid seems
to lose nothing. Wherever one weight follows another with nothing between but what commutes with a scale, a channel can
be made larger in one and smaller in the other:

    input norm / s      Q, K and V: columns × s
    norm after / s      gate and up: columns × s
    V: rows / s         O: columns × s  (of each query head that reads the KV head)
    up: rows / s        down: columns × s

s is a random number from 2^[-1/2, 1/2] for each channel, which moves every column of every matrix off the grid. The
embedding table, which is also the head, stays: nothing follows it that could undo a scale. Weights are rounded to BF16
again, so the function is the same up to BF16's rounding.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def rescale(checkpoint: Path, target: Path, seed: int = 0) -> None:
    """Write a rescaled copy of a Llama checkpoint (a folder with model.safetensors) into a folder, made if need be.

    Raises:
        ValueError: it is no Llama, or has biases, which these scales would have to pass as well.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"{checkpoint} is a {config['model_type']}, or has biases; this rescales Llama without biases")
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def random_scale(channels: int) -> torch.Tensor:
        return torch.exp2(torch.rand(channels, generator=generator, dtype=torch.float64) - 0.5)

    def multiply(name: str, factor: torch.Tensor) -> None:
        weights[name] = (weights[name].double() * factor).bfloat16()

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        for norm, following in (
            (f"{prefix}input_layernorm.weight", [f"{attention}{name}_proj.weight" for name in "qkv"]),
            (f"{prefix}post_attention_layernorm.weight", [f"{mlp}{name}_proj.weight" for name in ("gate", "up")]),
        ):
            scale = random_scale(config["hidden_size"])
            multiply(norm, 1 / scale)
            for name in following:
                multiply(name, scale)  # columns: weights are [out, in]
        scale = random_scale(config["num_key_value_heads"] * head_dim)
        multiply(f"{attention}v_proj.weight", 1 / scale[:, None])
        multiply(f"{attention}o_proj.weight", scale.view(-1, 1, head_dim).expand(-1, groups, -1).reshape(-1))
        scale = random_scale(config["intermediate_size"])
        multiply(f"{mlp}up_proj.weight", 1 / scale[:, None])
        multiply(f"{mlp}down_proj.weight", scale)

    target.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rescale(arguments.checkpoint, arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
