"""Reads the files of sentence-transformers, by which texts become vectors. https://www.sbert.net"""

import json
import re
from collections.abc import Mapping
from typing import Any

from enginewright.builder.checkpoint.files import CONFIG_LIMIT_BYTES, SourceFolder
from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.pooling import Dense, Pooling
from enginewright.embedding import EmbeddingConfig
from enginewright.errors import EngineError, UnsupportedModelError

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
TEXTS = (MODULES, PROMPTS, LIMITS)
OF_MODULE = re.compile(r"\d+_(Pooling|Dense)/(config\.json|model\.safetensors)")  # files in a module's own folder
DENSE_WEIGHTS = "model.safetensors"

_MODES = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}
# Keys about versions of the files, the similarity of vectors (the cosine here), and the class that loads the model.
_HARMLESS = ("__version__", "model_type", "similarity_fn_name", "modality_config", "module_output_name")
_HARMLESS_LIMITS = (*_HARMLESS, "transformer_task", "model_args", "tokenizer_args", "config_args", "processing_kwargs")


def read_pooling(files: SourceFolder) -> Pooling | None:
    """Reads the pooling; None if the checkpoint is not one of an embedding model.

    Raises:
        UnsupportedModelError: something is not implemented; the message names it.
        EngineError: a file cannot be used.
    """
    if files.find(MODULES) is None:
        return None
    modules = _modules(files)
    kinds = [kind for kind, _ in modules]
    rest = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(rest) - {"Dense"} or modules[0][1]:
        what = f"{MODULES} in {files.path} lists {', '.join(kinds)}"
        raise UnsupportedModelError(what, "a Transformer, Pooling, Dense and Normalize can be built, in this order")
    prompts, limits = (ConfigReader(files.read_json(name), name) for name in (PROMPTS, LIMITS))
    texts = prompts.read(dict, "prompts", default={})
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in texts.items()):
        raise prompts.error("its prompts are not texts by their names")
    embedding = EmbeddingConfig(
        normalize=kinds[-1] == "Normalize",
        prompts={name: text for name, text in texts.items() if text},
        default_prompt=_default_prompt(prompts, texts),
    )
    if limits.read(bool, "do_lower_case", default=False):
        raise limits.unsupported("do_lower_case = True", "Only tokenizer.json can convert texts to lower case.")
    max_tokens = limits.read_size("max_seq_length") if limits.read(int, "max_seq_length", default=None) else None
    prompts.refuse_any_unread(_HARMLESS)
    limits.refuse_any_unread(_HARMLESS_LIMITS)
    dense = tuple(_dense(files, path) for kind, path in modules if kind == "Dense")
    return Pooling(_kind(files, modules[1][1]), embedding, dense, max_tokens)


def dense_weights(files: SourceFolder) -> list[str]:
    """Lists the weight files of linear layers after the pooling: each has its own."""
    modules = _modules(files) if files.find(MODULES) else []
    return [f"{path}/{DENSE_WEIGHTS}" for kind, path in modules if kind == "Dense"]


def module_texts(files: SourceFolder) -> list[str]:
    """Lists the files that the pooling is read from."""
    modules = _modules(files) if files.find(MODULES) else []
    return [*TEXTS, *(f"{path}/config.json" for kind, path in modules if kind in ("Pooling", "Dense"))]


def _modules(files: SourceFolder) -> list[tuple[str, str]]:
    """Lists the class, without its package, and the folder of each module, in order."""
    try:
        listed = json.loads(files.read_text(MODULES, CONFIG_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{MODULES} in {files.path} is not JSON", str(error)) from error
    fields = ("type", "path")
    if not isinstance(listed, list) or not listed:
        raise EngineError(f"{MODULES} in {files.path} cannot be used", "it is not a list of modules")
    for one in listed:
        if not isinstance(one, Mapping) or not all(isinstance(one.get(field), str) for field in fields):
            raise EngineError(f"{MODULES} in {files.path} cannot be used", f"a module is {one!r:.80}")
    return [(one["type"].rpartition(".")[2], one["path"]) for one in listed]


def _module_config(files: SourceFolder, path: str) -> ConfigReader:
    name = f"{path}/config.json"
    values: Mapping[str, Any] = files.read_json(name)
    return ConfigReader(values, name)


def _kind(files: SourceFolder, path: str) -> str:
    config = _module_config(files, path)
    chosen = [mode for mode in _MODES if config.read(bool, mode, default=False)]
    config.read(int, "word_embedding_dimension", default=None)  # repeats the model's width
    if not config.read(bool, "include_prompt", default=True):
        raise config.unsupported("include_prompt = False", "Prompts are pooled with the text.")
    config.refuse_any_unread()
    kind = _MODES[chosen[0]] if len(chosen) == 1 else None
    if kind is None:
        fix = f"One of {', '.join(mode for mode, known in _MODES.items() if known)} is implemented."
        raise config.unsupported(" and ".join(chosen) or "no pooling at all", fix)
    return kind


def _dense(files: SourceFolder, path: str) -> Dense:
    config = _module_config(files, path)
    config.read(int, "in_features", default=None)  # repeats the width of the module before
    activation = config.read(str, "activation_function")
    if activation not in _ACTIVATIONS:
        raise config.unsupported(f"activation_function = {activation!r}", f"Implemented are {', '.join(_ACTIVATIONS)}.")
    width, bias = config.read_size("out_features", maximum=MAX_COLUMNS), config.read(bool, "bias", default=True)
    config.refuse_any_unread(_HARMLESS)
    return Dense(f"{path}.linear", width, bias, _ACTIVATIONS[activation])


def _default_prompt(prompts: ConfigReader, texts: Mapping[str, str]) -> str | None:
    name = prompts.read(str, "default_prompt_name", default=None)
    if name is not None and name not in texts:
        raise prompts.error(f"default_prompt_name is {name!r}, which is not among its prompts")
    return name if name is not None and texts[name] else None
