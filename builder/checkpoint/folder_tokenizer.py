"""Reads the tokenizer of a checkpoint folder: tokenizer.json, tokenizer_config.json, the chat template."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.builder.checkpoint.files import (
    TEMPLATE_LIMIT_BYTES,
    TOKENIZER_LIMIT_BYTES,
    SourceFolder,
    tokenizers_errors,
)
from enginewright.errors import EngineError, UnsupportedModelError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE, TEMPLATE_JSON)

# Keys that chat templates and detokenization need; the rest configures classes of transformers.
TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
FLAG_KEYS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")


def check_tokenizer(files: SourceFolder) -> None:
    """Checks that there is a tokenizer.

    Raises:
        UnsupportedModelError: there is one, but not as tokenizer.json.
        EngineError: there is none.
    """
    if files.find(TOKENIZER):
        return
    fix = (
        "Make one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes "
        "tokenizer.json next to the other files."
    )
    for other in ("tokenizer.model", "vocab.json", "tekken.json"):
        if files.find(other):
            raise UnsupportedModelError(f"{files.path} has {other} but no {TOKENIZER}", fix=fix)
    raise EngineError(f"{TOKENIZER} is missing in {files.path}", fix="Download the checkpoint again, all of it.")


def read_tokenizer(files: SourceFolder) -> TokenizerFiles:
    """Reads the tokenizer.

    Raises:
        EngineError: a file is unreadable, or the tokenizers library refuses tokenizer.json.
    """
    content = files.read_bytes(TOKENIZER, TOKENIZER_LIMIT_BYTES)
    with tokenizers_errors(f"{TOKENIZER} in {files.path} is not a tokenizer"):
        Tokenizer.from_buffer(content)
    # The older special_tokens_map.json has the tokens that tokenizer_config.json lacks.
    config = files.read_json(SPECIAL_TOKENS) | files.read_json(TOKENIZER_CONFIG)
    return TokenizerFiles(content, _kept(config), _chat_template(files, config))


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {key: _content(key, config.get(key)) for key in TOKEN_KEYS}
    flags = {key: config[key] for key in FLAG_KEYS if isinstance(config.get(key), bool)}
    return {key: token for key, token in tokens.items() if token is not None} | flags


def _content(key: str, token: object) -> str | None:
    """Returns the text of a token, which is a string, or an object with the text and rules of matching."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str):
        raise EngineError(f"{TOKENIZER_CONFIG} cannot be used", f"{key} is {token!r:.80}, not a text")
    return _unicode(token, key)


def _unicode(text: str, what: str) -> str:
    """Raises EngineError if a text holds half of a surrogate pair, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EngineError(f"{what} is not valid Unicode", f"{error.reason} at character {error.start}") from error
    return text


def _chat_template(files: SourceFolder, config: Mapping[str, Any]) -> str | None:
    if files.find(TEMPLATE):
        return files.read_text(TEMPLATE, TEMPLATE_LIMIT_BYTES)
    template = config.get("chat_template") or files.read_json(TEMPLATE_JSON).get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default"]
        template = entries[0].get("template") if entries else None
    if template is not None and not isinstance(template, str):
        raise EngineError(f"the chat template in {files.path} is neither text nor a list of named texts")
    return None if template is None else _unicode(template, f"the chat template in {files.path}")
