"""Refusals and failures in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

What clients read is written for them: never the text of an unexpected exception, a path or an address.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from enginewright.errors import EngineDeadError, EngineError, UsageError
from enginewright.runtime.core.outputs import GRAMMAR, NAN_LOGITS
from enginewright.runtime.core.prompts import PromptTooLongError
from enginewright.runtime.sampling.sampling import SamplingParams

MAX_MESSAGE_CHARS = 1000
OVERLOAD_RETRY_S = 1

OF_TEXTS = ("dimensions", "prompt_name", "text_1", "text_2", "truncate_prompt_tokens")  # keys of embeddings and scores

Headers = Sequence[tuple[bytes, bytes]]


class ApiError(Exception):
    """An error that a client gets to read.

    Args:
        status: of HTTP.
        param: the key of the body that is at fault, with its path: messages[0].content.
        code: for programs.
        headers: to be sent with it.
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
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def renamed(self, renames: Mapping[str, str]) -> "ApiError":
        """The same error for an API whose keys have other names: what is wrong begins with the key that is.

        Args:
            renames: the other name by a regular expression of the key.
        """
        for key, name in renames.items():
            if self.param is not None and re.match(key, self.param):
                param, text = (re.sub(f"^{key}", name, one) for one in (self.param, self.message))
                return ApiError(self.status, text, param=param, code=self.code, headers=self.headers)
        return self

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def retry_after(seconds: float) -> Headers:
    return [(b"retry-after", b"%d" % max(round(seconds), 1))]


def overloaded(what: str) -> ApiError:
    return ApiError(
        429, f"the server is busy: {what}; try again later", code="overloaded", headers=retry_after(OVERLOAD_RETRY_S)
    )


def shutting_down(drain_seconds: float) -> ApiError:
    return ApiError(503, "the server is shutting down", code="server_shutdown", headers=retry_after(drain_seconds))


def internal() -> ApiError:
    return ApiError(500, "the server has failed; its log says why", code="internal_error")


def of_answer(stop_reason: int | str | None) -> ApiError:
    """The error of an answer that has failed alone."""
    if stop_reason == NAN_LOGITS:
        return ApiError(500, "the model's logits are not numbers", code=NAN_LOGITS)
    if stop_reason == GRAMMAR:
        return ApiError(400, "to follow the answer's grammar takes too long: make it simpler", code=GRAMMAR)
    return internal()


def from_engine(error: EngineError, prompt_key: str) -> ApiError:
    """The error that a client gets for one of the runtime.

    Args:
        prompt_key: of the body. What the runtime says begins with "the prompt" or the name of a sampling parameter.
    """
    if isinstance(error, EngineDeadError):
        return ApiError(500, "the engine has failed", code="engine_dead")
    if not isinstance(error, UsageError):
        return internal()
    text = ": ".join(part for part in (error.what, error.why) if part)  # error.fix speaks of the command line
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    first = prompt_key if text.startswith("the prompt ") else text.partition(" ")[0]
    known = (prompt_key, "chat_template_kwargs", "priority", *OF_TEXTS, *SamplingParams.__dataclass_fields__)
    param = first if first in known else None
    return ApiError(400, text, param=param, code=code)


@contextmanager
def speaking_of(prompt_key: str, renames: Mapping[str, str]) -> Iterator[None]:
    """What is raised within, as an ApiError that has an API's own names for the keys of a chat.

    Args:
        prompt_key, renames: as of a Form.
    """
    try:
        yield
    except UsageError as error:
        raise from_engine(error, prompt_key).renamed(renames) from None
    except ApiError as error:
        raise error.renamed(renames) from None
