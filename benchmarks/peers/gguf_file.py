"""A Llama checkpoint as a GGUF file for llama.cpp: BF16, without a vocabulary, since benchmarks speak in token ids."""

import json
from pathlib import Path

import gguf
import torch
from safetensors import safe_open


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Names and layouts as llama.cpp's converter has them (conversion/llama.py): Q and K with the rows of each head
    interleaved, matrices BF16, norms F32.

    Args:
        checkpoint: a folder with config.json and model.safetensors, of model_type llama.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
    if config["model_type"] != "llama" or rope["rope_type"] != "default":
        raise ValueError(f"{checkpoint} is a {config['model_type']} with rope {rope['rope_type']}; this writes Llama")
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        for hf_name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            if hf_name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            tensor = tensors.get_tensor(hf_name)
            if ".q_proj." in hf_name or ".k_proj." in hf_name:
                tensor = _interleaved(tensor, heads if ".q_proj." in hf_name else kv_heads)
            name = names.get_name(hf_name, try_suffixes=(".weight",))
            if name is None:
                raise ValueError(f"GGUF has no name for {hf_name} of {checkpoint}")
            if tensor.ndim == 1:
                writer.add_tensor(name, tensor.float().numpy())
            else:
                data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (first half, second half) to pairs of one row of each."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
