"""Renders a model's chat template in a process that can be stopped (template_worker.py)."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from enginewright.errors import EngineError, UsageError, shorten
from enginewright.runtime.text.messages.history import forms, shows_cut_arguments
from enginewright.runtime.text.tokenizer import SPECIAL_TOKENS, TEMPLATE_NAMES
from enginewright.runtime.text.worker_process import WorkerProcess

MAX_TEMPLATE_CHARS = 1 << 20
# Names that template_kwargs may not set: they come from the request or the engine, or templates rely on them.
RESERVED_NAMES = frozenset((*SPECIAL_TOKENS, *TEMPLATE_NAMES, "raise_exception", "strftime_now"))


class ChatTemplate:
    """A compiled template in a process of its own, which is restarted if the template had to be stopped.

    It may be used from any thread, and renders one conversation at a time.

    Args:
        source: the template in Jinja.
        now: gives the time that the template may print.

    Raises:
        EngineError: the template is too long, or is not valid Jinja.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(
                "the chat template is too long", f"{len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}"
            )
        self._now = now
        self._worker = WorkerProcess("enginewright.runtime.text.template_worker", source)
        if why := self._worker.start():
            raise EngineError("the chat template cannot be read", *why.values())

    def close(self) -> None:
        """Ends the process that renders."""
        self._worker.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: the messages, oldest first.
            names: the special tokens, by the names of template variables.
            add_generation_prompt: whether the text ends with the start of the model's message.
            template_kwargs: further variables, such as Qwen3's enable_thinking.

        Returns:
            The text of the prompt.

        Raises:
            UsageError: the template refuses the messages, they contain values that JSON does not have, or a name is
                reserved.
            EngineError: the template fails, or takes too long or too much memory.
            WorkerLostError: the process that renders was killed from outside, twice.
        """
        given = {} if template_kwargs is None else template_kwargs
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise UsageError(f"chat_template_kwargs is {shorten(given)}", "it must have values by name")
        if reserved := sorted(RESERVED_NAMES & set(given)):
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(reserved)}", "the name is reserved")
        variables = {**given, **names, "add_generation_prompt": add_generation_prompt}
        replies = list[dict[str, str]]()
        for form in forms(list(messages)):  # usually, the first form is rendered
            reply = self._ask({**variables, "messages": form})
            if "too_long" in reply or ("text" in reply and shows_cut_arguments(reply["text"], messages)):
                replies = [reply]
                break
            replies.append(reply)
        match next((reply for reply in replies if "text" in reply), replies[0]):
            case {"text": text}:
                return str(text)
            case {"refused": why}:
                raise UsageError("the model's chat template refuses these messages", why)
            case {"too_long": why}:
                raise EngineError("the chat template does not end", why)
            case reply:
                raise EngineError("the chat template failed", reply["failed"])

    def _ask(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """The template's reply to a conversation. Raises UsageError for values that JSON does not have."""
        try:
            conversation = json.dumps({"variables": variables, "now": self._now().isoformat()}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                "a message or a template argument has a value that JSON does not have", str(error)
            ) from error
        return self._worker.ask(conversation)
