"""Responses in the format of OpenAI's Responses API."""

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec

from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, Include, Usage, encode, typed_event
from enginewright.runtime.server.parts import Part, PartsForm
from enginewright.runtime.server.responses_body import PREFIXES, RENAMES, ResponsesRequest
from enginewright.runtime.server.responses_store import StoredResponse
from enginewright.runtime.text.messages.calls import CallPiece
from enginewright.runtime.text.messages.parser import ReasoningPiece, TextPiece
from enginewright.runtime.text.tokenizer import Tokenizer


class ResponsesForm(PartsForm):
    """Response of the Responses API: items for reasoning, text and calls.

    Args:
        request: the request.
        keep: stores a response by its id, once it is complete.
        id: the id of the response.
        model: the model's name in the response.
        fingerprint: identifies the engine.
        tokenizer: the engine's tokenizer.
        include: optional parts of the response.
    """

    id_prefix = "resp_"
    prompt_key = "input"
    renames = RENAMES

    def __init__(
        self,
        request: ResponsesRequest,
        keep: Callable[[str, StoredResponse], None],
        id: str,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        include: Include,
    ) -> None:
        super().__init__(id, model, fingerprint, tokenizer, include)
        self._request, self._keep = request, keep
        self._num_events = 0
        self._stored: StoredResponse | None = None  # complete response, if it is kept
        self._written: defaultdict[Part, list[list[msgspec.Raw]]] = defaultdict(
            list
        )  # JSON of log-probabilities by part and text

    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        """The events at the start of a response."""
        response = self._response("in_progress", None)
        return b"".join(self._event(f"response.{name}", response=response) for name in ("created", "in_progress"))

    def _begin(self, part: Part) -> bytes:
        empty: dict[str, Any] = {"arguments": ""} if part.kind is CallPiece else {"content": []}
        item = self._item(part, "in_progress") | empty
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind is CallPiece:
            return added
        return added + self._part_event("content_part.added", part, part=self._content(part, len(part.texts)))

    def _growth(self, part: Part) -> bytes:
        return self._part_event(f"{_stem(part)}.delta", part, delta=part.texts[-1], **self._logprobs(part, -1))

    def _end(self, part: Part, *, is_cut: bool) -> bytes:
        if part.kind is CallPiece:
            events = [self._part_event(f"{_stem(part)}.done", part, name=part.name, arguments=part.text)]
        else:
            events = [self._part_event(f"{_stem(part)}.done", part, text=part.text, **self._logprobs(part))]
            events.append(self._part_event("content_part.done", part, part=self._content(part)))
        item = self._item(part, "incomplete" if is_cut else "completed")
        events.append(self._event("response.output_item.done", output_index=part.index, item=item))
        return b"".join(events)

    def _closing(self, choice: Choice, usage: Usage) -> bytes:
        return self._event(f"response.{_status(choice)}", response=self._complete(choice, usage))

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        failed = {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=self._response("failed", None) | failed)

    def _body(self, choice: Choice, usage: Usage) -> bytes:
        return encode(self._complete(choice, usage) | self._transfer_keys)

    def _complete(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        """The complete response."""
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if choice.finish_reason == "length" else {}
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **usage.phases,
        }
        ended = {"completed_at": int(time.time()), "usage": counts}
        response = self._response(_status(choice), choice) | details | ended
        if self._request.is_stored:
            self._stored = StoredResponse(encode(response), encode(self._request.items))
        return response

    def ended(self) -> None:
        """Stores the response."""
        if self._stored is not None:
            self._keep(self.id, self._stored)

    def _response(self, status: str, choice: Choice | None) -> dict[str, Any]:
        """The response; `choice` is None until the answer has ended."""
        last = self._parts[-1] if self._parts else None
        output = [self._item(part, _status(choice) if part is last else "completed") for part in self._parts]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **self._request.about,
        }

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        kind = _kind(part)
        item: dict[str, Any] = {"id": _item_id(part), "type": kind, "status": status}
        if kind == "function_call":
            return item | {"call_id": part.call_id, "name": part.name, "arguments": part.text}
        own: dict[str, Any] = (
            {"summary": [], "encrypted_content": None} if kind == "reasoning" else {"role": "assistant"}
        )
        return item | own | {"content": [self._content(part)]}

    def _content(self, part: Part, first: int = 0) -> dict[str, Any]:
        """Content of a part, from the text with number `first` on."""
        text = "".join(part.texts[first:])
        if part.kind is ReasoningPiece:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], **self._logprobs(part, first)}

    def _logprobs(self, part: Part, first: int = 0) -> dict[str, Any]:
        """Log-probabilities of a part's texts from `first` on; the key is required even if they are not included."""
        if part.kind is not TextPiece:
            return {}
        written = self._written[part]
        for tokens in part.tokens[len(written) :]:  # encoded once, since several events repeat it
            written.append([msgspec.Raw(encode(self._scored(token))) for token in tokens])
        return {"logprobs": list(chain.from_iterable(written[first:]))}

    def _part_event(self, name: str, part: Part, /, **keys: Any) -> bytes:
        place = {} if part.kind is CallPiece else {"content_index": 0}
        return self._event(f"response.{name}", item_id=_item_id(part), output_index=part.index, **place, **keys)

    def _event(self, type: str, /, **keys: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return typed_event(type, sequence_number=number, **keys)


def _status(choice: Choice | None) -> str:
    """Status of a response and of its last item."""
    return "incomplete" if choice is None or choice.finish_reason == "length" else "completed"


def _stem(part: Part) -> str:
    """Prefix of the names of events about a part."""
    if part.kind is CallPiece:
        return "function_call_arguments"
    return "reasoning_text" if part.kind is ReasoningPiece else "output_text"


def _item_id(part: Part) -> str:
    return f"{PREFIXES[_kind(part)]}{part.id}"


def _kind(part: Part) -> str:
    return "function_call" if part.kind is CallPiece else "reasoning" if part.kind is ReasoningPiece else "message"
