"""The files of a model that Dynamo's frontends read: its tokenizer, its chat template and its limits.

An engine file holds the tokenizer's files; a frontend gets them from the worker, or reads them in its folder.
"""

from pathlib import Path

import msgspec

from enginewright.runtime.engine import Engine


def write_model_files(engine: Engine, folder: Path) -> None:
    """Writes the files of an engine's model, without weights, in Hugging Face's form.

    Args:
        engine: the open engine.
        folder: an empty folder.
    """
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
    (folder / "tokenizer.json").write_bytes(engine.file.read_section("tokenizer.json"))
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (folder / name).write_bytes(msgspec.json.encode(value))
