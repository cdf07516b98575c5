"""Every key of config.json is read, or known to change nothing, or refused by name, in every family."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoConfig

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import HARMLESS, Harmless
from enginewright.builder.models import ALIASES, build_graph, check_config
from enginewright.builder.pooling import Pooling
from enginewright.builder.tensors import AssumedTensors
from enginewright.builder.weights import Weights
from enginewright.errors import UnsupportedModelError
from tests import tolerances
from tests.helpers.graphs import Content, content
from tests.helpers.harmless_keys import Reference, excused
from tests.helpers.tiny import (
    ENCODERS,
    FAMILIES,
    HYBRIDS,
    OF_EACH_BLOCK,
    UNPUBLISHED,
    MemoryCheckpoint,
    tiny_config,
    tiny_model,
)
from tests.helpers.tiny_gguf import ARCHITECTURES, write_model
from tests.helpers.tiny_gguf import tiny_model as tiny_gguf_model

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden/published_configs.json").read_text()
)

# Of models with experts, latent KV, recurrences, several predicted tokens, other scales: each changes what is computed.
OF_OTHER_FAMILIES: Mapping[str, Any] = {
    "alibi": True,
    "attention_multiplier": 0.0078125,
    "attention_sink_bias": True,
    "attn_output_gate": True,
    "clip_qkv": 8.0,
    "conv_L_cache": 3,
    "decoder_sparse_step": 1,
    "dflash_config": {"block_size": 8},
    "dual_chunk_attention_config": {"chunk_size": 262144},
    "embedding_multiplier": 12.0,
    "first_k_dense_replace": 1,
    "full_attention_interval": 4,
    "is_causal": False,
    "kv_lora_rank": 512,
    "linear_conv_kernel_dim": 4,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "mamba_d_state": 128,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 768,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "no_rope_layers": [1, 1, 0],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_kv_shared_layers": 20,
    "num_local_experts": 8,
    "num_nextn_predict_layers": 1,
    "per_layer_config": {"0": {"head_dim": 8}},
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "quantization": {"bits": 4, "group_size": 64},
    "residual_multiplier": 0.22,
    "rotary_pct": 0.25,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "shared_expert_intermediate_size": 5632,
    "sliding_window_pattern": 2,
    "text_config": {"hidden_size": 64},
    "use_qk_norm": True,
    "v_head_dim": 128,
    "xqzw_flux": 0,
}
EPSILONS = {"cohere2": "layer_norm_eps", "gpt2": "layer_norm_epsilon", "starcoder2": "norm_epsilon"}
# What transformers 4 wrote into every config that was saved as a whole.
OF_TRANSFORMERS_4: Mapping[str, Any] = {
    **dict.fromkeys(("add_cross_attention", "is_decoder", "is_encoder_decoder", "do_sample", "early_stopping"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "remove_invalid_values"), False),
    **dict.fromkeys(("return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "torchscript"), False),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "prefix")),
    **dict.fromkeys(("decoder_start_token_id", "exponential_decay_length_penalty", "finetuning_task")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "problem_type", "sep_token_id")),
    **dict.fromkeys(("suppress_tokens", "task_specific_params", "tokenizer_class")),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "temperature", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    **{"chunk_size_feed_forward": 0, "diversity_penalty": 0.0, "max_length": 20, "top_k": 50, "pruned_heads": {}},
    **{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "return_dict": True},
    **{"use_bfloat16": False, "torch_dtype": "bfloat16", "_attn_implementation_autoset": True},
}


def harmless_of(family: str) -> dict[str, Harmless]:
    """The family's own list."""
    module = importlib.import_module(f"enginewright.builder.models.{family}")
    return dict(vars(module).get("HARMLESS", {}))


UNKNOWN = [(family, start) for family in FAMILIES for start in range(3)]
SOME_UNKNOWN = [(family, n % 3) for n, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "start"), SOME_UNKNOWN)
def test_any_one_unknown_key_is_refused_by_name(family: str, start: int) -> None:
    """A third of the keys; tests/long has the others."""
    check_config(tiny_config(family))
    own = ConfigReader(tiny_config(family))
    own.read(str, "model_type")
    importlib.import_module(f"enginewright.builder.models.{family}").build(own, Weights(AssumedTensors()))
    known = own.known() | harmless_of(family).keys()
    foreign = {key: value for key, value in OF_OTHER_FAMILIES.items() if key not in known}
    for key, value in list(foreign.items())[start::3]:
        with pytest.raises(UnsupportedModelError) as error:
            check_config(tiny_config(family, **{key: value}))
        assert error.value.exit_code == 3
        assert error.value.why.startswith(f"{key} = {value!r}"[:80]), error.value
        assert "may compute wrong results" in error.value.fix


@pytest.mark.parametrize("family", FAMILIES)
def test_all_unknown_keys_are_named_at_once_before_any_tensor_is_missed(family: str) -> None:
    config = tiny_config(family, zebra=1, number_of_stripes=64, add_cross_attention=True, absent=None)
    with pytest.raises(UnsupportedModelError) as error:
        build_graph(MemoryCheckpoint(config, {}))
    assert error.value.why == (
        "add_cross_attention = True (only False can be built), number_of_stripes = 64, zebra = 1"
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rms_norm_epz", "(did you mean rms_norm_eps?)"),
        ("num_key_value_head", "(did you mean num_key_value_heads?)"),
        ("atention_dropout", "(did you mean attention_dropout?)"),
        ("hidden_siz", None),  # hidden_size is there already
        ("n_routed_experts", None),
    ],
)
def test_a_key_near_a_known_one_is_asked_about(key: str, said: str | None) -> None:
    config = tiny_config("llama", **{key: 3})
    del config["num_key_value_heads"]
    with pytest.raises(UnsupportedModelError) as error:
        check_config(config)
    assert error.value.why == f"{key} = 3" + (f" {said}" if said else "")


