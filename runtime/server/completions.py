"""POST /v1/completions: a text goes on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.sampling.sampling import SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, ChoicesForm, Include, encode, shown
from enginewright.runtime.server.keys import known_of
from enginewright.runtime.server.protocol import COMPLETION_TOKENS, UNREAD, Body, prompts_of
from enginewright.runtime.server.text_offsets import TextOffsets, prompt_offsets


class CompletionBody(Body, kw_only=True):
    """prompt: a text, token ids, or several of either."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None  # begin the answer with the prompt

    def prompts(self) -> list[Prompt]:
        """Raises ApiError where text and token ids are mixed, or there is none."""
        return prompts_of(self.prompt, "prompt")

    def params(self) -> dict[str, Any]:
        if self.echo and self.logprobs is not None and self.use_beam_search:
            raise ApiError(400, "echo with logprobs cannot be combined with use_beam_search", param="echo")
        tokens = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        given = {**self.sampling(), "max_tokens": tokens, "logprobs": self.logprobs}
        if self.echo and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
        return given

    def include(self) -> Include:
        shows_special = self.skip_special_tokens is False
        return replace(super().include(), echo=bool(self.echo), special_tokens=shows_special)


COMPLETION_KEYS = known_of(CompletionBody, UNREAD)


class CompletionForm(ChoicesForm):
    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_key = "prompt"

    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        if not self.include.echo:
            return b""
        logprobs = encode(self._of_prompt(choice)) if self.include.logprobs else b"null"
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
        if not self.include.echo or choice.echoed:
            return self._of_answer(choice, tokens)
        return _joined(self._of_prompt(choice), self._of_answer(choice, tokens))

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """Of the prompt's tokens; nothing comes before the first one, so it has no log-probability."""
        choice.echoed = True
        offsets = prompt_offsets(self._tokenizer, choice.prompt.token_ids, choice.prompt.text)
        first = self._token_text(choice.prompt.token_ids[0])
        alone = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": offsets[:1]}
        scored = [token for token in choice.prompt.logprobs if token is not None]
        return _joined(alone, self._of_tokens(scored, offsets[1:]))

    def _of_answer(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """text_offset counts characters of the answer, and of the prompt before it if that is echoed."""
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
                named.setdefault(self._token_text(token), shown(logprob))  # of two tokens with one text, the likelier
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
