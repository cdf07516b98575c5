"""`engine generate --input`: a file of prompts in, a file of answers out, in the same order.

A line is {"prompt": text} or {"messages": [{"role": …, "content": …}, …]}; other keys are sampling options that differ
from those of the command line (SamplingParams), or "id", which the answer carries.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.llm import LLM
from enginewright.runtime.outputs import to_dicts
from enginewright.runtime.params import default_params
from enginewright.runtime.sampling import SamplingParams

MAX_LINE_BYTES = 16 << 20
_OPTIONS = frozenset(SamplingParams.__dataclass_fields__)
_FORMS: Mapping[str, Any] = {
    "stop": tuple[str, ...],
    "stop_token_ids": tuple[int, ...],
    "logit_bias": dict[int, float],
    "allowed_token_ids": tuple[int, ...],
}


class Request(msgspec.Struct, frozen=True):
    """A line of the input, and its number: prompt is a text or messages."""

    line: int
    prompt: str | list[dict[str, str]]
    options: dict[str, Any]
    id: Any = None


def read_requests(path: Path) -> list[Request]:
    """Raises UsageError, with the number of the line, for what is no request."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read", error.strerror or str(error)) from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with _naming(path, number):
            requests.append(_request(line, number))
    if not requests:
        raise UsageError(f"{path} has no request", fix='Write one a line: {"prompt": "…"}.')
    return requests


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (UsageError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}", str(error)) from error


def _request(line: bytes, number: int) -> Request:
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"longer than {MAX_LINE_BYTES} bytes")
    fields = msgspec.json.decode(line, type=dict[str, Any])
    prompt, messages, key = fields.pop("prompt", None), fields.pop("messages", None), fields.pop("id", None)
    if (prompt is None) == (messages is None):
        raise UsageError('needs either "prompt" or "messages"')
    unknown = sorted(fields.keys() - _OPTIONS)
    if unknown:
        raise UsageError(f"has unknown keys: {', '.join(unknown)}")
    given: str | list[dict[str, str]]
    if messages is None:
        given = msgspec.convert(prompt, type=str)
    else:
        given = msgspec.convert(messages, type=list[dict[str, str]])
    options = {name: value for name, value in fields.items() if value is not None}
    for name, form in _FORMS.items():
        if name in options:
            value = [options[name]] if name == "stop" and isinstance(options[name], str) else options[name]
            options[name] = msgspec.convert(value, type=form, str_keys=True)
    return Request(number, given, options, key)


def run_batch(llm: LLM, source: Path, output: Path | None, common: Mapping[str, Any]) -> None:
    """Answer every line of `source`; answers go to `output` (whole, or not at all) or stdout."""
    requests = read_requests(source)
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"{output} cannot be written", f"there is no folder {output.parent}")
    params, encoded = [], []
    for request in requests:
        with _naming(source, request.line):
            params.append(default_params(llm.engine, **{**common, **request.options}))
            encoded.append(llm.encode(request.prompt))
            llm.check(encoded[-1], params[-1])
    answers = llm.generate(encoded, params, use_tqdm=True)
    lines = []
    for request, answer in zip(requests, answers, strict=True):
        name = {} if request.id is None else {"id": request.id}
        lines += [msgspec.json.encode(name | choice) for choice in to_dicts(answer)]
    _write(b"".join(line + b"\n" for line in lines), output)


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    temporary = output.with_name(f".{output.name}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EngineError(f"{output} cannot be written", error.strerror or str(error)) from error
