"""Responses and errors in the format of Anthropic's API."""

from typing import Any

import msgspec

from enginewright.runtime.server.anthropic_body import RENAMES
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, Usage, encode, typed_event
from enginewright.runtime.server.parts import Part, PartsForm
from enginewright.runtime.text.messages.calls import CallPiece
from enginewright.runtime.text.messages.history import INVALID_JSON
from enginewright.runtime.text.messages.parser import ReasoningPiece

OVERLOADED = 529  # Anthropic's HTTP status of a server that accepts no work at the moment
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicError(ApiError):
    """Error as JSON: {"type": "error", "error": {"type", "message"}}."""

    @classmethod
    def of(cls, error: ApiError) -> "AnthropicError":
        """Converts an error of the other APIs."""
        status = OVERLOADED if error.status == 503 else error.status
        return cls(status, error.message, param=error.param, code=error.code, headers=error.headers)

    @property
    def type(self) -> str:
        """Type of the error in Anthropic's API."""
        return ERROR_TYPES.get(self.status, "invalid_request_error")

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        return encode({"type": "error", "error": {"type": self.type, "message": self.message}})


class MessagesForm(PartsForm):
    """Response of Anthropic's API: a message of content blocks."""

    id_prefix = "msg_"
    prompt_key = "messages"
    renames = RENAMES

    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        """The events at the start of a message."""
        usage = _usage(Usage(len(choice.prompt.token_ids), 0, cached_tokens))
        start = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        return typed_event("message_start", message=start) + typed_event("ping")

    def _begin(self, part: Part) -> bytes:
        return typed_event("content_block_start", index=part.index, content_block=self._block(part, whole=False))

    def _growth(self, part: Part) -> bytes:
        kind, key = "text_delta", "text"
        if part.kind is CallPiece:
            kind, key = "input_json_delta", "partial_json"
        elif part.kind is ReasoningPiece:
            kind, key = "thinking_delta", "thinking"
        return self._delta(part, {"type": kind, key: part.texts[-1]})

    def _end(self, part: Part, *, is_cut: bool) -> bytes:
        stop = typed_event("content_block_stop", index=part.index)
        if part.kind is not ReasoningPiece:
            return stop
        return self._delta(part, {"type": "signature_delta", "signature": self.id}) + stop

    def _delta(self, part: Part, delta: dict[str, Any]) -> bytes:
        return typed_event("content_block_delta", index=part.index, delta=delta)

    def _closing(self, choice: Choice, usage: Usage) -> bytes:
        delta = typed_event("message_delta", delta=self._reasons(choice), usage=_usage(usage))
        return delta + typed_event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        return b"event: error\ndata: " + AnthropicError.of(error).body + b"\n\n"

    def _body(self, choice: Choice, usage: Usage) -> bytes:
        blocks = [self._block(part, whole=True) for part in self._parts]
        return encode(self._message(blocks, **self._reasons(choice), usage=_usage(usage), **self._transfer_keys))

    def _message(self, content: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return about | {"content": content} | keys

    def _block(self, part: Part, *, whole: bool) -> dict[str, Any]:
        """A block of the answer, or its start.

        Clients drop thinking without a signature; the response's id serves as one.
        """
        if part.kind is CallPiece:
            return {
                "type": "tool_use",
                "id": part.call_id,
                "name": part.name,
                "input": _input(part.text) if whole else {},
            }
        text = part.text if whole else ""
        if part.kind is ReasoningPiece:
            return {"type": "thinking", "thinking": text, "signature": self.id if whole else ""}
        return {"type": "text", "text": text}

    def _reasons(self, choice: Choice) -> dict[str, Any]:
        if choice.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(part.kind is CallPiece for part in self._parts):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """Arguments of a call as the model wrote them.

    Arguments that were cut off, or that JSON parsers refuse, such as 1e999 and unpaired surrogates, are returned under
    the key that Anthropic defines for them.
    """
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {INVALID_JSON: arguments} if arguments else {}
    return msgspec.Raw(arguments.encode())


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts; tokens from the prefix cache are counted apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **usage.phases,
    }
