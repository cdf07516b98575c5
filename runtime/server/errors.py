"""Errors of requests in OpenAI's format: {"error": {"message", "type", "param", "code"}}.

Messages are written for clients: they never contain the text of an unexpected exception, a path or an address.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from enginewright.errors import EngineDeadError, EngineError, UsageError
from enginewright.runtime.core.outputs import GRAMMAR, NAN_LOGITS
from enginewright.runtime.core.prompts import PromptTooLongError
from enginewright.runtime.sampling.parameters import SamplingParams

MAX_MESSAGE_CHARS = 1000
OVERLOAD_RETRY_S = 1  # Retry-After of an overload, in seconds

OF_TEXTS = ("dimensions", "prompt_name", "text_1", "text_2", "truncate_prompt_tokens")  # keys of embeddings and scores

Headers = Sequence[tuple[bytes, bytes]]


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        status: the HTTP status.
        message: the text for people.
        param: the key of the body that is wrong, with its path: messages[0].content.
        code: the code for programs.
        headers: further headers of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Headers = ()
    ) -> None:
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
        self.headers = headers
        super().__init__(message)

    @property
    def type(self) -> str:
        """Type of the error in OpenAI's API."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def renamed(self, renames: Mapping[str, str]) -> "ApiError":
        """Renames keys in `param` and at the start of the message, for an API with other names.

        Args:
            renames: regular expressions of keys, with their names in that API.
        """
        for key, name in renames.items():
            if self.param is not None and re.match(key, self.param):
                param, text = (re.sub(f"^{key}", name, one) for one in (self.param, self.message))
                return ApiError(self.status, text, param=param, code=self.code, headers=self.headers)
        return self

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def retry_after(seconds: float) -> Headers:
    """The Retry-After header, at least one second."""
    return [(b"retry-after", b"%d" % max(round(seconds), 1))]


def overloaded(what: str) -> ApiError:
    """429, the server is overloaded."""
    return ApiError(
        429, f"the server is busy: {what}; try again later", code="overloaded", headers=retry_after(OVERLOAD_RETRY_S)
    )


def shutting_down(drain_seconds: float) -> ApiError:
    """503, the server is shutting down."""
    return ApiError(503, "the server is shutting down", code="server_shutdown", headers=retry_after(drain_seconds))


def internal() -> ApiError:
    """500, an unexpected failure; only the log has details."""
    return ApiError(500, "the server has failed; its log says why", code="internal_error")


def answer_error(stop_reason: int | str | None) -> ApiError:
    """Error of an answer that failed by itself.

    Args:
        stop_reason: the stop reason of the failed answer.
    """
    if stop_reason == NAN_LOGITS:
        return ApiError(500, "the model's logits are not numbers", code=NAN_LOGITS)
    if stop_reason == GRAMMAR:
        return ApiError(400, "following the answer's grammar takes too long: make it simpler", code=GRAMMAR)
    return internal()


def from_engine(error: EngineError, prompt_key: str) -> ApiError:
    """Converts an error of the runtime into the error for the client.

    Args:
        error: the error.
        prompt_key: the key of the body with the prompt. Texts of the runtime start with "the prompt" or the name of a
            sampling parameter.
    """
    if isinstance(error, EngineDeadError):
        return ApiError(500, "the engine has failed", code="engine_dead")
    if not isinstance(error, UsageError):
        return internal()
    text = ": ".join(part for part in (error.what, error.why) if part)  # error.fix is about the command line
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    first = prompt_key if text.startswith("the prompt ") else text.partition(" ")[0]
    others = ("chat_template_kwargs", "kv_transfer_params", "priority", *OF_TEXTS)
    known = (prompt_key, *others, *SamplingParams.__dataclass_fields__)
    param = first if first in known else None
    return ApiError(400, text, param=param, code=code)


@contextmanager
def error_context(prompt_key: str, renames: Mapping[str, str]) -> Iterator[None]:
    """Converts errors raised within it to ApiErrors with an API's own names of keys.

    Args:
        prompt_key: the key of the body with the prompt.
        renames: names of keys in this API, as of a Form.
    """
    try:
        yield
    except UsageError as error:
        raise from_engine(error, prompt_key).renamed(renames) from None
    except ApiError as error:
        raise error.renamed(renames) from None
