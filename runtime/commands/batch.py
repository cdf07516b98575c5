"""`engine generate --input`: answers a file of requests in a file of answers, in the same order.

Each answer is written as soon as the answers before it are written. A run that ends early keeps its answers, and
`resume` continues with the other requests.

A line has one of two forms:

    {"prompt": text} or {"messages": [{"role": …, "content": …}, …]}, with an "id" of any kind, and sampling options
        (SamplingParams) that differ from those of the command line. The answer repeats the id and the prompt.
    {"custom_id": …, "method": "POST", "url": …, "body": {…}}: OpenAI's batch format. The body is read and answered
        like a request to `engine run`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec

from enginewright.errors import EngineError, UsageError, WorkerLostError, shorten
from enginewright.input_lines import read_lines
from enginewright.output_file import is_regular, require_writable, same_file
from enginewright.runtime.api.llm import LLM, LoRARequest
from enginewright.runtime.commands.batch_answers import AnswerKey, AnswerWriter, answer_key, keep_answers
from enginewright.runtime.core.outputs import CompletionOutput, Delta, Logprob, RequestOutput, to_dicts
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.server.chat import CHAT_KEYS, ChatForm
from enginewright.runtime.server.completions import COMPLETION_KEYS, CompletionBody, CompletionForm
from enginewright.runtime.server.errors import ApiError, answer_error, from_engine
from enginewright.runtime.server.form import Choice, Form, PromptPart, Usage
from enginewright.runtime.server.keys import Known, UnusedKeys
from enginewright.runtime.server.protocol import Body, decode
from enginewright.runtime.step.work_class import WorkClass
from enginewright.runtime.text.messages.formats import Parser

MAX_LINE_BYTES = 16 << 20
URLS: Mapping[str, tuple[Known, type[Form]]] = {
    "/v1/chat/completions": (CHAT_KEYS, ChatForm),
    "/v1/completions": (COMPLETION_KEYS, CompletionForm),
}
_OPTIONS = frozenset(SamplingParams.__dataclass_fields__)
_OPTION_TYPES: Mapping[str, Any] = {
    "stop": tuple[str, ...],
    "stop_token_ids": tuple[int, ...],
    "logit_bias": dict[int, float],
    "allowed_token_ids": tuple[int, ...],
}


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of our own format."""

    line: int  # number of the line in the file
    prompt: str | list[dict[str, str]]  # text, or messages
    options: dict[str, Any]  # fields of SamplingParams
    id: Any = None  # id that the answer repeats


class OpenAIBatchRequest(msgspec.Struct, frozen=True):
    """A line of OpenAI's batch format."""

    line: int  # number of the line in the file
    custom_id: str  # id that the answer repeats
    url: str  # one of URLS
    body: bytes  # body as JSON, not checked yet


class _OpenAILine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str  # id that the answer repeats
    method: str  # HTTP method, always POST
    url: str  # path of the API
    body: msgspec.Raw  # body as JSON


class _PreparedRequest(msgspec.Struct):
    """A prepared request, with all that is needed to write its answer."""

    request: BatchRequest | OpenAIBatchRequest  # line of the input
    prompts: list[list[int]]  # token ids of its prompts; empty if the request was refused
    params: SamplingParams | None = None  # sampling parameters of all its prompts
    form: Form | None = None  # response format of a request in OpenAI's format
    error: ApiError | None = None  # error of a refused request in OpenAI's format
    body: Body | None = None  # body of a request in OpenAI's format
    given: list[Prompt] = []  # prompts as they were given
    priority: int = 0  # priority of the prompts

    @property
    def key(self) -> AnswerKey | None:
        return _key(self.request)

    @property
    def num_lines(self) -> int:
        """Number of output lines that answer the request."""
        return 1 if self.params is None or isinstance(self.request, OpenAIBatchRequest) else self.params.n


