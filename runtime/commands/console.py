"""One answer on the terminal: its text as it is written, or one JSON object at its end."""

import json
import shlex
import sys
import time
from pathlib import Path

from enginewright.errors import EngineError
from enginewright.printable import printable
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.outputs import DETOKENIZER, Delta, to_dicts
from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.sampling.sampling import SamplingParams


def print_json(llm: LLM, question: Prompt, params: SamplingParams, *, default_limit: int | None) -> None:
    """One JSON object on stdout.

    Args:
        default_limit: the max_tokens that nobody asked for; if it ends the answer, stderr says so. None: no such limit.
    """
    (result,) = llm.generate(llm.encode(question), params)
    print(json.dumps(to_dicts(result)[0]))
    output = result.outputs[0]
    if output.finish_reason == "length" and len(output.token_ids) == default_limit:
        _note_limit(default_limit)


def print_stream(llm: LLM, question: Prompt, params: SamplingParams, path: Path, *, default_limit: int | None) -> None:
    """Text on stdout as it comes; how fast, and what to try next, on stderr.

    Args:
        path: the engine's file.
        default_limit: as in `print_json`.
    """
    start = time.perf_counter()
    first = last = start
    count = 0
    delta = Delta(0, "", ())
    for delta in llm.stream(question, params):
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
    """Raises EngineError where the last delta of an answer says that it has failed."""
    if last.finish_reason != "error":
        return
    if last.stop_reason == DETOKENIZER:
        raise EngineError("a token could not be turned into text", "the tokenizer failed", "Please report it.")
    raise EngineError("the model's logits are not numbers", fix="Check the engine with `engine verify`.")


def _note_limit(tokens: int) -> None:
    """Say on stderr that an answer was ended by a limit that nobody asked for."""
    limit = f"stopped at {tokens} tokens, the limit of --prompt without --max-tokens"
    print(f"[{limit}: --max-tokens N sets another]", file=sys.stderr)