@pytest.mark.parametrize("family", OF_EACH_BLOCK)
def test_harmless_keys_change_nothing(family: str) -> None:
    """tests/long has the other families."""
    config = tiny_config(family)
    known = {**HARMLESS, **harmless_of(family)}
    # A value of no type that anything reads, wherever any value is harmless.
    added = {key: entry.values[0] if entry.values else ["whatever"] for key, entry in known.items()}
    assert serialized(config | added) == serialized(config)
    assert serialized({**config, EPSILONS.get(family, "rms_norm_eps"): 1e-3}) != serialized(config)
    check_values(family, known if family == "llama" else harmless_of(family))


def check_values(family: str, known: Mapping[str, Harmless]) -> None:
    """Checks each value of each harmless key by itself; tests/long has the keys of all families in each of them."""
    config = tiny_config(family)
    for key, entry in known.items():
        for value in entry.values or ():
            check_config({**config, key: value})
        if entry.values is not None:
            with pytest.raises(UnsupportedModelError, match=rf"{key} = 'else' \(only .* can be built\)"):
                check_config({**config, key: "else"})


SOME_FAMILIES = [*OF_EACH_BLOCK, "nemotron_h", "qwen3_5_text", "bert"]


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_odd_values_of_harmless_keys_change_nothing_in_transformers(family: str) -> None:
    """All of them at once; tests/long has each by itself, and the other families."""
    reference, entries = Reference(family, {}), excused(family)
    odd = reference.with_odd(entries, which=0)
    assert entries.keys() - odd.taken.keys() <= NOT_TAKEN
    assert np.abs(odd.numbers - reference.numbers()).max() < tolerances.DENSE_LOGITS
    assert content_with(reference, odd.config) == content_with(reference, reference.config)


# Of some families, keys of which transformers takes no odd value: it cannot be one that changes something.
NOT_TAKEN = {"use_return_dict"}


def content_with(reference: Reference, config: Mapping[str, Any]) -> Content:
    """Content of the graph of the same weights with another config."""
    pooling = Pooling("mean") if reference.family in ENCODERS else None
    stored = MemoryCheckpoint.of(reference.model, reference.config).stored
    return content(build_graph(MemoryCheckpoint(config, stored, pooling=pooling)))


def serialized(config: Mapping[str, Any]) -> bytes:
    model = tiny_model(tiny_config(config["model_type"]))
    return ir.to_proto(build_graph(MemoryCheckpoint.of(model, config))).SerializeToString(deterministic=True)


def test_every_harmless_key_has_a_reason() -> None:
    for family in FAMILIES:
        assert not harmless_of(family).keys() & HARMLESS.keys()
        for key, entry in {**HARMLESS, **harmless_of(family)}.items():
            assert entry.reason[0].isupper() and entry.reason.endswith(".") and " " in entry.reason, key
            assert entry.values is None or entry.values, key


def few_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Cuts a config to at most eight layers, because thousands of experts take seconds."""
    count, few = config.get("num_hidden_layers", 0), 8
    cut = {key: value[:few] for key, value in config.items() if isinstance(value, list | str) and len(value) == count}
    return {**config, "num_hidden_layers": few, **cut} if count > few else dict(config)


SOME_PUBLISHED = list({config["model_type"]: name for name, config in PUBLISHED.items()}.values())  # one of each type


@pytest.mark.parametrize("name", SOME_PUBLISHED)
def test_published_models_can_be_built(name: str) -> None:
    check_config(few_layers(PUBLISHED[name]))


def test_every_family_has_published_models() -> None:
    types = (config["model_type"] for config in PUBLISHED.values())
    assert {ALIASES.get(one, one) for one in types} == {*FAMILIES, *HYBRIDS, *ENCODERS} - {*UNPUBLISHED}


SAVED = [*FAMILIES, *ENCODERS]
SOME_SAVED = [*OF_EACH_BLOCK, "bert"]


@pytest.mark.parametrize("family", SOME_SAVED)
def test_what_transformers_saves_can_be_built(family: str) -> None:
    # Without a head_dim, GLM's own default would be one of 42 columns, of which 21 are rotated.
    head_dim = {"head_dim": 128} if family == "glm4_moe" else {}
    config = AutoConfig.for_model(family, num_hidden_layers=2, dtype=torch.bfloat16, **head_dim)
    for written in (config.to_json_string(use_diff=True), config.to_json_string(use_diff=False)):
        check_config(json.loads(written))
        check_config({**json.loads(written), **OF_TRANSFORMERS_4})


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_gguf_file_gives_no_key_that_is_not_read(tmp_path: Path, architecture: str) -> None:
    writer = write_model(tmp_path / "tiny.gguf", architecture, tiny_gguf_model(architecture))
    config = ConfigReader(open_checkpoint(str(writer.finish())).config)
    family = config.read(str, "model_type")
    importlib.import_module(f"enginewright.builder.models.{family}").build(config, Weights(AssumedTensors()))
    assert config.unread() == []
