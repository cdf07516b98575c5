"""Keys of config.json that cannot change what a model computes, with the reason.

A key that is neither read nor listed is refused by name (`ConfigReader.refuse_unread`). Keys of some families only are
in the file of each: `HARMLESS` there.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Harmless:
    """The reason why a key need not be read."""

    reason: str  # sentence whose subject is the key
    values: tuple[object, ...] | None = None  # values for which it holds; None: any value

    def at(self, value: object) -> bool:
        """Checks if the reason holds for a value."""
        return self.values is None or value in self.values


def _all(reason: str, *keys: str) -> dict[str, Harmless]:
    return dict.fromkeys(keys, Harmless(reason))


HARMLESS: Mapping[str, Harmless] = {
    **_all(
        "It says where the checkpoint comes from.",
        "_commit_hash",
        "_model_name_or_path",
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
    ),
    **_all(
        "It names a class of transformers, or code that is never run: model_type alone counts, and tensors that the "
        "model has no place for are refused.",
        "architectures",
        "auto_map",
        "tokenizer_class",
    ),
    **_all(
        "It is about training, which is over.",
        "attention_dropout",
        "gradient_checkpointing",
        "initializer_range",
        "neftune_noise_alpha",
    ),
    **_all(
        "It says how transformers or another library is to run the model, and changes rounding at most.",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_flash_attn_2_enabled",
        "attn_implementation",
        "cache_implementation",
        "chunk_size_feed_forward",
        "tf_legacy_loss",
        "torchscript",
        "transformers.js_config",
        "use_bfloat16",
        "use_cache",
    ),
    **_all(
        "It says what transformers returns in addition to the logits.",
        "_output_attentions",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
    ),
    **_all(
        "Files of weights say their dtypes themselves, and --quant says what is made of them.",
        "dtype",
        "torch_dtype",
    ),
    **_all(
        "The tokenizer and generation_config.json say which tokens are special.",
        "bos_token_id",
        "decoder_start_token_id",
        "eod_token_id",
        "eos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
    ),
    **_all(
        "It is a default for requests, which are read from generation_config.json alone.",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
    **_all(
        "It is about the classes of a classifier; weights of one would be refused.",
        "_num_labels",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
    ),
    **_all(
        "It is a limit of the training or the tokenizer; the model's is max_position_embeddings.",
        "max_sequence_length",
        "model_max_length",
    ),
    **_all(
        "It matters with an encoder only, and is_encoder_decoder says that there is none.",
        "is_decoder",
        "tie_encoder_decoder",
    ),
    "add_cross_attention": Harmless("The model attends to no encoder.", (False,)),
    "is_causal": Harmless("Every token attends to those before it only.", (True,)),
    "is_encoder_decoder": Harmless("The model is a decoder alone.", (False,)),
    "pruned_heads": Harmless("All heads are there.", ({}, [])),
}
