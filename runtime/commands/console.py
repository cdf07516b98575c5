"""Prints one answer on the terminal: its text while it is generated, or one JSON object at its end."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.adapter_file import AdapterFile
from enginewright.errors import EngineError
from enginewright.printable import printable
from enginewright.runtime.api.llm import LLM, LoRARequest
from enginewright.runtime.core.outputs import DETOKENIZER, Delta, to_dicts
from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.sampling.parameters import SamplingParams


def with_adapter(limits: Mapping[str, Any], lora: Path | None) -> tuple[Mapping[str, Any], LoRARequest | None]:
    """Adds to the limits of an engine what one adapter needs.

    Args:
        limits: fields of RuntimeConfig.
        lora: the adapter file; None is none.

    Returns:
        The limits, and the adapter of each request.

    Raises:
        UsageError: there is no such file, or it is no adapter.
        CorruptEngineError: the file is damaged.
    """
    if lora is None:
        return limits, None
    with AdapterFile.open(lora) as adapter:
        own = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(adapter.max_rank, 1)}
    return {**limits, **own}, LoRARequest(adapter.name, 1, str(lora))


def print_json(
    llm: LLM, question: Prompt, params: SamplingParams, lora: LoRARequest | None, *, default_limit: int | None
) -> None:
    """Prints an answer as one JSON object on stdout.

    Args:
        llm: the engine.
        question: the prompt.
        params: the sampling parameters.
        lora: the adapter; None is none.
        default_limit: the default of max_tokens; a note on stderr appears if it ended the answer. None: the user set a
            limit.
    """
    (result,) = llm.generate(llm.encode(question), params, lora_request=lora)
    print(json.dumps(to_dicts(result)[0]))
    output = result.outputs[0]
    if output.finish_reason == "length" and len(output.token_ids) == default_limit:
        _note_limit(default_limit)


def print_stream(
    llm: LLM,
    question: Prompt,
    params: SamplingParams,
    path: Path,
    lora: LoRARequest | None,
    *,
    default_limit: int | None,
) -> None:
    """Prints an answer on stdout as it is generated, and its speed and a next command on stderr.

    Args:
        llm: the engine.
        question: the prompt.
        params: the sampling parameters.
        path: the engine file.
        lora: the adapter; None is none.
        default_limit: as in `print_json`.
    """
    start = time.perf_counter()
    first = last = start
    count = 0
    delta = Delta(0, "", ())
    for delta in llm.stream(question, params, lora_request=lora):
        last = time.perf_counter()
        first = last if count == 0 else first
        count += 1
        print(delta.text, end="", flush=True)
    print()
    refuse_failed(delta)
    reason = delta.finish_reason
    pace = f", then {(count - 1) / (last - first):.0f} tokens/s" if count > 1 else ""
    print(f"[{count} tokens; the first after {first - start:.2f} s{pace}; ended by {reason}]", file=sys.stderr)
    if reason == "length" and count == default_limit:
        _note_limit(default_limit)
    name = printable(shlex.quote(str(path)))
    print(f'[next: engine inspect {name}, or engine generate {name} --chat "…" --temperature 0.8]', file=sys.stderr)


def refuse_failed(last: Delta) -> None:
    """Raises EngineError if the last delta of an answer reports a failure."""
    if last.finish_reason != "error":
        return
    if last.stop_reason == DETOKENIZER:
        raise EngineError("a token could not be converted to text", "the tokenizer failed", "Please report it.")
    raise EngineError("the model's logits are not numbers", fix="Check the engine with `engine verify`.")


def _note_limit(tokens: int) -> None:
    """Notes on stderr that an answer was ended by the default limit."""
    limit = f"stopped at {tokens} tokens, the limit of --prompt without --max-tokens"
    print(f"[{limit}: --max-tokens N sets another]", file=sys.stderr)