def read_requests(path: Path) -> list[BatchRequest | OpenAIBatchRequest]:
    """Reads a file of requests.

    Raises:
        UsageError: a line is no request, or has the id of an earlier one; the message has the number of the line.
    """
    requests: list[BatchRequest | OpenAIBatchRequest] = []
    lines_by_key: dict[AnswerKey, int] = {}
    for number, line in read_lines(path):
        with _line_errors(path, number):
            request = _request(line, number)
        key = _key(request)
        if key is not None and (earlier := lines_by_key.setdefault(key, number)) != number:
            what, (name, value) = f"{path}, lines {earlier} and {number}", key
            raise UsageError(what, f'both have the "{name}" {shorten(value)}', "Give each request an id of its own.")
        requests.append(request)
    if not requests:
        raise UsageError(f"{path} has no request", fix='Write one per line: {"prompt": "…"}.')
    return requests


@contextmanager
def _line_errors(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (UsageError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}", str(error)) from error


def _request(line: bytes, number: int) -> BatchRequest | OpenAIBatchRequest:
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"longer than {MAX_LINE_BYTES} bytes")
    fields = msgspec.json.decode(line, type=dict[str, Any])
    if "custom_id" in fields or "body" in fields:
        return _openai_request(line, number)
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
    for name, form in _OPTION_TYPES.items():
        if name in options:
            value = [options[name]] if name == "stop" and isinstance(options[name], str) else options[name]
            options[name] = msgspec.convert(value, type=form, str_keys=True)
    return BatchRequest(number, given, options, key)


def _openai_request(line: bytes, number: int) -> OpenAIBatchRequest:
    fields = msgspec.json.decode(line, type=_OpenAILine)
    if fields.method != "POST":
        raise UsageError(f'"method" is {fields.method!r}', "requests of a batch are sent with POST")
    if fields.url not in URLS:
        raise UsageError(f'"url" is {fields.url!r}', f"a batch can use {' and '.join(URLS)}")
    return OpenAIBatchRequest(number, fields.custom_id, fields.url, bytes(fields.body))


def run_batch(
    llm: LLM,
    source: Path,
    output: Path | None,
    common: Mapping[str, Any],
    lora: LoRARequest | None = None,
    *,
    resume: bool = False,
) -> None:
    """Answers every line of `source` in a line of `output`, or of stdout.

    A body in OpenAI's format that is refused is answered with the error that the server would send. Any other error in
    the file or the output is raised before anything is computed.

    Args:
        llm: the engine.
        source: the file of requests.
        output: the file of answers; None is stdout.
        common: sampling options for lines without their own; None means the model's default.
        lora: the adapter of all answers; None is none.
        resume: whether to keep the answers in `output`, and append the missing ones.

    Raises:
        UsageError: a line cannot be answered, with its number in the message; or the output is not valid.
        EngineError: the output cannot be written, or no request was answered.
    """
    requests = read_requests(source)
    _check_output(llm, source, output, requests, resume)
    work = []
    for request in requests:
        with _line_errors(source, request.line):
            if isinstance(request, OpenAIBatchRequest):
                work.append(_prepare_openai(llm, request, common))
            else:
                work.append(_prepare(llm, request, common))
    num_kept = 0
    if resume and output is not None:
        kept = keep_answers(output, {one.key: one.num_lines for one in work if one.key is not None})
        work = [one for one in work if one.key not in kept]
        num_kept = len(kept)
    can_resume = output is not None and all(one.key is not None for one in work)
    note = ": --resume computes the others" if can_resume else ""
    with AnswerWriter(output, len(requests), num_kept, resume=resume, note=note) as writer:
        failed = _answer(llm, work, writer, lora)
    if failed == len(requests):
        raise EngineError("no request was answered", fix="The lines of the output say why.")
    if failed:
        print(f"[{failed} of {len(requests)} requests failed; their lines say why]", file=sys.stderr)


