"""`engine generate`: an answer to one question, or to each request of a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands.batch import run_batch
from enginewright.runtime.commands.console import print_json, print_stream, with_adapter
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.prompts import Conversation, Prompt
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams


def generate(
    engine: Path,
    *,
    prompt: str | None,
    chat: str | None,
    system: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    batch: Path | None,
    output: Path | None,
    resume: bool,
    verify: bool,
    as_json: bool,
    prompt_tokens: int,
    structure: Mapping[str, Any],
    limits: Mapping[str, Any],
    lora: Path | None = None,
    **sampling: Any,
) -> None:
    """Answers one of `prompt`, `chat` and `batch`. The answer is printed on stdout, or written to `output`.

    Args:
        engine: The engine file.
        prompt: A text to continue.
        chat: A message of the user, which is put into the model's chat template.
        system: A system message before `chat`.
        chat_template_kwargs: Further variables of the chat template.
        batch: A file of requests, one on each line.
        output: The file for the answers to `batch`. None: they are printed on stdout.
        resume: Keeps the answers that `output` has, and computes the missing ones.
        verify: Checks the hashes of the weights first.
        as_json: Prints one JSON object in place of text.
        prompt_tokens: Maximum number of tokens of an answer to `prompt`, where `sampling` has no `max_tokens`.
        structure: `json_schema`, `json_object`, `regex`, `choice` and `grammar`, at most one of them given.
        limits: Fields of RuntimeConfig.
        lora: An adapter file of the engine. None: Its own weights answer.
        sampling: Fields of SamplingParams. None stands for the model's own default.

    Raises:
        UsageError: Options are missing, or contradict each other.
        EngineError: The engine cannot be opened, or an answer fails.
    """
    if sum(given is not None for given in (prompt, chat, batch)) != 1:
        raise UsageError("engine generate takes one of --prompt, --chat and --input", fix='Ask with --chat "…".')
    _check_chat_options(chat, system, chat_template_kwargs, batch)
    _check_output_options(batch, output, resume=resume)
    if sampling["logprobs"] is not None and not (as_json or batch):
        raise UsageError("--logprobs needs --json", "the answer's text alone is printed without it", "Add --json.")
    sampling |= {"stop": sampling["stop"] or None} | _structured_outputs(structure)
    limits, adapter = with_adapter(limits if batch else {**limits, "max_num_seqs": 1}, lora)
    with open_engine(engine, limits["device"], verify=verify) as opened, LLM(opened, **limits) as llm:
        if batch is not None:
            run_batch(llm, batch, output, sampling, adapter, resume=resume)
            return
        default_limit = prompt_tokens if prompt is not None and sampling["max_tokens"] is None else None
        params = default_params(llm.engine, **sampling | ({"max_tokens": default_limit} if default_limit else {}))
        question = prompt if prompt is not None else _conversation(chat, system, chat_template_kwargs)
        if as_json:
            print_json(llm, question, params, adapter, default_limit=default_limit)
        else:
            print_stream(llm, question, params, engine, adapter, default_limit=default_limit)


def _check_chat_options(
    chat: str | None, system: str | None, chat_template_kwargs: Mapping[str, Any] | None, batch: Path | None
) -> None:
    """Raises UsageError if an option that belongs to --chat is given without it."""
    if chat is not None:
        return
    if system is not None:
        fix = "Ask with --chat." if batch is None else 'Put it into "messages", with the role "system".'
        raise UsageError("--system goes with --chat alone", "it is a message of a conversation", fix)
    if chat_template_kwargs is not None:
        raise UsageError("--chat-template-kwargs goes with --chat alone", "other prompts have no chat template")


def _check_output_options(batch: Path | None, output: Path | None, *, resume: bool) -> None:
    """Raises UsageError if --output is given without --input, or --resume without --output."""
    if output is not None and batch is None:
        raise UsageError(
            "--output goes with --input", "an answer to --prompt or --chat is printed", "Redirect it: > FILE"
        )
    if resume and output is None:
        raise UsageError("--resume goes with --output", "it goes on with a file of answers", "Name the file with -o.")


def _structured_outputs(structure: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options for a structured answer; empty if no structure is given."""
    fields = {**structure, "choice": structure["choice"] or None}
    fields["json"] = fields.pop("json_schema")
    if all(value is None for value in fields.values()):
        return {}
    return {"structured_outputs": StructuredOutputsParams(**fields)}


def _conversation(chat: str | None, system: str | None, chat_template_kwargs: Mapping[str, Any] | None) -> Prompt:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": chat})
    return Conversation(messages, template_kwargs=chat_template_kwargs or {})
