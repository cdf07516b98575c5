"""Memory of build and run of a mixture of experts that is larger than half the machine's memory.

    python benchmarks/large_mixture.py [--share 0.55] [--quant bf16] [--tokens 16] [--folder FOLDER]

A checkpoint of Qwen3-MoE's shape, 8 of 64 experts in each layer, whose random weights take `--share` of the machine's
memory in bfloat16; layers have the same weights, each in a file of its own. Prints what was written; of `engine build`
the seconds and the most anonymous memory at once (RssAnon); and of an engine that writes `--tokens` tokens after a
prompt of 8, in a process of its own: its anonymous memory, the most that it has of its file in memory at once, and
tokens/s. Needs room on the disk for the checkpoint and the engine, which are deleted at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from protocol.builds import build
from protocol.models import Model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from enginewright import LLM, SamplingParams

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
GB = 1e9


def layer_tensors() -> dict[str, torch.Tensor]:
    """Without the `model.layers.0.` in front of their names."""
    hidden, width = int(CONFIG["hidden_size"]), int(CONFIG["moe_intermediate_size"])
    heads, kv_heads, dim = (int(CONFIG[key]) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes = {"self_attn.q_proj": (heads * dim, hidden)}
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv_heads * dim, hidden))
    shapes |= {"self_attn.o_proj": (hidden, heads * dim), "mlp.gate": (int(CONFIG["num_experts"]), hidden)}
    for expert in range(int(CONFIG["num_experts"])):
        shapes |= {f"mlp.experts.{expert}.{part}_proj": (width, hidden) for part in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj"] = (hidden, width)
    matrices = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for name, shape in shapes.items()}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    return matrices | {name: torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}


def write_checkpoint(folder: Path, nbytes: float) -> int:
    """Writes as many complete layers as fit into `nbytes`, and returns the number of bytes written."""
    folder.mkdir()
    own = layer_tensors()
    layers = -(-int(nbytes) // sum(tensor.nbytes for tensor in own.values()))
    table = torch.empty(int(CONFIG["vocab_size"]), int(CONFIG["hidden_size"]), dtype=torch.bfloat16).normal_(std=0.5)
    ends = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    ends["model.norm.weight"] = torch.ones(int(CONFIG["hidden_size"]), dtype=torch.bfloat16)
    files = {f"model-{layer}.safetensors": layer for layer in range(layers)}
    index = dict.fromkeys(ends, "model-ends.safetensors")
    save_file(ends, folder / "model-ends.safetensors")
    for file, layer in files.items():
        tensors = {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in own.items()}
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: id for id, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def resident(kind: str) -> int:
    """Bytes of this process in memory: RssAnon, or RssFile."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def run(engine: Path, tokens: int) -> None:
    """Writes as many tokens, one after the other, and prints what they took, as JSON."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    anonymous, mapped = 0, 0
    with LLM(engine, max_model_len=256, max_num_seqs=1, kv_cache_memory=64 << 20) as llm:
        start = time.perf_counter()
        for _ in range(2):  # the first time, pages of the file are read
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": list(range(8))}], params, use_tqdm=False)
            anonymous, mapped = max(anonymous, resident("RssAnon")), max(mapped, resident("RssFile"))
        seconds = time.perf_counter() - start
    print(json.dumps({"anonymous": anonymous, "mapped": mapped, "rate": tokens / seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.55)
    parser.add_argument("--quant", default="bf16")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where files are for as long as it runs")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.tokens)
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, quant = Path(name) / "mixture", arguments.quant
        written = write_checkpoint(folder, arguments.share * memory)
        print(
            f"checkpoint: {written / GB:.2f} GB, {written / memory:.0%} of {memory / GB:.1f} GB of memory", flush=True
        )
        built = build(Model("mixture", folder, timed=False, judged=False), quant, ("--quant", quant), Path(name))
        of_file, of_build = built.path.stat().st_size / GB, built.rss_anon_bytes / GB
        print(f"engine build --quant {quant}: {of_file:.2f} GB in {built.seconds:.0f} s", flush=True)
        print(f"    RssAnon at most {of_build:.2f} GB", flush=True)
        command = [sys.executable, __file__, "--run", str(built.path), "--tokens", str(arguments.tokens)]
        ran = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(f"engine: {ran['rate']:.2f} tokens/s")
        print(f"    RssAnon {ran['anonymous'] / GB:.2f} GB, RssFile at most {ran['mapped'] / GB:.2f} GB")


if __name__ == "__main__":
    main()