def _check_output(
    llm: LLM,
    source: Path,
    output: Path | None,
    requests: Sequence[BatchRequest | OpenAIBatchRequest],
    resume: bool,
) -> None:
    """Raises UsageError for an output that cannot be written, or that no earlier run can have written."""
    if output is not None:
        require_writable(output, in_place=True)
        for read in (source, llm.engine.file.path):
            if same_file(output, read):
                raise UsageError(f"{output} cannot be written", "it is read by this command", "Name another file.")
    if not resume:
        return
    if output is None or not is_regular(output):
        raise UsageError("--resume needs a file", "it continues an earlier run", "Name it with -o.")
    for request in requests:
        if _key(request) is None:
            why = "it has no id, which --resume needs to find its answer"
            raise UsageError(f"{source}, line {request.line}", why, 'Give each line an "id".')


def _answer(llm: LLM, work: Sequence[_PreparedRequest], writer: AnswerWriter, lora: LoRARequest | None) -> int:
    """Computes and writes all answers; returns the number of errors among them."""
    owners = [
        (index, index_in_request) for index, one in enumerate(work) for index_in_request in range(len(one.prompts))
    ]
    results: list[dict[int, RequestOutput]] = [{} for _ in work]  # outputs by the index of the prompt in its request
    failed = 0

    def write(index: int) -> None:
        nonlocal failed
        one, outputs = work[index], [output for _, output in sorted(results[index].items())]
        if isinstance(one.request, OpenAIBatchRequest):
            status, body = _openai_response(llm, one, outputs)
            failed += status != 200
            lines = [_openai_line(one.request, status, body)]
        else:
            lines = [msgspec.json.encode(_echoed(one.request) | choice) for choice in to_dicts(outputs[0])]
        writer.add(index, b"".join(line + b"\n" for line in lines))
        results[index].clear()

    def collect(prompt: int, output: RequestOutput) -> None:
        index, index_in_request = owners[prompt]
        results[index][index_in_request] = output
        if len(results[index]) == len(work[index].prompts):
            write(index)

    for index, one in enumerate(work):
        if not one.prompts:
            write(index)
    params = [one.params for one in work for _ in one.prompts if one.params is not None]
    priorities = [one.priority for one in work for _ in one.prompts]
    prompts = [ids for one in work for ids in one.prompts]
    llm.generate(prompts, params, use_tqdm=True, on_output=collect, priority=priorities, lora_request=lora)
    return failed


def _prepare(llm: LLM, request: BatchRequest, common: Mapping[str, Any]) -> _PreparedRequest:
    params = default_params(llm.engine, **{**common, **request.options})
    ids = llm.encode(request.prompt)
    llm.check(ids, params)
    return _PreparedRequest(request, [ids], params)


def _prepare_openai(llm: LLM, request: OpenAIBatchRequest, common: Mapping[str, Any]) -> _PreparedRequest:
    """Reads a body like a server with strict keys; options of the command line replace missing ones."""
    known, form_type = URLS[request.url]
    try:
        unused = UnusedKeys(is_strict=True)
        body = decode(request.body, known, llm.engine.plan.vocab_size, unused)
        unused.add_errors(body.unused(llm.engine.tokenizer), form_type.renames)
        if body.stream:
            raise ApiError(400, "stream: answers to a batch are not streamed", param="stream")
        if body.timeout is not None:
            raise ApiError(400, "timeout: a batch waits for all of its answers", param="timeout")
        priority = WorkClass(body.priority or 0).priority
        given = {name: value for name, value in body.params_for(llm.engine.tokenizer).items() if value is not None}
        if isinstance(body, CompletionBody) and body.max_tokens is None and common.get("max_tokens") is not None:
            del given["max_tokens"]  # the API's own default
        params, include = default_params(llm.engine, **{**common, **given}), body.include()
        given_prompts = body.prompts()
        prompts = [_encode(llm, prompt) for prompt in given_prompts]
        # A chat has one prompt, and the structure of a text completion does not depend on its prompt.
        params = replace(params, structured_outputs=body.structure(llm.engine.tokenizer, prompts[0]))
        for ids in prompts:
            llm.check(ids, params)
    except ApiError as error:
        return _PreparedRequest(request, [], error=error)
    except (UsageError, WorkerLostError) as error:
        return _PreparedRequest(request, [], error=from_engine(error, form_type.prompt_key))
    manifest = llm.engine.manifest
    form = form_type(
        f"{form_type.id_prefix}{token_hex(12)}",
        manifest.name,
        f"fp_{manifest.content_hash[:12]}",
        llm.engine.tokenizer,
        include,
    )
    return _PreparedRequest(request, prompts, params, form, body=body, given=given_prompts, priority=priority)


