"""POST /v1/completions: a text goes on."""

from collections.abc import Sequence
from typing import Any

from enginewright.runtime.prompts import Prompt
from enginewright.runtime.sampling import SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, Form, encode, shown
from enginewright.runtime.server.protocol import COMPLETION_TOKENS, Body


class CompletionBody(Body, kw_only=True):
    """prompt: a text, token ids, or several of either."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        """Raises ApiError where text and token ids are mixed, or there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(one) for one in self.prompt}
        if len(kinds) != 1:
            why = "is empty" if not kinds else "mixes texts, token ids and lists of them"
            raise ApiError(400, f"prompt {why}", param="prompt", code="invalid_type")
        return [self.prompt] if kinds == {int} else list(self.prompt)  # type: ignore[list-item, arg-type]

    def params(self) -> dict[str, Any]:
        given = {**self.sampling(), "max_tokens": self.max_tokens, "logprobs": self.logprobs}
        return {**given, "max_tokens": COMPLETION_TOKENS} if self.max_tokens is None else given


class CompletionForm(Form):
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_key = "prompt"

    def opening(self, choice: Choice) -> bytes:
        return b""

    def _piece(self, text: str) -> bytes:
        return b',"text":' + encode(text)

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """text_offset counts characters of the answer."""
        texts = [self._token_text(drawn.token) for drawn in tokens]
        offsets = []
        for text in texts:
            offsets.append(choice.num_chars)
            choice.num_chars += len(text)
        top = []
        for text, drawn in zip(texts, tokens, strict=True):
            named: dict[str, float] = {}
            for token, logprob in drawn.top_logprobs:
                named.setdefault(self._token_text(token), shown(logprob))  # of two tokens with one text, the likelier
            named.setdefault(text, shown(drawn.logprob))
            top.append(named)
        return {
            "tokens": texts,
            "token_logprobs": [shown(drawn.logprob) for drawn in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }
