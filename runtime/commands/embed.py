"""`engine embed`: the vectors of texts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from enginewright.errors import UsageError
from enginewright.input_lines import split_lines
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.device.devices import open_engine


def embed(
    engine: Path,
    texts: Sequence[str],
    file: BinaryIO | None,
    *,
    dimensions: int | None,
    prompt_name: str | None,
    truncate_prompt_tokens: int | None,
    verify: bool,
    **limits: Any,
) -> Iterator[str]:
    """Computes the vectors of texts.

    Args:
        engine: The engine file of an embedding model.
        texts: The first texts.
        file: Further texts, one on each line.
        dimensions: Length of each vector. None: the model's own.
        prompt_name: Name of the model's prompt that is put before each text.
        truncate_prompt_tokens: Number of tokens that are kept of a longer text; -1 keeps as many as fit.
        verify: Checks the hashes of the weights first.
        limits: Fields of RuntimeConfig.

    Yields:
        A JSON object for each text, as one line without its end.

    Raises:
        UsageError: There is no text, or an option does not fit the model.
        EngineError: The engine cannot be opened.
    """
    given = [*texts, *((line.decode() for line in split_lines(file.read(), file.name)) if file else ())]
    if not given:
        raise UsageError("engine embed takes texts", fix='Write them after the engine: "…", or use --input.')
    with open_engine(engine, limits["device"], verify=verify) as opened, LLM(opened, **limits) as llm:
        outputs = llm.embed(
            given, dimensions=dimensions, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens
        )
        for text, output in zip(given, outputs, strict=True):
            fields = {"text": text, "embedding": output.outputs.embedding}
            yield json.dumps(fields | {"num_prompt_tokens": len(output.prompt_token_ids)}, ensure_ascii=False)
