"""Responses and errors as Anthropic's API has them."""

from typing import Any

import msgspec

from enginewright.runtime.server.anthropic_body import RENAMES
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, Usage, encode, typed_event
from enginewright.runtime.server.parts import Part, PartsForm
from enginewright.runtime.text.messages.calls import Call
from enginewright.runtime.text.messages.history import INVALID_JSON
from enginewright.runtime.text.messages.parser import Reasoning

OVERLOADED = 529  # Anthropic's status of a server that takes no work just now
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicError(ApiError):
    """{"type": "error", "error": {"type", "message"}}."""

    @classmethod
    def of(cls, error: ApiError) -> "AnthropicError":
        status = OVERLOADED if error.status == 503 else error.status
        return cls(status, error.message, param=error.param, code=error.code, headers=error.headers)

    @property
    def type(self) -> str:
        return ERROR_TYPES.get(self.status, "invalid_request_error")

    @property
    def body(self) -> bytes:
        return encode({"type": "error", "error": {"type": self.type, "message": self.message}})


class MessagesForm(PartsForm):
    id_prefix = "msg_"
    prompt_key = "messages"
    renames = RENAMES

    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        usage = _usage(Usage(len(choice.prompt.token_ids), 0, cached_tokens))
        start = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        return typed_event("message_start", message=start) + typed_event("ping")

    def _begin(self, part: Part) -> bytes:
        return typed_event("content_block_start", index=part.index, content_block=self._block(part, whole=False))

    def _growth(self, part: Part) -> bytes:
        kind, key = "text_delta", "text"
        if part.kind is Call:
            kind, key = "input_json_delta", "partial_json"
        elif part.kind is Reasoning:
            kind, key = "thinking_delta", "thinking"
        return self._delta(part, {"type": kind, key: part.texts[-1]})

    def _end(self, part: Part, *, is_cut: bool) -> bytes:
        stop = typed_event("content_block_stop", index=part.index)
        if part.kind is not Reasoning:
            return stop
        return self._delta(part, {"type": "signature_delta", "signature": self.id}) + stop

    def _delta(self, part: Part, delta: dict[str, Any]) -> bytes:
        return typed_event("content_block_delta", index=part.index, delta=delta)

    def _closing(self, choice: Choice, usage: Usage) -> bytes:
        delta = typed_event("message_delta", delta=self._reasons(choice), usage=_usage(usage))
        return delta + typed_event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + AnthropicError.of(error).body + b"\n\n"

    def _body(self, choice: Choice, usage: Usage) -> bytes:
        blocks = [self._block(part, whole=True) for part in self._parts]
        return encode(self._message(blocks, **self._reasons(choice), usage=_usage(usage)))

    def _message(self, content: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return about | {"content": content} | keys

    def _block(self, part: Part, *, whole: bool) -> dict[str, Any]:
        """A block of the answer, or its beginning. Clients keep no thinking that is not signed: the id is enough."""
        if part.kind is Call:
            return {
                "type": "tool_use",
                "id": part.call_id,
                "name": part.name,
                "input": _input(part.text) if whole else {},
            }
        text = part.text if whole else ""
        if part.kind is Reasoning:
            return {"type": "thinking", "thinking": text, "signature": self.id if whole else ""}
        return {"type": "text", "text": text}

    def _reasons(self, choice: Choice) -> dict[str, Any]:
        if choice.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(part.kind is Call for part in self._parts):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """Arguments as they are written. Those that were cut off, or that JSON parsers refuse, such as 1e999 and halves of
    surrogate pairs, are under the key that Anthropic wants such in.
    """
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {INVALID_JSON: arguments} if arguments else {}
    return msgspec.Raw(arguments.encode())


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens from the prefix cache are counted apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **usage.phases,
    }