def _encode(llm: LLM, prompt: Prompt) -> list[int]:
    try:
        return llm.encode(prompt)
    except (UsageError, WorkerLostError):
        raise
    except EngineError as error:
        why = f"the model's chat template cannot show these messages: {error}"
        raise ApiError(400, why, param="messages") from error


def _openai_response(llm: LLM, work: _PreparedRequest, results: Sequence[RequestOutput]) -> tuple[int, bytes]:
    """HTTP status and body of the response that the server would send."""
    error = work.error
    outputs = [output for result in results for output in result.outputs]
    failed = [output for output in outputs if output.finish_reason == "error"]
    if failed:
        error = answer_error(failed[0].stop_reason)
    if error is not None:
        return error.status, error.body
    assert work.form is not None and work.body is not None
    usage = Usage(
        prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
        completion_tokens=sum(len(output.token_ids) for output in outputs),
        cached_tokens=sum(result.num_cached_tokens for result in results),
        draft_tokens=sum(result.num_draft_tokens for result in results),
        accepted_tokens=sum(result.num_accepted_tokens for result in results),
    )
    choices: list[Choice] = []
    for prompt, result in zip(work.given, results, strict=True):
        ids, named = result.prompt_token_ids, result.prompt_logprobs or []
        scored = [None if one is None else _sampled(token, one) for token, one in zip(ids, named, strict=False)]
        part = work.form.prompt_part(prompt, ids, scored)
        parsers = work.body.parsers(llm.engine.tokenizer, ids, len(result.outputs))
        for output, parser in zip(result.outputs, parsers, strict=True):
            choices.append(_choice(len(choices), output, part, parser))
    return 200, work.form.body(choices, usage)


def _choice(index: int, output: CompletionOutput, prompt: PromptPart, parser: Parser | None) -> Choice:
    """A finished answer in the server's own form."""
    tokens = list(map(SampledToken, output.token_ids))
    if output.logprobs is not None:
        tokens = list(map(_sampled, output.token_ids, output.logprobs))
    delta = Delta(index, output.text, tuple(tokens), output.finish_reason, output.stop_reason)
    return Choice(
        index,
        prompt,
        num_tokens=len(output.token_ids),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        deltas=[delta],
        parser=parser,
    )


def _sampled(token: int, named: Mapping[int, Logprob]) -> SampledToken:
    """A token with its log-probabilities, in the engine's own form."""
    top = tuple((one, entry.logprob) for one, entry in named.items() if entry.rank is not None)
    return SampledToken(token, named[token].logprob, top)


def _openai_line(request: OpenAIBatchRequest, status: int, body: bytes) -> bytes:
    number = f"{request.line:06d}"
    response = {"status_code": status, "request_id": f"req_{number}", "body": msgspec.Raw(body)}
    line = {"id": f"batch_req_{number}", "custom_id": request.custom_id, "response": response, "error": None}
    return msgspec.json.encode(line)


def _key(request: BatchRequest | OpenAIBatchRequest) -> AnswerKey | None:
    if isinstance(request, OpenAIBatchRequest):
        return answer_key({"custom_id": request.custom_id})
    return answer_key({"id": request.id})


def _echoed(request: BatchRequest) -> dict[str, Any]:
    """Keys of the request that its answer repeats."""
    echoed = {"prompt" if isinstance(request.prompt, str) else "messages": request.prompt}
    return echoed if request.id is None else {"id": request.id, **echoed}
