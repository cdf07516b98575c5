"""The files of a model that Dynamo's frontends read: its tokenizer, its chat template and its limits.

An engine file holds the tokenizer's files; a frontend gets them from the worker, or reads them in its folder. To a
frontend, workers of one model are replicas only if their folders have the same name, which follows from the content.
"""

from pathlib import Path

import msgspec

from enginewright.errors import UsageError
from enginewright.output_file import write_file
from enginewright.runtime import env
from enginewright.runtime.engine import Engine


def write_model_files(engine: Engine, folder: Path | None = None) -> Path:
    """Writes the files of an engine's model, without weights, in Hugging Face's form.

    Args:
        engine: the open engine.
        folder: where; None: a folder in the user's cache folder, with a name of its own for each engine file's content.

    Returns:
        The folder.

    Raises:
        EngineError: the files cannot be written there.
    """
    folder = folder or env.cache_folder() / "dynamo" / engine.manifest.content_hash
    manifest, sections = engine.manifest, engine.file.sections
    config = {
        "model_type": manifest.model_type,
        "architectures": [],  # transformers' name of the model's class, which frontends require and do not use
        "vocab_size": engine.plan.vocab_size,
        "max_position_embeddings": manifest.limits.max_seq_len,
        "eos_token_id": list(engine.eos_token_ids),
    }
    tokenizer_config = dict(engine.tokenizer.config)
    if "chat_template" in sections:
        tokenizer_config["chat_template"] = engine.file.read_section("chat_template").decode()
    generation_config = engine.generation_config | {"eos_token_id": list(engine.eos_token_ids)}
    files = {
        "config.json": msgspec.json.encode(config),
        "generation_config.json": msgspec.json.encode(generation_config),
        "tokenizer.json": engine.file.read_section("tokenizer.json"),
        "tokenizer_config.json": msgspec.json.encode(tokenizer_config),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_file(folder / name, data)  # as a whole, since frontends may read it now
    except OSError as error:
        raise UsageError(f"the model's files cannot be written to {folder}", error.strerror or str(error)) from error
    return folder
