"""POST /v1/completions: bodies and responses of text completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, ChoicesForm, Include, encode, shown
from enginewright.runtime.server.keys import known_keys
from enginewright.runtime.server.protocol import COMPLETION_TOKENS, UNREAD, Body, prompts_of
from enginewright.runtime.server.text_offsets import TextOffsets, prompt_offsets


class CompletionBody(Body, kw_only=True):
    """Body of a text completion request."""

    prompt: str | list[int | str | list[int]]  # text, token ids, or several of either
    logprobs: int | None = None  # number of likeliest tokens at each position of the answer
    echo: bool | None = None  # true repeats the prompt before the answer

    def prompts(self) -> list[Prompt]:
        """The prompts. Raises ApiError if text and token ids are mixed, or there is none."""
        return prompts_of(self.prompt, "prompt")

    def params(self) -> dict[str, Any]:
        """Arguments of default_params. Raises ApiError for combinations that are not supported."""
        if self.echo and self.logprobs is not None and self.use_beam_search:
            raise ApiError(400, "echo with logprobs cannot be combined with use_beam_search", param="echo")
        tokens = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        given = {**self.sampling(), "max_tokens": tokens, "logprobs": self.logprobs}
        if self.echo and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
        return given

    def include(self) -> Include:
        """Optional parts of the response."""
        shows_special = self.skip_special_tokens is False
        return replace(super().include(), echo=bool(self.echo), special_tokens=shows_special)


COMPLETION_KEYS = known_keys(CompletionBody, UNREAD)


class CompletionForm(ChoicesForm):
    """Response of a text completion."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_key = "prompt"

    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        """The event with the echoed prompt, if there is one."""
        if not self.include.echo:
            return b""
        logprobs = encode(self._prompt_logprobs(choice)) if self.include.logprobs else b"null"
        text = self._piece(choice.prompt.text)
        return self._event(choice, text + b',"logprobs":' + logprobs + b',"finish_reason":null')

    def _piece(self, text: str) -> bytes:
        return b',"text":' + encode(text)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        whole: dict[str, Any] = {"text": choice.prompt.text + choice.text if self.include.echo else choice.text}
        if self.include.prompt_logprobs:
            whole["prompt_logprobs"] = self.prompt_logprobs(choice.prompt)
        return whole

    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Log-probabilities of tokens, after those of the echoed prompt."""
        if not self.include.echo or choice.echoed:
            return self._answer_logprobs(choice, tokens)
        return _joined(self._prompt_logprobs(choice), self._answer_logprobs(choice, tokens))

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of the prompt's tokens; the first one has none, since nothing precedes it."""
        choice.echoed = True
        offsets = prompt_offsets(self._tokenizer, choice.prompt.token_ids, choice.prompt.text)
        first = self._token_text(choice.prompt.token_ids[0])
        alone = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": offsets[:1]}
        scored = [token for token in choice.prompt.logprobs if token is not None]
        return _joined(alone, self._of_tokens(scored, offsets[1:]))

    def _answer_logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Log-probabilities of an answer's tokens; text_offset counts an echoed prompt, too."""
        if choice.offsets is None:
            start = len(choice.prompt.text) if self.include.echo else 0
            skip = not self.include.special_tokens
            ids = choice.prompt.token_ids
            choice.offsets = TextOffsets(self._tokenizer, ids, start, skip_special_tokens=skip)
        return self._of_tokens(tokens, [choice.offsets.push(sampled.token) for sampled in tokens])

    def _of_tokens(self, tokens: Sequence[SampledToken], offsets: Sequence[int]) -> dict[str, Any]:
        texts = [self._token_text(sampled.token) for sampled in tokens]
        top = []
        for text, sampled in zip(texts, tokens, strict=True):
            named: dict[str, float] = {}
            for token, logprob in sampled.top_logprobs:
                named.setdefault(self._token_text(token), shown(logprob))  # two tokens with one text: the likelier
            named.setdefault(text, shown(sampled.logprob))
            top.append(named)
        return {
            "tokens": texts,
            "token_logprobs": [shown(sampled.logprob) for sampled in tokens],
            "top_logprobs": top,
            "text_offset": list(offsets),
        }


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}
