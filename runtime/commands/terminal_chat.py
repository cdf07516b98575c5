"""`engine chat`: a conversation on the terminal, with its history and commands."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.api.llm import LLM, DeltaStream, LoRARequest
from enginewright.runtime.commands.console import refuse_failed, with_adapter
from enginewright.runtime.core.engine_kind import refuse_answers
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.prompts import Conversation, PromptTooLongError
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.text.messages.formats import new_parser
from enginewright.runtime.text.messages.history import Messages
from enginewright.runtime.text.messages.parser import Piece, ReasoningPiece, TextPiece
from enginewright.runtime.text.tokenizer import Tokenizer

HELP = """\
/system TEXT  set the system message from the next answer on; without TEXT, remove it
/clear        forget the conversation; the system message stays
/help         this list
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer. Put a space before a message that starts with a slash."""
FULL_SHARE = 0.75  # share of the context; a longer prompt leaves too little for an answer
KEPT_SHARE = 0.5  # share of the context that is kept then, so that not every message changes the prompt's prefix
DIM, PLAIN = "\033[2m", "\033[22m"


def chat(
    engine: Path,
    *,
    system: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    no_thinking: bool,
    verify: bool,
    limits: Mapping[str, Any],
    lora: Path | None = None,
    **sampling: Any,
) -> None:
    """Opens an engine and holds a conversation on the terminal until its end.

    Args:
        engine: The engine file.
        system: A system message before the conversation.
        chat_template_kwargs: Further variables of the chat template.
        no_thinking: Turns the model's thinking off.
        verify: Checks the hashes of the weights first.
        limits: Fields of RuntimeConfig.
        lora: An adapter file of the engine. None: Its own weights answer.
        sampling: Fields of SamplingParams. None stands for the model's own default.

    Raises:
        UsageError: The model writes no text, or an option does not fit its chat template.
        EngineError: The engine cannot be opened, or an answer fails.
    """
    limits, adapter = with_adapter({**limits, "max_num_seqs": 1}, lora)
    with open_engine(engine, limits["device"], verify=verify) as opened, LLM(opened, **limits) as llm:
        variables = chat_template_kwargs or {}
        if no_thinking:
            variables = without_thinking(llm.get_tokenizer(), variables)
        params = default_params(opened, **sampling)
        TerminalChat(llm, params, system=system, template_kwargs=variables, lora=adapter).run()


def without_thinking(tokenizer: Tokenizer, names: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that turn the model's thinking off.

    Args:
        tokenizer: the engine's tokenizer.
        names: further variables.

    Raises:
        UsageError: the template has no such variable, or the other variables contradict it.
    """
    if not tokenizer.template_reads("enable_thinking"):
        raise UsageError("--no-thinking has no effect", "the model's chat template has no variable enable_thinking")
    if names.get("enable_thinking", False) is not False:
        raise UsageError("--no-thinking and --chat-template-kwargs set different values of enable_thinking")
    return {**names, "enable_thinking": False}


class TerminalChat:
    """Reads messages from stdin until its end, and prints answers on stdout; reasoning and notes go to stderr.

    When the conversation fills the context, its oldest turns are dropped, and a note says so.

    Args:
        llm: the engine.
        params: the sampling parameters of every answer.
        system: the system message; None is none.
        template_kwargs: further variables of the chat template.
        lora: the adapter of the answers; None is none.

    Raises:
        UsageError: the model writes no text, has no chat template, or does not accept the system message or variables.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        template_kwargs: Mapping[str, Any],
        lora: LoRARequest | None = None,
    ) -> None:
        refuse_answers(llm.engine)
        self._lora = lora
        self._llm, self._params, self._template_kwargs = llm, params, template_kwargs
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.system = system
        self.messages: Messages = []  # history of user and model, in turns
        self._stream: DeltaStream | None = None  # stream of the running answer
        self._stopped = False  # True once Ctrl-C has stopped that answer
        self._encode([{"role": "user", "content": "Hello"}])  # raises errors of the system message or variables now

    def run(self) -> None:
        """Runs the conversation until the end of stdin, /exit, or Ctrl-C at the prompt.

        Raises:
            EngineError: an answer fails; on a terminal, only if no other answer can follow.
        """
        if self._is_terminal:
            import readline  # noqa: F401  # gives input() line editing and a history

            _note(f"{self._llm.engine.manifest.name}: Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands")
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    self._command(*line.partition(" ")[::2])
                elif line.strip():
                    self._answer(line.strip())
            except UsageError as error:
                if not self._is_terminal:
                    raise
                print(f"engine: {error}", file=sys.stderr)

    def _read(self) -> str | None:
        """Next line from stdin; None at the end."""
        try:
            line = input("> " if self._is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            line = "/exit"
            if self._is_terminal:
                print()
        return None if line.strip() == "/exit" else line

    def _command(self, name: str, text: str) -> None:
        match name:
            case "/help":
                print(HELP, file=sys.stderr)
            case "/clear":
                self.messages = []
            case "/system":
                self.system = text.strip() or None
            case _:
                raise UsageError(f"there is no command {name}", fix="/help lists those that there are.")

    def _answer(self, text: str) -> None:
        """Prints the answer to a message, and adds both to the history, even if Ctrl-C has stopped the answer.

        Raises:
            UsageError: the message is refused, and the history is unchanged.
            EngineError: the answer fails.
        """
        with self._stopped_by_ctrl_c():
            messages, ids = self._fitting([*self.messages, {"role": "user", "content": text}])
            self._stream = self._llm.stream(ids, self._params, lora_request=self._lora)
            if self._stopped:
                self._stream.abort()
            tokenizer = self._llm.engine.tokenizer
            parser = new_parser(tokenizer.message_format, None, in_reasoning=tokenizer.ends_in_reasoning(ids))
            printer, last, num_tokens = _Printer(), Delta(0, "", ()), 0
            for last in self._stream:
                num_tokens += len(last.tokens)
                printer.write([TextPiece(last.text)] if parser is None else parser.push(last.text))
            if parser is not None:
                printer.write(parser.end())
            print()
        refuse_failed(last)
        self.messages = [*messages, printer.message]
        if last.finish_reason == "abort":
            _note("stopped")
        elif last.finish_reason == "length" and len(ids) + num_tokens >= self._llm.max_model_len:
            _note(f"the context is full: prompt and answer have {self._llm.max_model_len} tokens")
        elif last.finish_reason == "length":
            _note(f"stopped at {num_tokens} tokens, the limit of --max-tokens")

    @contextmanager
    def _stopped_by_ctrl_c(self) -> Iterator[None]:
        """Lets Ctrl-C end the running answer instead of the program."""

        def stop(*_: object) -> None:
            self._stopped = True
            if self._stream is not None:
                self._stream.abort()

        self._stopped, self._stream = False, None
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _fitting(self, messages: Messages) -> tuple[Messages, list[int]]:
        """The last messages that leave enough of the context for an answer, and the prompt's token ids.

        Raises:
            PromptTooLongError: the last message alone is too long.
        """
        length, given = self._llm.max_model_len, len(messages)
        max_tokens = int(length * FULL_SHARE)
        while True:
            is_last = len(messages) == 1
            try:
                ids = self._encode(messages)
            except PromptTooLongError:
                if is_last:
                    raise
            else:
                if is_last or len(ids) <= max_tokens:
                    break
            messages, max_tokens = messages[2:], int(length * KEPT_SHARE)
        if len(messages) < given:
            _note(f"the context is full: the oldest {given - len(messages)} messages are dropped")
        return messages, ids

    def _encode(self, messages: Messages) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._llm.encode(Conversation([*system, *messages], template_kwargs=self._template_kwargs))


class _Printer:
    """Prints an answer as it is generated, and collects it as a message of the history."""

    def __init__(self) -> None:
        self._text = self._reasoning = ""

    def write(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, ReasoningPiece):
                self._reasoning += piece.text
                _dim(piece.text)
            elif isinstance(piece, TextPiece):
                if self._reasoning and not self._text:
                    _dim("\n\n")
                self._text += piece.text
                print(piece.text, end="", flush=True)

    @property
    def message(self) -> dict[str, Any]:
        reasoning = {"reasoning_content": self._reasoning} if self._reasoning else {}
        return {"role": "assistant", "content": self._text, **reasoning}


def _dim(text: str) -> None:
    shown = f"{DIM}{text}{PLAIN}" if sys.stderr.isatty() else text
    print(shown, end="", file=sys.stderr, flush=True)


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr)
